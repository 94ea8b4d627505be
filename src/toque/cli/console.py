"""Console: standard streams that may fail, a reporter for terminals and pipes, and tables.

If progress cannot be written, it is dropped. If a result cannot be written, the command exits. It
prints no message if the reader closed the pipe (`toque presets | head -1`).
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
"""Commands with a result on disk. They continue if their output, which is progress, is lost."""
_BAR_SECONDS: Final = 0.1
"""Seconds between refreshes of a progress bar."""
_LINE_SECONDS: Final = 0.25
"""Seconds between refreshes of a line without a bar."""
_PATIENCE_SECONDS: Final = 2.0
"""Seconds that an activity must last before its first line, if the output is a pipe."""
_FIRST_PAUSE_SECONDS: Final = 30.0
"""Minimum seconds between two lines about the same activity, if the output is a pipe. The interval
doubles with each line.
"""
_MAX_PAUSE_SECONDS: Final = 600.0
_FLAGS: Final = {
    "start": "--from",
    "form": "--format",
    "prompts": "--prompt",
    "adapters": "--adapter",
    "sources": "SOURCES",  # a positional argument
    "upload": "--no-upload",
    "prepare": "--no-prepare",
}
"""Flags that differ from the names of their arguments in Python."""
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, except line breaks and tabs."""


class OutputLostError(Exception):
    """Error for a command that cannot write its result. `__cause__` is the reason."""


