"""Signals: SIGTERM and Ctrl-C finish the step, save and stop; a second one exits at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any, Final

from toque.training.callbacks import Callback
from toque.training.events import Requests, RunEnd, RunStart, StepInfo
from toque.units import Progress

INTERRUPTED: Final = "interrupted"
"""`RunEnd.reason` after a signal; the command line then exits with 75."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_STANDARD_ERROR: Final = 2


class Interrupt(Callback):
    """The first signal becomes a request to stop, the second an exit.

    Handlers are set from `on_fit_start` to `on_fit_end` and only in the main thread, the only one
    in which Python allows it; in another thread signals keep their meaning.

    Args:
        silent: print nothing; another rank does.
        same_for_seconds: a second signal this soon counts as the first: torchrun forwards a
            signal that the terminal or the scheduler has already sent to every process.
    """

    def __init__(self, *, silent: bool = False, same_for_seconds: float = 0.0) -> None:
        self._silent, self._same_for_seconds = silent, same_for_seconds
        self._caught_at = 0.0
        self._before: dict[int, Any] = {}
        self._caught: signal.Signals | None = None

    def on_fit_start(self, start: RunStart) -> None:
        """Set the handlers."""
        self._caught = None
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._handle) for s in _SIGNALS}

    def on_step(self, info: StepInfo) -> Requests | None:
        """Ask to stop once a signal has come."""
        return self._request()

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> Requests | None:
        """Ask to stop once a signal has come."""
        return self._request()

    def on_fit_end(self, end: RunEnd) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._before.items():
            # None: a handler that was not set from Python, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _request(self) -> Requests | None:
        return Requests(stop=True, save=True, reason=INTERRUPTED) if self._caught else None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._caught is not None:
            if time.monotonic() - self._caught_at < self._same_for_seconds:
                return
            _say(f"\n{name} again: exiting at once. The last checkpoint is whole.\n")
            os._exit(128 + number)  # the shell's convention for death by a signal
        self._caught, self._caught_at = signal.Signals(number), time.monotonic()
        if not self._silent:
            _say(f"\n{name}: finishing this step, then saving. Once more exits at once.\n")


def _say(text: str) -> None:
    # Not print: a handler may interrupt one, and Python's streams are not re-entrant.
    os.write(_STANDARD_ERROR, text.encode())
