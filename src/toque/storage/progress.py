"""Progress callbacks of long transfers and of preparing data."""

from __future__ import annotations

from collections.abc import Callable

ProgressSink = Callable[[int, int, str], None]
"""Function called with (bytes done, bytes in total, what is being done)."""


def no_progress(_done: int, _total: int, _message: str) -> None:
    """The default sink: reports nothing."""
