"""Signal handlers that are set for some time and then restored. Torch is not imported."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a process to stop."""
Handlers = Mapping[signal.Signals, Any]


def set_handlers(handler: Callable[[int, FrameType | None], None]) -> Handlers:
    """Handle the signals that ask to stop and are not ignored. Return their previous handlers.

    Python allows handlers only in the main thread. In another thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    handled = [
        number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
    ]
    return {number: signal.signal(number, handler) for number in handled}


def restore_handlers(previous_handlers: Handlers) -> None:
    """Restore the handlers that `set_handlers` returned."""
    for number, handler in previous_handlers.items():
        # None is a handler that was not set from Python, which Python cannot restore.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def handling_signals(
    handler: Callable[[int, FrameType | None], None],
) -> Iterator[None]:
    """Call `handler` for signals that ask to stop, until the context ends."""
    previous_handlers = set_handlers(handler)
    try:
        yield
    finally:
        restore_handlers(previous_handlers)
