"""File locks of the filelock library: flock, or a lease on file systems without flock.

The operating system releases a flock when its process ends for any reason. A lease is a file that
its owner renews. Some network file systems need leases.
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

HEARTBEAT: Final = 10.0
"""Seconds between renewals of a lease."""
STALE: Final = 45.0
"""Seconds without a renewal after which a lease counts as abandoned."""
_UNSUPPORTED: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of network file systems without locks."""

OnBusy = Callable[[str], None]
"""Function called if another process has the lock.

Its argument describes the process, e.g. "4711 on node-1 since 2026-11-25 02:30:17 UTC". The
function raises an error to give up, or returns to wait for the lock.
"""


@dataclass(frozen=True)
class AcquiredLock:
    """Lock that this process has acquired."""

    lease: SoftFileLease | None = None
    note: str | None = None
    """Message for the user if the lock is a lease."""

    def is_mine(self) -> bool:
        """Check whether this process still has the lock. Only a lease can be taken over."""
        lease = self.lease
        # is_lock_held_by_us reads the file. After SIGSTOP, the heartbeat thread has not detected a
        # takeover yet.
        return lease is None or (lease.compromise is None and lease.is_lock_held_by_us)


_ACQUIRED: Final[dict[Path, AcquiredLock]] = {}
"""Locks of this process by the absolute path of the lock file."""


def acquired_lock(path: Path) -> AcquiredLock | None:
    """Look up this process's lock on `path`. Return None if it has no lock."""
    return _ACQUIRED.get(path.absolute())


@contextmanager
def file_lock(path: Path, on_busy: OnBusy) -> Iterator[AcquiredLock]:
    """Lock the file `path` and write the owner into it. Create the file and its folder if missing.

    Raises:
        OSError: The file cannot be opened or is a symbolic link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Unlike FileLock, open_no_follow reports a link in its error.
    os.close(open_no_follow(path, os.O_RDWR | os.O_CREAT))
    lock: FileLock | SoftFileLease = FileLock(
        path, thread_local=False, fallback_to_soft=False
    )
    acquired = AcquiredLock()
    try:
        _acquire(lock, path, on_busy, blocking=False)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        lock = _acquire_lease(path, on_busy)
        note = (
            f"the file system of {path.parent} has no file locks ({error.strerror}), so the "
            f"folder is locked by {path.name}.lease, which is renewed every {HEARTBEAT:.0f} seconds"
        )
        acquired = AcquiredLock(lock, note)

    try:
        _write_owner(path)
        _ACQUIRED[path.absolute()] = acquired
        yield acquired
    finally:
        _ACQUIRED.pop(path.absolute(), None)
        lock.release()


@contextmanager
def inheritable_lock(path: Path) -> Iterator[int | None]:
    """Yield the descriptor of a locked file, or None if another process has the lock.

    A child process that inherits the descriptor keeps the lock until it ends, even if this process
    is killed.

    Raises:
        OSError: The file cannot be opened, is a symbolic link, or cannot be locked.
    """
    descriptor = open_no_follow(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


def _acquire(
    lock: FileLock | SoftFileLease, path: Path, on_busy: OnBusy, **patience: Any
) -> None:
    """Acquire a lock. If it is not free in time, call `on_busy` and wait for the lock.

    `patience` is passed to the first call of `lock.acquire`.
    """
    try:
        lock.acquire(**patience)
    except Timeout:
        on_busy(_owner_of(path))
        lock.acquire()


def _acquire_lease(path: Path, on_busy: OnBusy) -> SoftFileLease:
    """Acquire a lease next to the lock file `path`, on a file system without locks."""
    lease = SoftFileLease(
        path.with_name(f"{path.name}.lease"),
        lease_duration=STALE,
        heartbeat_interval=HEARTBEAT,
        thread_local=False,  # the thread that saves checks the lease
    )
    # Wait until the lease is free, abandoned, or renewed by a living owner.
    is_renewed = _renewal_check(Path(lease.lock_file))
    _acquire(lease, path, on_busy, timeout=2 * STALE, cancel_check=is_renewed)
    return lease


def _renewal_check(path: Path) -> Callable[[], bool]:
    """Return a function that detects a renewal of a lease by a later modification time."""

    def renewal_time() -> int | None:
        with suppress(FileNotFoundError):
            return path.stat(follow_symlinks=False).st_mtime_ns
        return None

    first = renewal_time()
    return lambda: first is not None and renewal_time() not in (None, first)


def _write_owner(path: Path) -> None:
    """Write this process into a lock file, for messages. Ignore errors, such as a full disk."""
    text = f"{os.getpid()} on {socket.gethostname()[:64]} since {datetime.now(UTC):%F %T} UTC"
    with (
        suppress(OSError),
        os.fdopen(open_no_follow(path, os.O_RDWR), "r+b", 0) as file,
    ):
        # A file with a second hard link may be the user's.
        if os.fstat(file.fileno()).st_nlink == 1:
            file.truncate()
            file.write(text.encode())


def _owner_of(path: Path) -> str:
    """Read the owner from a lock file. Return "unknown" if it cannot be read."""
    with (
        suppress(OSError),
        os.fdopen(open_no_follow(path, os.O_RDONLY), "rb", 0) as file,
    ):
        return file.read(200).decode("utf-8", "replace").strip() or "unknown"
    return "unknown"


@contextmanager
def shared_lock(path: Path, on_busy: OnBusy) -> Iterator[None]:
    """Lock the file `path` for reading. Readers share the lock. A writer needs exclusive access.

    Nothing is locked if the file can be neither created nor opened, or if the file system has no
    locks. (The filelock library shares locks through a database, which some readers cannot write.)
    """
    descriptor = _open_or_create(path)
    if descriptor is None:
        yield
        return

    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            on_busy(_owner_of(path))
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        yield
    finally:
        os.close(descriptor)


def _open_or_create(path: Path) -> int | None:
    """Open a file, which is created if possible. Return None if it cannot be opened."""
    # A store that belongs to another user can only be read.
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
        with suppress(OSError):
            return open_no_follow(path, flags)
    return None


def is_shared(path: Path) -> bool:
    """Check whether a locked file is locked by readers only."""

    def refuse(_owner: str) -> None:
        raise BlockingIOError

    try:
        with shared_lock(path, refuse):
            return True
    except BlockingIOError:
        return False
