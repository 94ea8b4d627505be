"""Console: standard streams that may fail, a reporter for terminals and pipes, and tables.

Reports are for an observer: what cannot be written of them is dropped. A result that cannot be
written ends the command, quietly where the reader has seen enough (`toque presets | head -1`).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft
from rich.table import Table
from rich.text import Text

from toque.reporter import COLUMNS, Reporter, clock_text

if TYPE_CHECKING:
    from toque.reports.page import Grid, Page
    from toque.workflows.diagnosis.drill import DrillResult
    from toque.workflows.diagnosis.machine_checks import Checkup
    from toque.workflows.results import Written

WORKING_VERBS: Final = ("train", "demo", "ablate", "prepare")
"""Commands whose result lies on the disk; all they print is for an observer."""
_BAR_SECONDS: Final = 0.1
_LINE_SECONDS: Final = 0.25  # between two drawings of what is live
_PATIENCE_SECONDS: Final = 2.0  # time after which work is reported where nothing can be drawn, too
_AGAIN_SECONDS, _SELDOM_SECONDS = 30.0, 600.0
"""First pause after a printed line until a line about what is under way, where nothing can be
drawn, and the longest: every further pause is twice as long."""
_FLAGS: Final = {
    "start": "--from",
    "form": "--format",
    "prompts": "--prompt",
    "adapters": "--adapter",
    "sources": "SOURCES",  # stands alone, without a flag
    "upload": "--no-upload",
    "prepare": "--no-prepare",
}  # arguments whose flag has another name
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for line breaks and tabs


class OutputLostError(Exception):
    """Standard output takes nothing any more; `__cause__` says why."""


class _ObservedStream(io.TextIOBase):
    r"""A text stream over another that may fail at any write; then it drops, or raises.

    Characters that the stream's encoding lacks are written as escapes such as "\u0416".
    `stream` is asked at every write, as `sys.stderr` may be replaced.
    """

    def __init__(self, stream: Callable[[], TextIO | None], *, drop: bool) -> None:
        self._stream, self._drop = stream, drop
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        """Reason why something was dropped; None while everything could be written."""
        inner = self._stream()
        return inner.lost if isinstance(inner, _ObservedStream) else self._lost

    def write(self, text: str) -> int:
        self._do(lambda stream: _write_encodable(stream, text))
        return len(text)

    def flush(self) -> None:
        self._do(lambda stream: stream.flush())

    def isatty(self) -> bool:
        stream = self._stream()
        return stream is not None and not stream.closed and stream.isatty()

    def fileno(self) -> int:
        stream = self._stream()
        if stream is None:
            raise io.UnsupportedOperation("fileno")
        return stream.fileno()

    def writable(self) -> bool:
        return True

    def __getattribute__(self, name: str) -> Any:
        """Names that `io.TextIOBase` knows and leaves empty are those of the stream below."""
        if name in ("encoding", "errors", "buffer"):
            return getattr(self._stream(), name, None)
        return super().__getattribute__(name)

    def _do(self, action: Callable[[TextIO], object]) -> None:
        stream = self._stream()
        if stream is None:  # closed before the process began, as by `2>&-`
            return
        try:
            action(stream)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and not stream.closed:
                raise
            if not self._drop:
                raise OutputLostError from error
            self._lost = self._lost or (getattr(error, "strerror", None) or str(error))


def _write_encodable(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:  # nothing of the text was written
        escaped = text.encode(stream.encoding, "backslashreplace")
        stream.write(escaped.decode(stream.encoding))


def quieten_libraries() -> None:
    """Keep other libraries' warnings and logs off the terminal; -W and set levels win."""
    if not sys.warnoptions:
        # A warning about a call of ours names our module as its place, and is as foreign as others.
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for worker processes, which read it
    # Both libraries read their level once, when they are first imported.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Python prints warnings of any logger without a handler; our own are still wanted.
    if logging.lastResort is not None:
        logging.lastResort.addFilter(logging.Filter("toque"))


@contextmanager
def standard_streams(*, working: bool) -> Iterator[None]:
    """Observe standard error, and standard output as well where it is for observers alone.

    Elsewhere a result that cannot be written is an OutputLostError.
    """
    out, errors = sys.stdout, sys.stderr
    sys.stdout = cast("TextIO", _ObservedStream(lambda: out, drop=working))
    sys.stderr = cast("TextIO", _ObservedStream(lambda: errors, drop=True))
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = out, errors
        # Nothing is left behind that would fail when the interpreter flushes on its way out.
        for stream in filter(None, (out, errors)):
            try:
                stream.flush()
            except (OSError, ValueError):
                with contextlib.suppress(OSError, ValueError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, stream.fileno())
                    os.close(nowhere)


