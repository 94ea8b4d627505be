"""Reporters: receivers of the messages and the progress of a workflow. The default is silent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

COLUMNS = 120
"""Characters per line if the output is not a terminal, enough for a message with a path."""
ProgressSink = Callable[[int, int, str], None]
"""Function called with (bytes done, total bytes, name of the activity)."""


def no_progress(_done: int, _total: int, _message: str) -> None:
    """Ignore progress. This is the default progress sink."""


class Reporter:
    """Receiver of messages and progress, which discards them. Subclasses display them.

    A reporter does not change the behaviour of a workflow.
    """

    @property
    def heard(self) -> bool:
        """True if a person reads the messages. False for a log file."""
        return self is not SILENT

    @property
    def lost(self) -> str | None:
        """Reason why a message could not be displayed. None if all were displayed."""
        return None

    @property
    def columns(self) -> int:
        """Characters per line, for shortening long texts."""
        return COLUMNS

    def line(self, text: str) -> None:
        """Receive a line of the result. A command prints it on standard output."""

    def notice(self, text: str) -> None:
        """Receive a message for the user. A command prints it on standard error."""

    def detail(self, text: str) -> None:
        """Receive lines for a log, which a command does not print."""

    def progress(
        self, text: str, *, done: int = 0, total: int = 0, keep: bool = False
    ) -> None:
        """Receive the current state of the work, which replaces the previous state.

        Args:
            text: The state. Empty at the end of the work.
            done: Number of finished units.
            total: Total number of units. If it is 0, no bar is displayed.
            keep: Write the state to the log as a line.
        """

    def working(self, text: str) -> AbstractContextManager[object]:
        """Receive the name of an activity that lasts as long as the context."""
        return nullcontext()


SILENT = Reporter()


@contextmanager
def counting(reporter: Reporter, doing: str, things: str) -> Iterator[Count]:
    """Report the progress of an activity by a count, until the context ends.

    >>> with counting(SILENT, "evaluating", "held-out examples") as count:
    ...     count(34, 293)
    """

    def count(done: int, total: int, share: float | None = None) -> None:
        text = f"{doing} {done:,} of {total:,} {things}"
        if share is None:
            reporter.progress(text, done=done, total=total)
        else:
            # Progress is counted in whole units, so a fraction is converted to thousandths.
            reporter.progress(text, done=round(1000 * share), total=1000)

    try:
        yield count
    finally:
        reporter.progress("")


class Count(Protocol):
    """Function called when some items are done."""

    def __call__(self, done: int, total: int, share: float | None = None, /) -> None:
        """Receive the number of finished items and of all items. `share` replaces done / total."""


def uncounted(done: int, total: int, share: float | None = None, /) -> None:
    """Ignore a count."""


def clock_text(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds.

    >>> clock_text(75), clock_text(4000)
    ('1:15', '1:06:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


def one_line(text: str, columns: int) -> str:
    r"""Shorten a text to one line of at most `columns` characters. Line breaks become spaces.

    >>> one_line("Ingredients:\n- 2 eggs\n- flour", 25)
    'Ingredients: - 2 eggs ...'
    """
    words = " ".join(text.split())
    if len(words) <= columns:
        return words
    return f"{words[: max(0, columns - 4)].rstrip()} ..."


def millions(n: float) -> str:
    """Format a number of parameters in millions.

    >>> millions(421_952), millions(1_208_000_000)
    ('0.4 M', '1,208.0 M')
    """
    return f"{n / 1e6:,.1f} M"


def size_text(n_bytes: float) -> str:
    """Format bytes in powers of 1,000.

    >>> size_text(12), size_text(1_234_000)
    ('12 bytes', '1.2 MB')
    """
    if n_bytes < 1000:
        return f"{n_bytes:,.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        n_bytes /= 1000
        if n_bytes < 1000:
            return f"{n_bytes:,.1f} {unit}"
    return f"{n_bytes / 1000:,.1f} TB"


class LogReporter(Reporter):
    """Reporter that appends lines, notices and logged progress to a text file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def line(self, text: str) -> None:
        """Append a line to the file. Symbolic links are not followed."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with os.fdopen(os.open(self.path, flags, 0o666), "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    notice = line
    detail = line

    def progress(
        self, text: str, *, done: int = 0, total: int = 0, keep: bool = False
    ) -> None:
        """Append the state if `keep` is set."""
        if keep:
            self.line(text)
