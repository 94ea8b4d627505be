"""File locks: one process at a time, by flock or, where a file system has none, by a lease.

Both are filelock's. The system releases a flock however its process ends; a lease is a file that
its holder renews, for network file systems without flock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, SoftFileLease, Timeout

from toque.storage.no_follow import open_no_follow

HEARTBEAT: Final = 10.0  # seconds between renewals of a lease
STALE: Final = 45.0  # seconds without a renewal after which a lease counts as left behind
_UNSUPPORTED: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Answers of network file systems that have no locks."""

OnBusy = Callable[[str], None]
"""Function called with the holder, as "4711 on node-1 since 2026-11-25 02:30:17 UTC"; raises its
own error to refuse, or returns to wait until the lock is free."""


@dataclass(frozen=True)
class Held:
    """A lock that this process holds."""

    lease: SoftFileLease | None = None
    note: str | None = None  # a sentence for the user where a lease holds it

    def is_mine(self) -> bool:
        """True if nobody has taken it over, which can happen to a lease alone."""
        lease = self.lease
        # Reads the file: the heartbeat of a process that was stopped has not noticed yet.
        return lease is None or (lease.compromise is None and lease.is_lock_held_by_us)


_HELD: Final[dict[Path, Held]] = {}  # by the file's absolute path


def held(path: Path) -> Held | None:
    """The lock on `path` that this process holds; None when it holds none."""
    return _HELD.get(path.absolute())


@contextmanager
def file_lock(path: Path, on_busy: OnBusy) -> Iterator[Held]:
    """Hold the lock file `path`, made with its folder when missing; its holder is written into it.

    A file that cannot be opened, or is a symbolic link, is an OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(open_no_follow(path, os.O_RDWR | os.O_CREAT))  # its error names a link as a link
    lock: FileLock | SoftFileLease = FileLock(path, thread_local=False, fallback_to_soft=False)
    taken = Held()
    try:
        _acquire(lock, path, on_busy, blocking=False)
    except OSError as refused:
        if refused.errno not in _UNSUPPORTED:
            raise
        lock = lease = SoftFileLease(
            path.with_name(f"{path.name}.lease"),
            lease_duration=STALE,
            heartbeat_interval=HEARTBEAT,
            thread_local=False,  # the thread that saves looks whether it is still held
        )
        taken = Held(
            lease,
            f"the file system of {path.parent} has no file locks ({refused.strerror}), so the "
            f"folder is held by {path.name}.lease, which is renewed every {HEARTBEAT:.0f} seconds",
        )
        # Until it is free, or left behind, or seen to be renewed.
        renewed = _renewal_of(Path(lease.lock_file))
        _acquire(lease, path, on_busy, timeout=2 * STALE, cancel_check=renewed)
    try:
        _sign(path)
        _HELD[path.absolute()] = taken
        yield taken
    finally:
        _HELD.pop(path.absolute(), None)
        lock.release()


def _acquire(lock: FileLock | SoftFileLease, path: Path, on_busy: OnBusy, **patience: Any) -> None:
    try:
        lock.acquire(**patience)
    except Timeout:
        on_busy(_holder_of(path))
        lock.acquire()


def _renewal_of(path: Path) -> Callable[[], bool]:
    def renewed_at() -> int | None:
        with suppress(FileNotFoundError):
            return path.stat(follow_symlinks=False).st_mtime_ns
        return None

    first = renewed_at()  # another time means that its holder is alive
    return lambda: first is not None and renewed_at() not in (None, first)


def _sign(path: Path) -> None:
    """Write into a lock file who holds it: a courtesy, which a full disk may refuse."""
    text = f"{os.getpid()} on {socket.gethostname()[:64]} since {datetime.now(UTC):%F %T} UTC"
    with suppress(OSError), os.fdopen(open_no_follow(path, os.O_RDWR), "r+b", 0) as file:
        if os.fstat(file.fileno()).st_nlink == 1:  # with another name it is not ours alone
            file.truncate()
            file.write(text.encode())


def _holder_of(path: Path) -> str:
    """The text in a lock file, which names its holder."""
    with suppress(OSError), os.fdopen(open_no_follow(path, os.O_RDONLY), "rb", 0) as file:
        return file.read(200).decode("utf-8", "replace").strip() or "unknown"
    return "unknown"


@contextmanager
def shared_lock(path: Path, on_busy: OnBusy) -> Iterator[None]:
    """Hold the lock file `path` together with others, against whoever wants it alone.

    Where it can neither be made nor opened, or the file system knows no locks, nothing is held.
    (filelock shares locks through a database in the file, which a reader may not write.)
    """
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):  # a store may belong to somebody else
        with suppress(OSError):
            descriptor = open_no_follow(path, flags)
            break
    else:
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            on_busy(_holder_of(path))
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        yield
    finally:
        os.close(descriptor)


def is_shared(path: Path) -> bool:
    """True if a lock that is held can be shared: it is held by readers."""

    def refuse(_holder: str) -> None:
        raise BlockingIOError

    try:
        with shared_lock(path, refuse):
            return True
    except BlockingIOError:
        return False
