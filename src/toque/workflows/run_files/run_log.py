"""Run log `training.log`: what whoever watches a run is told, with times, in the run's folder."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, TextIO

from toque.reporter import Reporter, heard, losing
from toque.storage.no_follow import open_append

LOG: Final = "training.log"
_FORM: Final = "%(asctime)s  %(message)s"


class LoggedReporter:
    """Passes everything on, and keeps what stays as lines of `training.log`.

    What is told before `writing` began waits for it. A line that the disk does not take is dropped:
    a log is not worth a run.

    Args:
        reporter: who watches; may be silent.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._waiting: list[logging.LogRecord] = []
        self._handler: logging.Handler | None = None

    @property
    def heard(self) -> bool:
        """Whether anybody watches besides the log."""
        return heard(self._reporter)

    @property
    def lost(self) -> str | None:
        """Why whoever watches could not be shown something; None while all was shown."""
        watching = losing(self._reporter)
        return watching.lost if watching is not None else None

    @contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        """Append to the folder's `training.log` until the context ends.

        Args:
            folder: of the run, held against other processes.
        """
        handler: logging.Handler
        file: TextIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(open_append(folder / LOG), "a", encoding="utf-8", errors="replace")
        except OSError as error:
            self._reporter.notice(
                f"warning: {folder / LOG} cannot be written ({error.strerror}), so the run keeps "
                "no log of what is shown here"
            )
            handler = logging.NullHandler()
        else:
            handler = _Quiet(file)
        handler.setFormatter(logging.Formatter(_FORM))
        self._handler = handler
        for record in self._waiting:
            handler.handle(record)
        self._waiting = []
        try:
            yield
        finally:
            self._handler = None
            handler.close()
            if file is not None:
                _close(file)

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
        level = logging.WARNING if text.startswith("warning:") else logging.INFO
        record = logging.LogRecord("toque", level, "", 0, text, None, None)
        if self._handler is None:
            self._waiting.append(record)
        else:
            self._handler.handle(record)


class _Quiet(logging.StreamHandler[TextIO]):
    """Drops what the disk does not take."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - its name in logging
        """Drop it."""


def _close(file: TextIO) -> None:
    with contextlib.suppress(OSError):  # what is left in its buffer finds no room
        file.close()
