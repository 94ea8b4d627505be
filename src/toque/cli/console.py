"""Console: a reporter for terminals and pipes, and the flags that arguments have there."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft
from rich.text import Text

from toque.cli.streams import ObservedStream

_BAR_SECONDS: Final = 0.1
_LINE_SECONDS: Final = 0.25
"""Between two drawings of what is live."""
_FLAGS: Final = {
    "start": "--from",
    "form": "--format",
    "prompts": "--prompt",
    "adapters": "--adapter",
}
"""Arguments whose flag has another name."""


def flag(name: str) -> str:
    """The flag of an argument, with its value if it has one.

    >>> flag("max_new_tokens"), flag("start"), flag("replace=True"), flag("steps=8")
    ('--max-new-tokens', '--from', '--replace', '--steps 8')
    """
    name, _, value = name.partition("=")
    word = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    return word if value in ("", "True") else f"{word} {value}"


def _standard_error() -> TextIO:
    """What is below the proxy that rich puts there while something live is drawn."""
    below: TextIO = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return below


class ConsoleReporter:
    """Lines on standard output; notices and what is under way on standard error.

    It is an observer: what cannot be written is dropped, and `lost` says why.

    Args:
        console: where notices and progress go; standard error unless given.
        progress: show what is under way; without it, only what stays.
        quiet: show the lines of a result alone, neither notices nor progress.
    """

    def __init__(
        self, console: Console | None = None, *, progress: bool = True, quiet: bool = False
    ) -> None:
        self._out = ObservedStream(lambda: sys.stdout, drop=True)
        self._errors = ObservedStream(_standard_error, drop=True)
        self._console = console or Console(file=cast("TextIO", self._errors))
        self._shows_progress, self._quiet = progress and not quiet, quiet
        self._live: Live | None = None
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._drawn = 0.0

    @property
    def lost(self) -> str | None:
        """Why something could not be written; None while everything could."""
        return self._errors.lost or self._out.lost

    def line(self, text: str) -> None:
        """Print on standard output at once."""
        print(text, file=self._out, flush=True)

    def notice(self, text: str) -> None:
        """Print on standard error, above what is live there."""
        if self._quiet:
            return
        # As Text: a file's name is not markup, and "[red]" is a possible one.
        self._console.print(Text(text), soft_wrap=True)

    def progress(self, text: str, *, done: int = 0, total: int = 0, keep: bool = False) -> None:
        """Draw on a terminal, a bar where a total is known; elsewhere print what is to be kept."""
        if not text or not self._shows_progress:
            self._stop()
        elif not self._console.is_terminal:
            if keep:
                self.notice(text)
        elif total or self._bar is not None:
            self._draw_bar(text, done, total)
        else:
            self._draw_line(text)

    def working(self, text: str) -> AbstractContextManager[object]:
        """Show a spinner on a terminal."""
        return self._console.status(text) if self._shows_progress else nullcontext()

    def _draw_line(self, text: str) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        if self._late(_LINE_SECONDS):
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _draw_bar(self, text: str, done: int, total: int) -> None:
        if self._bar is None:
            self._stop()
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
            # Refreshed by calls, not by a thread: only a process of one thread can be forked.
            self._bar = Progress(
                *columns, TimeLeft(), console=self._console, transient=True, auto_refresh=False
            )
            self._bar.start()
            self._task = self._bar.add_task(text, total=None)
        self._bar.update(
            self._task,
            completed=done,
            total=total or None,
            description=text,
            refresh=self._late(_BAR_SECONDS),
        )

    def _late(self, seconds: float) -> bool:
        now = time.monotonic()
        late = now - self._drawn >= seconds
        self._drawn = now if late else self._drawn
        return late

    def _stop(self) -> None:
        for live in (self._live, self._bar):
            if live is not None:
                live.stop()
        self._live = self._bar = None
        self._drawn = 0.0