class _SafeStream(io.TextIOBase):
    r"""Text stream that survives write errors of a wrapped stream.

    Characters that the encoding does not contain are written as escapes such as "\u0416".

    Args:
        stream: Function that returns the wrapped stream. It is called at every write, because
            `sys.stderr` may be replaced.
        drop: True to drop text after an error, False to raise OutputLostError.
    """

    def __init__(self, stream: Callable[[], TextIO | None], *, drop: bool) -> None:
        self._stream = stream
        self._drop = drop
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        """Reason for dropped text. None if everything was written."""
        inner = self._stream()
        return inner.lost if isinstance(inner, _SafeStream) else self._lost

    def write(self, text: str) -> int:
        self._try(lambda stream: _write_escaped(stream, text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

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
        """Read attributes of the inner stream that `io.TextIOBase` defines as None."""
        if name in ("encoding", "errors", "buffer"):
            return getattr(self._stream(), name, None)
        return super().__getattribute__(name)

    def _try(self, action: Callable[[TextIO], object]) -> None:
        """Call an action with the wrapped stream, and handle its error."""
        stream = self._stream()
        if stream is None:  # closed before the process started, e.g. by `2>&-`
            return
        try:
            action(stream)
        except (OSError, ValueError) as error:
            # A write to a closed stream raises a ValueError. Other ValueErrors are bugs.
            if isinstance(error, ValueError) and not stream.closed:
                raise
            if not self._drop:
                raise OutputLostError from error
            self._lost = self._lost or (getattr(error, "strerror", None) or str(error))


def _write_escaped(stream: TextIO, text: str) -> None:
    """Write a text. Replace a character that is not in the encoding by an escape."""
    try:
        stream.write(text)
    except UnicodeEncodeError:  # raised before any character is written
        escaped = text.encode(stream.encoding, "backslashreplace")
        stream.write(escaped.decode(stream.encoding))


def quieten_libraries() -> None:
    """Hide warnings and logs of other libraries, unless -W or a log level is set."""
    if not sys.warnoptions:
        # For all modules, because a library can issue a warning in the name of our module.
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # worker processes read it
    # Both libraries read their log level when they are imported.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Python prints the warnings from loggers without a handler. Show only ours.
    if logging.lastResort is not None:
        logging.lastResort.addFilter(logging.Filter("toque"))


@contextmanager
def standard_streams(*, working: bool) -> Iterator[None]:
    """Drop text that standard error or, for a `working` command, standard output cannot write.

    Raises:
        OutputLostError: Another command cannot write its result.
    """
    out, errors = sys.stdout, sys.stderr
    sys.stdout = cast("TextIO", _SafeStream(lambda: out, drop=working))
    sys.stderr = cast("TextIO", _SafeStream(lambda: errors, drop=True))
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = out, errors
        for stream in filter(None, (out, errors)):
            _flush_or_discard(stream)


def _flush_or_discard(stream: TextIO) -> None:
    """Flush a stream. If that fails, send the rest to /dev/null.

    Otherwise the interpreter's flush at exit would fail.
    """
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def flag(name: str) -> str:
    """Convert the name of an argument in Python, with or without a value, to a flag.

    >>> flag("max_new_tokens"), flag("start"), flag("upload=False"), flag("steps=8")
    ('--max-new-tokens', '--from', '--no-upload', '--steps 8')
    >>> flag('for_="1 hour"'), flag("choices=['Healthy', 'Indulgent']")
    ('--for "1 hour"', '--choices Healthy --choices Indulgent')
    """
    name, _, value = name.partition("=")
    word = _FLAGS.get(name, f"--{name.strip('_').replace('_', '-')}")
    # A list is in Python's notation, because the caller writes it for Python.
    if value.startswith("['") and value.endswith("']"):
        return " ".join(f"{word} {item}" for item in value[2:-2].split("', '"))
    return word if value in ("", "True", "False") else f"{word} {value}"


class ConsoleReporter(Reporter):
    """Reporter that prints lines on standard output, and notices and progress on standard error.

    On a terminal, progress is a bar or a spinner. In a pipe or a file, it is a line after two
    seconds. The next line follows if nothing else was printed for 30 seconds, then 60, and so on.
    Text that cannot be written is dropped, and `lost` is the reason.

    Args:
        console: Destination of notices and progress. Default: standard error.
        progress: True to show progress.
        quiet: True to show neither notices nor progress, only lines.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        progress: bool = True,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = _SafeStream(lambda: sys.stdout, drop=True)
        # During a live display, rich replaces standard error. Use the original stream.
        self._errors = _SafeStream(
            lambda: getattr(sys.stderr, "rich_proxied_file", sys.stderr), drop=True
        )
        self._console = console or Console(file=cast("TextIO", self._errors))
        self._shows_progress = progress and not quiet
        self._quiet = quiet
        self._clock = clock
        self.patience = _PATIENCE_SECONDS
        self._start_time: float | None = None
        self._next_line_time: float | None = None
        self._pause = _FIRST_PAUSE_SECONDS
        self._display: Progress | None = None
        self._has_bar = False
        self._task = TaskID(0)
        self._refresh_time = float("-inf")

    @property
    def lost(self) -> str | None:
        """Reason for dropped text. None if everything was written."""
        return self._errors.lost or self._out.lost

    @property
    def columns(self) -> int:
        """Width of the terminal, or a default width in a pipe."""
        return self._console.width if self._console.is_terminal else COLUMNS

    def line(self, text: str) -> None:
        """Print on standard output, without buffering."""
        print(text, file=self._out, flush=True)

    def notice(self, text: str) -> None:
        """Print on standard error, above a live display."""
        self._pause = _FIRST_PAUSE_SECONDS
        self._print(text)

    def _print(self, text: str) -> None:
        """Print a notice or a line of progress, and postpone the next line of progress."""
        if self._quiet:
            return
        self._next_line_time = self._clock() + self._pause
        # As Text, because rich would read "[red]" in the name of a file as markup.
        self._console.print(Text(text), soft_wrap=True)

    def progress(
        self, text: str, *, done: int = 0, total: int = 0, keep: bool = False
    ) -> None:
        """Update a terminal's live display, or print a line to a pipe if a line is due.

        Args:
            text: Description of the activity. "" ends the display.
            done: Completed part of the total.
            total: Total amount; 0 if it is not known.
            keep: True to print the line to a pipe even if no line is due.
        """
        if not text or not self._shows_progress:
            self._stop()
        elif not self._console.is_terminal:
            self._print_if_due(text, done, total, keep=keep)
        else:
            self._refresh(text, done, total)

    def working(self, text: str) -> AbstractContextManager[object]:
        """Show a spinner on a terminal, or print a line in a pipe after a while."""
        self._stop()
        if not self._shows_progress:
            return nullcontext()
        if self._console.is_terminal:
            return self._console.status(text)
        return self._notice_if_slow(text)

    @contextmanager
    def _notice_if_slow(self, text: str) -> Iterator[None]:
        """Print a line if the block takes longer than the patience."""
        wait = self.patience
        if self._next_line_time is not None:
            wait = max(wait, self._next_line_time - self._clock())
        timer = threading.Timer(wait, self.notice, (f"{text} ...",))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # because only a process with one thread can fork

    def _print_if_due(self, text: str, done: int, total: int, *, keep: bool) -> None:
        """Print a line with the time left, if a line is due and the activity takes longer."""
        now = self._clock()
        if self._start_time is None:
            self._start_time = now
        if self._next_line_time is None:
            self._next_line_time = now + self.patience
        due_time = max(self._next_line_time, self._start_time + self.patience)
        if not keep and now < due_time:
            return

        if total and done:
            seconds_left = (now - self._start_time) * (total - done) / done
            if seconds_left < self.patience and not keep:
                return  # the activity ends before anyone has read the line
            text = f"{text}  {done / total:.0%}  {clock_text(seconds_left)} left"
        self._print(text)
        self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS)

    def _refresh(self, text: str, done: int, total: int) -> None:
        """Update the live display, and draw it if the last refresh is old enough."""
        if self._display is None or (total and not self._has_bar):
            self._display = self._open_display(text, has_bar=bool(total))
        interval = _BAR_SECONDS if self._has_bar else _LINE_SECONDS
        now = self._clock()
        is_due = now - self._refresh_time >= interval
        if is_due:
            self._refresh_time = now
        self._display.update(
            self._task,
            completed=done,
            total=total or None,
            description=text,
            refresh=is_due,
        )

    def _open_display(self, text: str, *, has_bar: bool) -> Progress:
        """Replace the live display with a new one, with a bar or only a line of text."""
        self._stop()
        self._has_bar = has_bar
        bar = (BarColumn(), TaskProgressColumn(), TimeLeft()) if has_bar else ()
        display = Progress(
            TextColumn("{task.description}", markup=False),
            *bar,
            console=self._console,
            transient=True,
            auto_refresh=False,  # its thread would prevent a fork
        )
        display.start()
        self._task = display.add_task(text, total=None)
        return display

    def _stop(self) -> None:
        """End the live display."""
        if self._display is not None:
            self._display.stop()
        self._display = None
        self._start_time = None
        self._refresh_time = float("-inf")


def for_terminal(text: str) -> str:
    """Replace the control characters of a model's text if standard output is a terminal.

    A model can generate any character, and a terminal would obey control characters.
    """
    return _CONTROLS.sub("\ufffd", text) if sys.stdout.isatty() else text


class StreamPrinter:
    """Printer of texts while they are generated. The final output equals `print` of each text."""

    def __init__(self) -> None:
        self.has_started = False
        self._number = -1
        self._n_printed = 0

    def __call__(self, number: int, text: Written) -> None:
        """Print the new part of a text. A new number begins the next text."""
        if number != self._number:
            if self.has_started:
                self.end()
            self.has_started = True
            self._number = number
            self._n_printed = 0
            print(for_terminal(text.heading), end="\n\n")
        print(for_terminal(text.text[self._n_printed :]), end="", flush=True)
        self._n_printed = max(self._n_printed, len(text.text))

    def end(self) -> None:
        """Print the end of the last text."""
        print("\n", flush=True)


def print_page(page: Page, console: Console | None = None) -> None:
    """Print the tables, sentences and facts of a page on standard output."""
    from toque.reports.page import Grid, Sentence

    console = console or _wide_console()
    for section in page.sections:
        for part in section.shown:
            if isinstance(part, Sentence):
                style = "yellow" if part.style == "warn" else ""
                console.print(_safe_text(part.text, style))
            elif isinstance(part, Grid):
                console.print(_table(section.heading, part))
                if part.note:
                    console.print(_safe_text(part.note, "dim"))
    facts = "; ".join(f"{name} {value}" for name, value in page.head.facts)
    console.print(_safe_text(f"{page.head.sentence} {facts}"))


def print_drill(result: DrillResult) -> None:
    """Print a table of a drill's faults, with the expected and the actual outcomes."""
    table = Table("fault", "action", "expected", "outcome", "", show_lines=True)
    for outcome in result.outcomes:
        table.add_row(
            outcome.fault,
            outcome.done,
            outcome.expected,
            outcome.happened,
            outcome.verdict,
        )
    Console().print(table, highlight=False)


def print_checkup(checkup: Checkup) -> None:
    """Print a table of a machine's checks."""
    console = _wide_console()
    table = Table("", "state", "found", "what to do", box=SIMPLE_HEAD, pad_edge=False)
    styles = {"ok": "green", "warning": "yellow", "failed": "red"}
    for check in checkup.checks:
        state = Text(check.state, style=styles[check.state])
        table.add_row(
            check.name, state, _safe_text(check.found), _safe_text(check.todo)
        )
    console.print(table)
    states = [check.state for check in checkup.checks]
    counts = ", ".join(
        f"{states.count(state)} {state}" for state in styles if state in states
    )
    console.print(f"{counts}; checked in {checkup.seconds:.0f} s")


def _wide_console() -> Console:
    """Create a console that is at least COLUMNS wide in a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, COLUMNS)  # rich assumes 80 columns
    return console


def _table(title: str, grid: Grid) -> Table:
    """Convert a grid of a page to a table."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for index, head in enumerate(grid.heads):
        is_number = index in grid.numeric
        table.add_column(
            head, justify="right" if is_number else "left", no_wrap=is_number
        )
    for row in grid.rows:
        table.add_row(*map(_safe_text, row))
    return table


def _safe_text(text: str, style: str = "") -> Text:
    """Create a text without markup and control characters, which names from files may have."""
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return Text(printable, style=style)
