"""File locks (flock): one process at a time; the system releases them however a process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_UNSUPPORTED: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Answers of network file systems that have no locks; there, nothing is locked."""


@contextmanager
def file_lock(path: Path, on_busy: Callable[[str], None]) -> Iterator[int]:
    """Hold the lock file `path`, made with its folder when missing; yields its descriptor.

    Args:
        path: the file; the holder's process id is written into it.
        on_busy: called with the id of the process that holds it; raises its own error to refuse,
            or returns to wait until the lock is free.

    Raises:
        OSError: the file cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(descriptor, on_busy)
        with contextlib.suppress(OSError):  # the id is a courtesy; a full disk may refuse it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, on_busy: Callable[[str], None]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
        on_busy(holder or "unknown")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
