"""Reporter: how a workflow tells whoever watches what it does; silent unless one is given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Final, Protocol

COLUMNS: Final = 120
"""Letters of a line where no terminal says how many it has: a path fits."""
ProgressSink = Callable[[int, int, str], None]
"""Function called with (bytes done, bytes in total, what is being done)."""


def no_progress(_done: int, _total: int, _message: str) -> None:
    """The default sink: reports nothing."""


class Reporter:
    """Takes what a workflow has to say, and drops it; those that show it override the methods.

    Nothing of it changes what the workflow does.
    """

    @property
    def heard(self) -> bool:
        """True if a person sees the reports; False for a log file alone."""
        return self is not SILENT

    @property
    def lost(self) -> str | None:
        """Reason why something could not be shown; None while everything was."""
        return None

    @property
    def columns(self) -> int:
        """Letters of a line, to which a long text may be cut."""
        return COLUMNS

    def line(self, text: str) -> None:
        """Take a line of the result, which a command prints on standard output."""

    def notice(self, text: str) -> None:
        """Take a sentence for whoever watches, which a command prints on standard error."""

    def detail(self, text: str) -> None:
        """Take lines for a log; a command does not print them."""

    def progress(self, text: str, *, done: int = 0, total: int = 0, keep: bool = False) -> None:
        """Take where the work is, in place of what was there before; "" when it is over.

        Without a `total` there is no bar; what is to `keep` has a line of its own in a log.
        """

    def working(self, text: str) -> AbstractContextManager[object]:
        """Take what is being done for as long as the context lasts."""
        return nullcontext()


SILENT: Final = Reporter()


@contextmanager
def counting(reporter: Reporter, doing: str, things: str) -> Iterator[Count]:
    """Tell of a part of the work by its count, until the context ends.

    >>> with counting(SILENT, "evaluating", "held-out examples") as count:
    ...     count(34, 293)
    """

    def count(done: int, total: int, share: float | None = None) -> None:
        text = f"{doing} {done:,} of {total:,} {things}"
        if share is None:
            reporter.progress(text, done=done, total=total)
        else:
            reporter.progress(text, done=round(1000 * share), total=1000)

    try:
        yield count
    finally:
        reporter.progress("")


class Count(Protocol):
    """Called as things get done."""

    def __call__(self, done: int, total: int, share: float | None = None, /) -> None:
        """Take how many of how many are done, and of all the work the share, where it differs."""


def uncounted(done: int, total: int, share: float | None = None, /) -> None:
    """A count that nobody hears."""


def clock_text(seconds: float) -> str:
    """Hours, minutes and seconds for people.

    >>> clock_text(75), clock_text(4000)
    ('1:15', '1:06:40')
    """
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}:{minutes:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"


def one_line(text: str, columns: int) -> str:
    r"""A text in one line of at most so many letters, its line breaks as spaces.

    >>> one_line("Ingredients:\n- 2 eggs\n- flour", 25)
    'Ingredients: - 2 eggs ...'
    """
    words = " ".join(text.split())
    if len(words) <= columns:
        return words
    return f"{words[: max(0, columns - 4)].rstrip()} ..."


def millions(n: float) -> str:
    """A number of parameters, as every command prints it.

    >>> millions(421_952), millions(1_208_000_000)
    ('0.4 M', '1,208.0 M')
    """
    return f"{n / 1e6:,.1f} M"


def size_text(n_bytes: float) -> str:
    """Bytes for people, in powers of 1,000.

    >>> size_text(12), size_text(1_234_000)
    ('12 bytes', '1.2 MB')
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:,.0f} {unit}" if unit == "bytes" else f"{n_bytes:,.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.1f} TB"


class LogReporter(Reporter):
    """Appends lines, notices and the progress worth keeping to a text file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def line(self, text: str) -> None:
        """Append it to the file itself, never to what a link leads to."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with os.fdopen(os.open(self.path, flags, 0o666), "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    notice = line
    detail = line

    def progress(self, text: str, *, done: int = 0, total: int = 0, keep: bool = False) -> None:
        """Append it if it is to be kept."""
        if keep:
            self.line(text)
