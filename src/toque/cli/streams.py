"""Standard streams that may fail: a full disk below a log, a reader that went away.

What a command tells while it works is for an observer, and an observer must not end the work:
what cannot be written is dropped. What a command prints as its result is another matter: there the
failure ends it, quietly where only the reader has seen enough (`toque presets | head -1`).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

if TYPE_CHECKING:
    from toque.workflows.results import Written

WORKING_VERBS: Final = ("train", "demo", "ablate", "prepare")
"""Commands whose result lies on the disk; all they print is for an observer."""


class OutputLostError(Exception):
    """Standard output takes nothing any more; `__cause__` says why."""


class ObservedStream(io.TextIOBase):
    """A text stream over another that may fail at any write.

    Args:
        stream: gives the stream to write to; asked at every write, as `sys.stderr` may be replaced.
        drop: drop what cannot be written and go on; otherwise raise `OutputLostError`.
    """

    def __init__(self, stream: Callable[[], TextIO | None], *, drop: bool) -> None:
        self._stream, self._drop = stream, drop
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        """Why something was dropped; None while everything could be written."""
        inner = self._stream()
        return inner.lost if isinstance(inner, ObservedStream) else self._lost

    def write(self, text: str) -> int:
        """Write, or drop."""
        self._do(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, if that can be done."""
        self._do(lambda stream: stream.flush())

    def isatty(self) -> bool:
        """Whether it is a terminal's."""
        stream = self._stream()
        return stream is not None and not stream.closed and stream.isatty()

    def fileno(self) -> int:
        """Of the stream below."""
        stream = self._stream()
        if stream is None:
            raise io.UnsupportedOperation("fileno")
        return stream.fileno()

    def writable(self) -> bool:
        """True: whatever is written is taken."""
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


class TextsAsWritten:
    """Texts printed while they grow; what stands there at the end is what `print` gives of each."""

    def __init__(self) -> None:
        self.any = False
        """Whether there was one."""
        self._number = -1
        self._shown = 0

    def __call__(self, number: int, so_far: Written) -> None:
        """Print what is new of a text, which comes after the one before has ended."""
        if number != self._number:
            if self.any:
                self.end()
            self.any, self._number, self._shown = True, number, 0
            print(so_far.heading, end="\n\n")
        print(so_far.text[self._shown :], end="", flush=True)
        self._shown = max(self._shown, len(so_far.text))

    def end(self) -> None:
        """End the last text."""
        print("\n", flush=True)


def quieten_libraries() -> None:
    """Keep other libraries' warnings and log lines off the terminal: nobody here can act on them.

    Python's own `-W` and PYTHONWARNINGS, and a level that the environment already sets, win.
    """
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

    Raises:
        OutputLostError: where `working` is false: a result could not be written.
    """
    out, errors = sys.stdout, sys.stderr
    sys.stdout = cast("TextIO", ObservedStream(lambda: out, drop=working))
    sys.stderr = cast("TextIO", ObservedStream(lambda: errors, drop=True))
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = out, errors
        for stream in (out, errors):
            _settle(stream)


def _settle(stream: TextIO | None) -> None:
    """Leave nothing behind that would fail when the interpreter flushes on its way out."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
