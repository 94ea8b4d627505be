"""Signal handlers that are set for some time. This module does not import torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a process to stop."""


@contextmanager
def handling_signals(
    handler: Callable[[int, FrameType | None], None],
) -> Iterator[None]:
    """Call `handler` for signals that ask to stop, until the context ends.

    Ignored signals remain ignored. Python allows handlers only in the main thread. In another
    thread nothing changes.
    """
    previous_handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous_handlers[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            # None is a handler that was not set from Python, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


@contextmanager
def exiting_on_signal() -> Iterator[None]:
    """Exit with 128 plus the signal's number, so that temporary files are removed first.

    By default, SIGTERM and SIGHUP end Python immediately. Ctrl-C still raises KeyboardInterrupt.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    with handling_signals(leave):
        yield
