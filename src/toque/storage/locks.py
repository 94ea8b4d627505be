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
    descriptor = _opened_and_locked(path, on_busy)
    try:
        with contextlib.suppress(OSError):  # the id is a courtesy; a full disk may refuse it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def shared_lock(path: Path, on_busy: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file `path` together with others, against whoever wants it alone.

    Where the file can neither be made nor opened, or the file system knows no locks, nothing is
    held: a reader has no right to demand more.

    Args:
        path: the lock file.
        on_busy: as for `file_lock`; called when somebody holds it alone.
    """
    descriptor = _opened_to_share(path)
    if descriptor is None:
        yield
        return
    try:
        _lock(descriptor, on_busy, kind=fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def is_shared(path: Path) -> bool:
    """Whether a lock that is held can be shared: it is held by readers."""
    try:
        with shared_lock(path, _refuse):
            return True
    except BlockingIOError:
        return False


def _refuse(_holder: str) -> None:
    raise BlockingIOError


def _opened_to_share(path: Path) -> int | None:
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):  # a store may belong to somebody else
        with contextlib.suppress(OSError):
            return os.open(path, flags, 0o644)
    return None


def _opened_and_locked(path: Path, on_busy: Callable[[str], None]) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor, on_busy)
        except BaseException:
            os.close(descriptor)
            raise
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # its holder removed the file meanwhile: a lock on nothing


def _lock(descriptor: int, on_busy: Callable[[str], None], *, kind: int = fcntl.LOCK_EX) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
        on_busy(holder or "unknown")
        fcntl.flock(descriptor, kind)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
