"""Log of a run: `training.log` in its folder."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from toque.reporter import Reporter
from toque.storage.no_follow import open_append

LOG = "training.log"
"""Name of the log in a run folder."""


class LoggedReporter(Reporter):
    """Reporter that forwards everything and also writes lines with times to `training.log`.

    Lines before `writing` are buffered. A line that cannot be written is dropped.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._early = io.StringIO()
        self._file: TextIO = self._early

    @property
    def heard(self) -> bool:
        """Return whether a person reads the lines, in addition to the log."""
        return self._reporter.heard

    @property
    def lost(self) -> str | None:
        """Reason why a message could not be displayed, or None."""
        return self._reporter.lost

    @property
    def columns(self) -> int:
        """Characters per line on the screen."""
        return self._reporter.columns

    @contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        """Append to the log of a locked run folder until the context ends."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_append(folder / LOG)
            self._file = os.fdopen(descriptor, "a", encoding="utf-8", errors="replace")
            with suppress(OSError):
                self._file.write(self._early.getvalue())
        except OSError as error:
            self._reporter.notice(
                f"warning: {folder / LOG} cannot be written ({error.strerror}). The messages of "
                "this run are not logged."
            )
        try:
            yield
        finally:
            with suppress(OSError):  # the disk may have no space for the buffer
                self._file.close()
            self._file = self._early = io.StringIO()

    def line(self, text: str) -> None:
        """Forward and log a line of the result."""
        self._reporter.line(text)
        self._log(text)

    def notice(self, text: str) -> None:
        """Forward and log a message."""
        self._reporter.notice(text)
        self._log(text)

    def detail(self, text: str) -> None:
        """Forward and log a detail."""
        self._reporter.detail(text)
        self._log(text)

    def progress(
        self, text: str, *, done: int = 0, total: int = 0, keep: bool = False
    ) -> None:
        """Forward the state of the work, and log it if `keep` is set."""
        self._reporter.progress(text, done=done, total=total, keep=keep)
        if keep and text:
            self._log(text)

    def working(self, text: str) -> AbstractContextManager[object]:
        """Forward the name of an activity."""
        return self._reporter.working(text)

    def _log(self, text: str) -> None:
        """Write the lines of a text with the current time. A full disk drops them."""
        now = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        with suppress(OSError):
            for line in text.splitlines():
                self._file.write(f"{stamp},{int(now % 1 * 1000):03}  {line}\n")
            self._file.flush()
