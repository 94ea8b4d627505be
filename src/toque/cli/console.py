"""Console: a reporter for terminals and pipes, and the flags that arguments have there."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft
from rich.text import Text

from toque.cli.streams import ObservedStream
from toque.reporter import clock_text

_BAR_SECONDS: Final = 0.1
_LINE_SECONDS: Final = 0.25
"""Between two drawings of what is live."""
_PATIENCE_SECONDS: Final = 2.0
"""What takes longer is told where nothing can be drawn, too."""
_AGAIN_SECONDS: Final = 30.0
"""Between two lines about what is under way, where nothing can be drawn."""
_FLAGS: Final = {
    "start": "--from",
    "form": "--format",
    "prompts": "--prompt",
    "adapters": "--adapter",
    "sources": "SOURCES",  # stands alone, without a flag
    "upload": "--no-upload",
    "try_levers": "--try",
}
"""Arguments whose flag has another name."""


def flag(name: str) -> str:
    """The flag of an argument, with its value if it has one.

    >>> flag("max_new_tokens"), flag("start"), flag("upload=False"), flag("steps=8")
    ('--max-new-tokens', '--from', '--no-upload', '--steps 8')
    """
    name, _, value = name.partition("=")
    word = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    return word if value in ("", "True", "False") else f"{word} {value}"


def _standard_error() -> TextIO:
    """What is below the proxy that rich puts there while something live is drawn."""
    below: TextIO = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return below


class ConsoleReporter:
    """Lines on standard output; notices and what is under way on standard error.

    What is under way is drawn on a terminal. In a pipe or a file a line tells of it after two
    seconds, and another every half minute. It is an observer: what cannot be written is dropped,
    and `lost` says why.

    Args:
        console: where notices and progress go; standard error unless given.
        progress: show what is under way; without it, only what stays.
        quiet: show the lines of a result alone, neither notices nor progress.
        clock: seconds that pass.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        progress: bool = True,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = ObservedStream(lambda: sys.stdout, drop=True)
        self._errors = ObservedStream(_standard_error, drop=True)
        self._console = console or Console(file=cast("TextIO", self._errors))
        self._shows_progress, self._quiet = progress and not quiet, quiet
        self._clock = clock
        self.patience = _PATIENCE_SECONDS
        self._began: float | None = None
        self._due = 0.0
        self._live: Live | None = None
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._drawn = float("-inf")

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
        """Draw on a terminal, a bar where a total is known; elsewhere print a line now and then."""
        if not text or not self._shows_progress:
            self._stop()
        elif not self._console.is_terminal:
            self._print_when_due(text, done, total, keep=keep)
        elif total or self._bar is not None:
            self._draw_bar(text, done, total)
        else:
            self._draw_line(text)

    def working(self, text: str) -> AbstractContextManager[object]:
        """Show a spinner on a terminal; elsewhere print a line if it takes long."""
        self._stop()
        if not self._shows_progress:
            return nullcontext()
        return self._console.status(text) if self._console.is_terminal else self._awaited(text)

    @contextmanager
    def _awaited(self, text: str) -> Iterator[None]:
        timer = threading.Timer(self.patience, self.notice, (f"{text} ...",))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # only a process of one thread can be forked

    def _print_when_due(self, text: str, done: int, total: int, *, keep: bool) -> None:
        now = self._clock()
        if self._began is None:
            self._began, self._due = now, now + self.patience
        if not keep and now < self._due:
            return
        if total and done:
            left = (now - self._began) * (total - done) / done
            if left < self.patience and not keep:
                return  # it will be over before the line is read
            text = f"{text}  {done / total:.0%}  {clock_text(left)} left"
        self.notice(text)
        self._due = now + _AGAIN_SECONDS

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
        now = self._clock()
        late = now - self._drawn >= seconds
        self._drawn = now if late else self._drawn
        return late

    def _stop(self) -> None:
        for live in (self._live, self._bar):
            if live is not None:
                live.stop()
        self._live = self._bar = self._began = None
        self._drawn = float("-inf")