def flag(name: str) -> str:
    """The flag of an argument, with its value if it has one.

    >>> flag("max_new_tokens"), flag("start"), flag("upload=False"), flag("steps=8")
    ('--max-new-tokens', '--from', '--no-upload', '--steps 8')
    >>> flag('for_="1 hour"'), flag("choices=['Healthy', 'Indulgent']")
    ('--for "1 hour"', '--choices Healthy --choices Indulgent')
    """
    name, _, value = name.partition("=")
    word = _FLAGS.get(name, f"--{name.strip('_').replace('_', '-')}")
    if value.startswith("['") and value.endswith("']"):
        return " ".join(f"{word} {one}" for one in value[2:-2].split("', '"))
    return word if value in ("", "True", "False") else f"{word} {value}"


class ConsoleReporter(Reporter):
    """Lines on standard output; notices and what is under way on standard error.

    Work under way is drawn on a terminal. In a pipe or a file a line about it is printed after two
    seconds, and then only if nothing else was printed for half a minute, a minute, two. What cannot
    be written is dropped, and `lost` says why.

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
        self._out = _ObservedStream(lambda: sys.stdout, drop=True)
        # The stream below the proxy that rich installs while something live is drawn.
        self._errors = _ObservedStream(
            lambda: getattr(sys.stderr, "rich_proxied_file", sys.stderr), drop=True
        )
        self._console = console or Console(file=cast("TextIO", self._errors))
        self._shows_progress, self._quiet = progress and not quiet, quiet
        self._clock = clock
        self.patience = _PATIENCE_SECONDS
        self._began: float | None = None
        self._due: float | None = None
        self._pause = _AGAIN_SECONDS
        self._drawing: Progress | None = None
        self._has_bar = False
        self._task = TaskID(0)
        self._drawn = float("-inf")

    @property
    def lost(self) -> str | None:
        """Reason why something could not be written; None while everything could."""
        return self._errors.lost or self._out.lost

    @property
    def columns(self) -> int:
        """Width of the terminal; of a pipe, the usual."""
        return self._console.width if self._console.is_terminal else COLUMNS

    def line(self, text: str) -> None:
        """Print on standard output at once."""
        print(text, file=self._out, flush=True)

    def notice(self, text: str) -> None:
        """Print on standard error, above what is live there."""
        self._pause = _AGAIN_SECONDS
        self._print(text)

    def _print(self, text: str) -> None:
        if self._quiet:
            return
        self._due = self._clock() + self._pause
        # As Text: a file's name is not markup, and "[red]" is a possible one.
        self._console.print(Text(text), soft_wrap=True)

    def progress(self, text: str, *, done: int = 0, total: int = 0, keep: bool = False) -> None:
        """Draw on a terminal, a bar if a total is known; elsewhere print a line now and then.

        Text to `keep` is a line of its own there.
        """
        if not text or not self._shows_progress:
            self._stop()
        elif not self._console.is_terminal:
            self._print_when_due(text, done, total, keep=keep)
        else:
            self._draw(text, done, total)

    def working(self, text: str) -> AbstractContextManager[object]:
        """Show a spinner on a terminal; elsewhere print a line if it takes long."""
        self._stop()
        if not self._shows_progress:
            return nullcontext()
        return self._console.status(text) if self._console.is_terminal else self._awaited(text)

    @contextmanager
    def _awaited(self, text: str) -> Iterator[None]:
        wait = self.patience if self._due is None else max(self.patience, self._due - self._clock())
        timer = threading.Timer(wait, self.notice, (f"{text} ...",))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # only a process of one thread can be forked

    def _print_when_due(self, text: str, done: int, total: int, *, keep: bool) -> None:
        now = self._clock()
        if self._began is None:
            self._began = now
        if self._due is None:
            self._due = now + self.patience
        if not keep and now < max(self._due, self._began + self.patience):
            return

        if total and done:
            left = (now - self._began) * (total - done) / done
            if left < self.patience and not keep:
                return  # it will be over before the line is read
            text = f"{text}  {done / total:.0%}  {clock_text(left)} left"
        self._print(text)
        self._pause = min(2 * self._pause, _SELDOM_SECONDS)

    def _draw(self, text: str, done: int, total: int) -> None:
        if self._drawing is None or (total and not self._has_bar):
            self._stop()
            self._has_bar = bool(total)
            bar = (BarColumn(), TaskProgressColumn(), TimeLeft()) if total else ()
            # Refreshed by calls, not by a thread: only a process of one thread can be forked.
            self._drawing = Progress(
                TextColumn("{task.description}", markup=False),
                *bar,
                console=self._console,
                transient=True,
                auto_refresh=False,
            )
            self._drawing.start()
            self._task = self._drawing.add_task(text, total=None)
        late = self._clock() - self._drawn >= (_BAR_SECONDS if self._has_bar else _LINE_SECONDS)
        self._drawn = self._clock() if late else self._drawn
        self._drawing.update(
            self._task, completed=done, total=total or None, description=text, refresh=late
        )

    def _stop(self) -> None:
        if self._drawing is not None:
            self._drawing.stop()
        self._drawing = self._began = None
        self._drawn = float("-inf")


def for_reader(text: str) -> str:
    """A model's text as it is for a file or a pipe, without control characters on a terminal.

    A terminal obeys them, and a model may have learnt them, or have been trained to write them.
    """
    return _CONTROLS.sub("\ufffd", text) if sys.stdout.isatty() else text


class TextsAsWritten:
    """Texts printed while they grow; what stands there at the end is what `print` gives of each."""

    def __init__(self) -> None:
        self.any = False  # true once a text was begun
        self._number = -1
        self._shown = 0

    def __call__(self, number: int, so_far: Written) -> None:
        """Print what is new of a text, which comes after the one before has ended."""
        if number != self._number:
            if self.any:
                self.end()
            self.any, self._number, self._shown = True, number, 0
            print(for_reader(so_far.heading), end="\n\n")
        print(for_reader(so_far.text[self._shown :]), end="", flush=True)
        self._shown = max(self._shown, len(so_far.text))

    def end(self) -> None:
        """End the last text."""
        print("\n", flush=True)


def print_page(page: Page, console: Console | None = None) -> None:
    """Print the tables, sentences and facts of a page on standard output."""
    from toque.reports.page import Grid, Sentence

    console = console or _wide_console()
    for section in page.sections:
        for part in section.shown:
            if isinstance(part, Sentence):
                style = "yellow" if part.style == "warn" else ""
                console.print(Text(_plain(part.text), style=style))
            elif isinstance(part, Grid):
                console.print(_table(section.heading, part))
                if part.note:
                    console.print(Text(_plain(part.note), style="dim"))
    facts = "; ".join(f"{name} {value}" for name, value in page.head.facts)
    console.print(Text(_plain(f"{page.head.sentence} {facts}")))


def print_drill(result: DrillResult) -> None:
    """Print every fault with what was expected and what happened."""
    table = Table("fault", "what was done", "expected", "what happened", "", show_lines=True)
    for o in result.outcomes:
        table.add_row(o.fault, o.done, o.expected, o.happened, o.verdict)
    Console().print(table, highlight=False)


def print_checkup(checkup: Checkup) -> None:
    """Print everything that was looked at, with what to do about it."""
    console = _wide_console()
    table = Table("", "state", "found", "what to do", box=SIMPLE_HEAD, pad_edge=False)
    styles = {"ok": "green", "warning": "yellow", "failed": "red"}
    for check in checkup.checks:
        state = Text(check.state, style=styles[check.state])
        table.add_row(check.name, state, Text(_plain(check.found)), Text(_plain(check.todo)))
    console.print(table)
    states = [check.state for check in checkup.checks]
    counted = ", ".join(f"{states.count(s)} {s}" for s in styles if s in states)
    console.print(f"{counted}; looked for {checkup.seconds:.0f} s")


def _wide_console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, COLUMNS)  # rich would guess 80
    return console


def _table(title: str, grid: Grid) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    for at, head in enumerate(grid.heads):
        right = at in grid.numeric
        table.add_column(head, justify="right" if right else "left", no_wrap=right)
    for row in grid.rows:
        # As Text: a file's name is not markup, and "[red]" is a possible one.
        table.add_row(*(Text(_plain(cell)) for cell in row))
    return table


def _plain(text: str) -> str:
    """Without control characters: names come from files, and a terminal obeys escapes."""
    return "".join(c if c.isprintable() else "?" for c in text)
