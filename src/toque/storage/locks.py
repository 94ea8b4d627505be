"""File locks: one process at a time, by flock or, where a file system has none, by a lease.

The system releases a flock however its process ends. A lease, a file that its holder renews, is
the other means: some network file systems have no flock, and running without any lock there would
let two runs write one folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from toque.storage.lease import HEARTBEAT, Lease
from toque.storage.no_follow import open_no_follow

_UNSUPPORTED: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Answers of network file systems that have no locks."""


@dataclass(frozen=True)
class Held:
    """A lock that this process holds."""

    descriptor: int
    """Of the lock file; a forked process that must not hold the lock closes it."""
    lease: Lease | None = None
    """What holds it where the file system has no flock."""
    note: str | None = None
    """A sentence for the user in that case."""

    def is_mine(self) -> bool:
        """Whether nobody has taken it over; only a lease can be."""
        return self.lease is None or self.lease.is_mine()


_HELD: Final[dict[Path, Held]] = {}
"""The locks of this process, by the file's absolute path."""


def held(path: Path) -> Held | None:
    """The lock on `path` that this process holds; None when it holds none."""
    return _HELD.get(path.absolute())


@contextmanager
def file_lock(path: Path, on_busy: Callable[[str], None]) -> Iterator[Held]:
    """Hold the lock file `path`, made with its folder when missing.

    Args:
        path: the file; the holder's process id is written into it.
        on_busy: called with the id of the process that holds it; raises its own error to refuse,
            or returns to wait until the lock is free.

    Raises:
        OSError: the file cannot be opened, or is a symbolic link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, refused = _opened_and_locked(path, on_busy)
    lease: Lease | None = None
    try:
        if refused is not None:
            lease = Lease(path.with_name(f"{path.name}.lease"))
            lease.take(on_busy)
        elif os.fstat(descriptor).st_nlink == 1:  # with another name it is not ours alone
            with contextlib.suppress(OSError):  # the id is a courtesy; a full disk may refuse it
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        _HELD[path.absolute()] = lock = Held(descriptor, lease, _note(path, refused))
        try:
            yield lock
        finally:
            del _HELD[path.absolute()]
    finally:
        if lease is not None:
            lease.release()
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
            return open_no_follow(path, flags)
    return None


def _opened_and_locked(path: Path, on_busy: Callable[[str], None]) -> tuple[int, OSError | None]:
    while True:
        descriptor = open_no_follow(path, os.O_RDWR | os.O_CREAT)
        try:
            refused = _lock(descriptor, on_busy)
        except BaseException:
            os.close(descriptor)
            raise
        if refused is not None or os.fstat(descriptor).st_nlink:
            return descriptor, refused
        os.close(descriptor)  # its holder removed the file meanwhile: a lock on nothing


def _note(path: Path, refused: OSError | None) -> str | None:
    if refused is None:
        return None
    return (
        f"the file system of {path.parent} has no file locks ({refused.strerror}), so the folder "
        f"is held by {path.name}.lease, which is renewed every {HEARTBEAT:.0f} seconds"
    )


def _lock(
    descriptor: int, on_busy: Callable[[str], None], *, kind: int = fcntl.LOCK_EX
) -> OSError | None:
    """Take the flock; the answer of a file system that has none."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
        on_busy(holder or "unknown")
        fcntl.flock(descriptor, kind)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return error
    return None
