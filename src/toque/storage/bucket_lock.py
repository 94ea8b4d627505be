"""Bucket lock: one writer per run in a bucket, by an object that its holder renews.

No clock of another machine is believed: a lock counts as left behind when its content has not
changed while it was watched, or when its process ran on this machine and is gone. Two machines may
have one host name (images, containers): a machine is known by its boot and by the space its process
ids are counted in, a process by its id and the moment it began, counted from that boot.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self, final

from toque.storage.bucket import Bucket, BucketError, RunBucketError
from toque.storage.locks import HEARTBEAT, STALE

LOCK: Final = "lock.json"
_SETTLE: Final = 1.0  # seconds until a taken lock is read again: stores may ignore preconditions


@final
@dataclass(eq=False)
class BucketLock:
    """Hold the run in `bucket` against other machines, from entering to leaving."""

    bucket: Bucket
    heartbeat: float = HEARTBEAT
    stale: float = STALE  # seconds to watch a lock of another machine before taking it over
    settle: float = _SETTLE
    lost: threading.Event = field(default_factory=threading.Event)
    """Another process has taken the run over; nothing more may be written."""
    _closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._me = Owner()
        self._thread = threading.Thread(target=self._renew, name="toque-lock", daemon=True)

    def __enter__(self) -> Self:
        """Take it; where another process trains there, that is a RunBucketError."""
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
            f"{holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown machine')} since "
            f"{holder.get('since', 'an unknown time')}), which renews its lock. Two runs in one "
            "place would overwrite each other: wait for it, stop it, or choose another address."
        )

    def look(self) -> None:
        """Set `lost` where the lock is another process's now."""
        held = self.bucket.read(LOCK)
        if held is not None and not self._me.wrote(held):
            self.lost.set()

    def _renew(self) -> None:
        while not self._closing.wait(self.heartbeat):
            try:
                self.look()
                if self.lost.is_set():
                    return
                self.bucket.put(LOCK, self._me.record())
            except BucketError:
                continue  # down: whoever comes meanwhile is seen at the next renewal


@final
class Owner:
    """This process as the owner of one lock; the record it writes says so in words, too."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self._facts = {
            "id": self.id,
            "machine": this_machine(),
            "host": socket.gethostname()[:64],
            "pid": os.getpid(),
            "began": began(os.getpid()),
            "since": f"{datetime.now(UTC):%F %T} UTC",
        }
        self._beats = 0

    def record(self) -> bytes:
        """JSON that is another one at every call, and always of one length."""
        self._beats += 1
        return json.dumps({**self._facts, "beat": f"{self._beats:012}"}).encode()

    def wrote(self, record: bytes | None) -> bool:
        """True if a record is of this owner."""
        return owner_in(record).get("id") == self.id


def owner_in(record: bytes | None) -> dict[str, Any]:
    """The owner that a record names; empty when it names none."""
    try:
        found = json.loads(record or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def this_machine() -> str | None:
    """A name for this machine since it started, and for the process ids seen here, if known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        processes = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None
    text = f"{boot} {processes} {socket.gethostname()}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def began(pid: int) -> int | None:
    """Start of a process in clock ticks since this machine started; None if not known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
        return int(text.rpartition(b")")[2].split()[19])  # field 22 of proc(5); names hold spaces
    except (OSError, ValueError, IndexError):
        return None


def died_here(owner: Mapping[str, Any]) -> bool:
    """True if an owner's process ran on this machine and has ended; False when in doubt."""
    pid, machine = owner.get("pid"), this_machine()
    if machine is None or owner.get("machine") != machine or not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False  # it lives and is another user's
    then, now = owner.get("began"), began(pid)
    return then is not None and now is not None and then != now
