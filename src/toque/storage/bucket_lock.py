"""Bucket lock: one writer per run in a bucket, by an object that its holder renews.

No clock of another machine is believed: a lock counts as left behind when its content has not
changed while it was watched, or when its process ran on this machine and is gone.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final, Self, final

from toque.storage.bucket import Bucket
from toque.storage.bucket_errors import BucketError, RunBucketError
from toque.storage.lease import HEARTBEAT, STALE
from toque.storage.owner import Owner, died_here, owner_in

LOCK: Final = "lock.json"
_SETTLE: Final = 1.0
"""Seconds after which a taken lock is read again, for stores without preconditions."""


@final
@dataclass(eq=False)
class BucketLock:
    """Hold the run in `bucket` against other machines, from entering to leaving.

    Args:
        bucket: the run's place.
        heartbeat: seconds between renewals.
        stale: seconds to watch a lock of another machine before taking it over.
        settle: seconds before reading the lock again.
    """

    bucket: Bucket
    heartbeat: float = HEARTBEAT
    stale: float = STALE
    settle: float = _SETTLE
    lost: threading.Event = field(default_factory=threading.Event)
    """Another process has taken the run over; nothing more may be written."""
    _closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._me = Owner()
        self._thread = threading.Thread(target=self._renew, name="toque-lock", daemon=True)

    def __enter__(self) -> Self:
        """Take it.

        Raises:
            RunBucketError: another process trains there.
            BucketError: the store refused or stayed away.
        """
        taken = self.bucket.read(LOCK) is not None
        if taken or not self.bucket.put(LOCK, self._me.record(), new=True):
            self._watch_until_stale()
            self.bucket.put(LOCK, self._me.record())
        time.sleep(self.settle)
        held = self.bucket.read(LOCK)
        if not self._me.wrote(held):
            raise self._refusal(owner_in(held))
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Release it; one that cannot be removed goes stale by itself."""
        self._closing.set()
        self._thread.join(timeout=self.heartbeat)
        if self.lost.is_set():
            return
        try:
            if self._me.wrote(self.bucket.read(LOCK)):
                self.bucket.remove([LOCK])
        except BucketError:
            return

    def _watch_until_stale(self) -> None:
        first = self.bucket.read(LOCK)
        began = time.monotonic()
        while not died_here(owner_in(first)) and time.monotonic() - began < self.stale:
            time.sleep(min(1.0, self.stale / 5))
            now = self.bucket.read(LOCK)
            if now is None:
                return
            if now != first:
                raise self._refusal(owner_in(now))

    def _refusal(self, holder: dict[str, Any]) -> RunBucketError:
        return RunBucketError(
            f"{self.bucket.address} is in use by another training process (id "
            f"{holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown machine')}), which "
            "renews its lock. Two runs in one place would overwrite each other: wait for it, stop "
            "it, or choose another address."
        )

    def _renew(self) -> None:
        while not self._closing.wait(self.heartbeat):
            try:
                held = self.bucket.read(LOCK)
                if held is not None and not self._me.wrote(held):
                    self.lost.set()
                    return
                self.bucket.put(LOCK, self._me.record())
            except BucketError:
                continue  # down: whoever comes meanwhile is seen at the next renewal
