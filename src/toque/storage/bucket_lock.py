"""Bucket lock: one writer per run in a bucket. The lock is an object that its owner renews.

The clocks of other machines are not trusted. A lock is abandoned if its content does not change
while this process watches it, or if its owner ran on this machine and has ended. Two machines may
have the same host name (images, containers), so a machine is identified by its boot id and process
namespace. A process is identified by its id and its start time since the boot.
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
_SETTLE: Final = 1.0
"""Seconds after which a new lock is read again, because some services ignore preconditions."""


@final
@dataclass(eq=False)
class BucketLock:
    """Lock on the run in `bucket`, as a context manager."""

    bucket: Bucket
    heartbeat: float = HEARTBEAT
    """Seconds between renewals."""
    stale: float = STALE
    """Seconds to watch another machine's lock before taking it over."""
    settle: float = _SETTLE
    lost: threading.Event = field(default_factory=threading.Event)
    """Set if another process has taken over the run. This process must not write any more data."""
    _closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._me = Owner()
        self._thread = threading.Thread(
            target=self._renew, name="toque-lock", daemon=True
        )

    def __enter__(self) -> Self:
        """Acquire the lock.

        Raises:
            RunBucketError: Another process has the lock.
        """
        exists = self.bucket.read(LOCK) is not None
        if exists or not self.bucket.put(LOCK, self._me.record(), new=True):
            self._wait_until_stale()
            self.bucket.put(LOCK, self._me.record())

        # Another process may have written the lock at the same time. The last writer has it.
        time.sleep(self.settle)
        record = self.bucket.read(LOCK)
        if not self._me.wrote(record):
            raise self._refusal(owner_in(record))
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Release the lock. A lock that cannot be removed expires."""
        self._closing.set()
        self._thread.join(timeout=self.heartbeat)
        if self.lost.is_set():
            return
        try:
            if self._me.wrote(self.bucket.read(LOCK)):
                self.bucket.remove([LOCK])
        except BucketError:
            return

    def _wait_until_stale(self) -> None:
        """Wait until the lock is removed or its owner has ended, or for `stale` seconds.

        Raises:
            RunBucketError: The owner has renewed the lock.
        """
        first = self.bucket.read(LOCK)
        owner = owner_in(first)
        end = time.monotonic() + self.stale
        while not died_here(owner) and time.monotonic() < end:
            time.sleep(min(1.0, self.stale / 5))
            current = self.bucket.read(LOCK)
            if current is None:
                return
            if current != first:
                raise self._refusal(owner_in(current))

    def _refusal(self, owner: dict[str, Any]) -> RunBucketError:
        return RunBucketError(
            f"{self.bucket.address} is in use by another training process (id "
            f"{owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown machine')} since "
            f"{owner.get('since', 'an unknown time')}), which renews its lock. Two runs at one "
            "address would overwrite each other. Wait for the other run, stop it, or choose "
            "another address."
        )

    def detect_takeover(self) -> None:
        """Set `lost` if another process has the lock."""
        record = self.bucket.read(LOCK)
        if record is not None and not self._me.wrote(record):
            self.lost.set()

    def _renew(self) -> None:
        """Renew the lock until it is released or lost."""
        while not self._closing.wait(self.heartbeat):
            try:
                self.detect_takeover()
                if self.lost.is_set():
                    return
                self.bucket.put(LOCK, self._me.record())
            except BucketError:
                continue  # the service did not respond: the next renewal detects a takeover


@final
class Owner:
    """This process as the owner of a lock, with a record that people can read."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self._facts = {
            "id": self.id,
            "machine": this_machine(),
            "host": socket.gethostname()[:64],
            "pid": os.getpid(),
            "began": process_start(os.getpid()),
            "since": f"{datetime.now(UTC):%F %T} UTC",
        }
        self._beats = 0

    def record(self) -> bytes:
        """Encode the owner as JSON. Every call returns another content of the same length."""
        self._beats += 1
        return json.dumps({**self._facts, "beat": f"{self._beats:012}"}).encode()

    def wrote(self, record: bytes | None) -> bool:
        """Check whether this owner wrote a record."""
        return owner_in(record).get("id") == self.id


def owner_in(record: bytes | None) -> dict[str, Any]:
    """Decode the owner in a record. Return {} if the record has no valid owner."""
    try:
        owner = json.loads(record or b"{}")
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def this_machine() -> str | None:
    """Return a hash of this machine, its boot and its process namespace, or None if unknown."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        processes = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return None
    text = f"{boot_id.strip()} {processes} {socket.gethostname()}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def process_start(pid: int) -> int | None:
    """Return a process's start in clock ticks since this machine booted, or None if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
        # The start is field 22 of proc(5). Split after the process name, which may have spaces.
        return int(text.rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def died_here(owner: Mapping[str, Any]) -> bool:
    """Check whether an owner's process ran on this machine and has ended.

    Return False if this is uncertain.
    """
    machine = this_machine()
    if machine is None or owner.get("machine") != machine:
        return False
    pid = owner.get("pid")
    if not isinstance(pid, int) or pid < 1:
        return False

    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False  # a living process of another user
    # Another process may have the id of the owner.
    recorded_start = owner.get("began")
    start = process_start(pid)
    return None not in (recorded_start, start) and recorded_start != start
