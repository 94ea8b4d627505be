"""Training session in a forked process, which a test can stop or kill.

The parent must not have computed anything with torch, because a forked child does not inherit the
threads that torch then has.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from toque.storage.no_follow import open_append

if TYPE_CHECKING:
    from toque.training.observers.watchers import RunState

_POLL_SECONDS = 0.002


class StopAt:
    """Callback that ends a session at a step without changing the schedules of the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state: RunState) -> str | None:
        """Stop at the step or later."""
        return "stop" if state.step >= self.step else None

    on_train_begin = on_step_end  # a session may begin at the step


class Session:
    """A child process that trains, with its output in `log`. `body` returns its exit code."""

    def __init__(self, body: Callable[[], int], log: Path) -> None:
        self.log = log
        self._process = multiprocessing.get_context("fork").Process(
            target=_run_with_log, args=(body, log)
        )
        self._process.start()

    @property
    def code(self) -> int | None:
        """Exit code, negative after a fatal signal; None while the process runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """Wait for the end. Return the exit code."""
        self._process.join()
        assert self.code is not None
        return self.code

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition. Return False if the session ends first."""
        while not condition():
            if self.code is not None:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.code is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill_after(self, seconds: float) -> bool:
        """Wait and send SIGKILL. Return False if the session ends first."""
        self._process.join(seconds)
        self.send(signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    def read_log(self) -> str:
        """Return the output so far."""
        if not self.log.exists():
            return ""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def last_lines(self) -> str:
        """Return the last three lines of the output."""
        return " ".join(self.read_log().strip().splitlines()[-3:])


def _run_with_log(body: Callable[[], int], log: Path) -> None:
    """Run a function with standard output and standard error in `log`. Exit with its result."""
    descriptor = open_append(log)
    for standard_stream in (1, 2):
        os.dup2(descriptor, standard_stream)
    sys.exit(body())
