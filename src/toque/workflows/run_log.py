"""Run log `training.log`: the lines that are shown while a run trains, with their times."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Final, TextIO

from toque.reporter import Reporter
from toque.storage.no_follow import open_append

LOG: Final = "training.log"


class LoggedReporter(Reporter):
    """Passes everything on, and keeps what stays as lines of `training.log`.

    Lines from before `writing` began wait for it. A line that the disk does not take is dropped: a
    log is not worth a run.

    Args:
        reporter: shows the lines to a person; may be silent.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._waiting: list[str] = []
        self._file: TextIO | None = None
        self._is_open = False

    @property
    def heard(self) -> bool:
        """True if a person sees the lines, besides the log."""
        return self._reporter.heard

    @property
    def lost(self) -> str | None:
        """Reason why something could not be shown; None while all was shown."""
        return self._reporter.lost

    @contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        """Append to the folder's `training.log` until the context ends.

        Args:
            folder: of the run, held against other processes.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_append(folder / LOG)
            self._file = os.fdopen(descriptor, "a", encoding="utf-8", errors="replace")
        except OSError as error:
            self._reporter.notice(
                f"warning: {folder / LOG} cannot be written ({error.strerror}), so the run keeps "
                "no log of what is shown here"
            )
        self._is_open = True
        for line in self._waiting:
            self._write(line)
        self._waiting = []
        try:
            yield
        finally:
            self._is_open = False
            if self._file is not None:
                with suppress(OSError):  # the rest of its buffer finds no room
                    self._file.close()
                self._file = None

    def line(self, text: str) -> None:
        """Pass it on and keep it."""
        self._reporter.line(text)
        self._keep(text)

    def notice(self, text: str) -> None:
        """Pass it on and keep it."""
        self._reporter.notice(text)
        self._keep(text)

    def progress(self, text: str, *, done: int = 0, total: int = 0, keep: bool = False) -> None:
        """Pass it on, and keep what deserves a line."""
        self._reporter.progress(text, done=done, total=total, keep=keep)
        if keep and text:
            self._keep(text)

    def working(self, text: str) -> AbstractContextManager[object]:
        """Pass it on."""
        return self._reporter.working(text)

    def _keep(self, text: str) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        line = f"{stamp},{int(now % 1 * 1000):03}  {text}\n"
        if self._is_open:
            self._write(line)
        else:
            self._waiting.append(line)

    def _write(self, line: str) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.write(line)
                self._file.flush()
