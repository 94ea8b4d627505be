"""Bucket lock: one writer per run in a bucket, by an object that its holder renews.

No clock of another machine is believed: a lock counts as left behind when its content has not
changed while it was watched, or when its process ran on this machine and is gone.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Final, Self, final

import psutil

from toque.storage.bucket import Bucket
from toque.storage.bucket_errors import BucketError, RunBucketError

LOCK: Final = "lock.json"
HEARTBEAT: Final = 10.0
"""Seconds between renewals."""
STALE: Final = 45.0
"""Seconds without a renewal after which a lock counts as left behind."""
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
    _beats: int = 0
    _closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._me = uuid.uuid4().hex
        self._thread = threading.Thread(target=self._renew, name="toque-lock", daemon=True)

    def __enter__(self) -> Self:
        """Take it.

        Raises:
            RunBucketError: another process trains there.
            BucketError: the store refused or stayed away.
        """
        taken = self.bucket.read(LOCK) is not None
        if taken or not self.bucket.put(LOCK, self._content(), new=True):
            self._watch_until_stale()
            self.bucket.put(LOCK, self._content())
        time.sleep(self.settle)
        holder = _holder(self.bucket.read(LOCK))
        if holder.get("id") != self._me:
            raise self._refusal(holder)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Release it; one that cannot be removed goes stale by itself."""
        self._closing.set()
        self._thread.join(timeout=self.heartbeat)
        if self.lost.is_set():
            return
        try:
            if _holder(self.bucket.read(LOCK)).get("id") == self._me:
                self.bucket.remove([LOCK])
        except BucketError:
            return

    def _content(self) -> bytes:
        self._beats += 1
        return json.dumps(
            {
                "id": self._me,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "started": psutil.Process().create_time(),
                "beat": self._beats,
            }
        ).encode()

    def _watch_until_stale(self) -> None:
        first = self.bucket.read(LOCK)
        began = time.monotonic()
        while not _died_here(_holder(first)) and time.monotonic() - began < self.stale:
            time.sleep(min(1.0, self.stale / 5))
            now = self.bucket.read(LOCK)
            if now is None:
                return
            if now != first:
                raise self._refusal(_holder(now))

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
                if _holder(self.bucket.read(LOCK)).get("id") not in (self._me, None):
                    self.lost.set()
                    return
                self.bucket.put(LOCK, self._content())
            except BucketError:
                continue  # down: whoever comes meanwhile is seen at the next renewal


def _holder(content: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(content or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _died_here(holder: dict[str, Any]) -> bool:
    """Whether its process ran on this machine and does so no longer."""
    if holder.get("host") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return False
    try:
        return bool(psutil.Process(holder["pid"]).create_time() != holder.get("started"))
    except psutil.NoSuchProcess:
        return True
