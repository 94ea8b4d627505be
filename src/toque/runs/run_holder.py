"""Holder of a run: the process that trains it, and its state, read without touching the lock.

Taking a lock to see whether it is free could refuse a run that begins in that moment, so the lock's
content is read instead: the process id in `.lock`, or a lease that is renewed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, final

import psutil

from toque.runs.places import FoundFile, Place
from toque.storage.bucket_lock import LOCK as BUCKET_LOCK
from toque.storage.bucket_lock import died_here, owner_in
from toque.storage.locks import STALE

_LOCK: Final = "checkpoints/.lock"
_MOST_BYTES: Final = 1 << 12
_CLOCK_SLACK: Final = 5.0
"""Seconds by which a process may seem younger than what it wrote."""


@dataclass(frozen=True)
class Holder:
    """Process that trains a run, as far as it is known."""

    state: Literal["alive", "gone", "unknown"]
    pid: str = ""


@final
class HolderWatch:
    """Looks at who holds a run.

    Args:
        place: home of the run.
        clock: seconds that pass.
    """

    def __init__(self, place: Place, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._place, self._clock = place, clock
        self._record: tuple[bytes, float | None] = b"", None
        self._unchanged_since = clock()

    def look(self) -> Holder:
        """The newest holder.

        Raises:
            OSError, BucketError: the place cannot be read.
        """
        is_local = self._place.folder is not None
        lease = f"{_LOCK}.lease" if is_local else BUCKET_LOCK
        if (found := self._place.look(lease)) is not None:
            record = self._place.read(lease, 0, min(found.bytes, _MOST_BYTES))
            return self._renewed(record, found.changed)
        if not is_local:
            return Holder("gone")  # who holds a bucket's run keeps its lock there
        found = self._place.look(_LOCK)
        if found is None:
            return Holder("unknown")
        return _process(self._pid(), found)

    def _pid(self) -> str:
        """The process id with which the text in `.lock` begins."""
        text = self._place.read(_LOCK, 0, 64).decode("ascii", "replace")
        return text.partition(" ")[0].strip()

    def _renewed(self, record: bytes, changed: float | None) -> Holder:
        """The holder of a lease: gone if its process is known to be, or if the lease stays."""
        now = self._clock()
        if (record, changed) != self._record:
            self._record, self._unchanged_since = (record, changed), now
        owner = owner_in(record)
        is_over = died_here(owner) or now - self._unchanged_since > STALE
        pid = str(owner.get("pid", "")) if self._place.folder is None else self._pid()
        return Holder("gone" if is_over else "alive", pid)


def _process(pid: str, lock: FoundFile) -> Holder:
    """The holder with a process id, which is gone if another process has the id by now."""
    if not pid.isascii() or not pid.isdigit() or len(pid) > 9:
        return Holder("unknown")
    try:
        began = psutil.Process(int(pid)).create_time()
        is_over = psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return Holder("gone", pid)
    except psutil.Error:
        return Holder("unknown", pid)
    if lock.changed is not None and began > lock.changed + _CLOCK_SLACK:
        return Holder("gone", pid)
    return Holder("gone" if is_over else "alive", pid)
