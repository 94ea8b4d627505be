"""Owner of a lock: which process of which machine holds it, and whether that process is gone.

Two machines may have one host name (images, containers), and a process id says nothing elsewhere.
A machine is therefore known by its boot and by the space its process ids are counted in, and a
process by its id and the moment it began, counted from that boot and not by a clock that is set.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final


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
        }
        self._beats = 0

    def record(self) -> bytes:
        """JSON that is another one at every call, and always of one length."""
        self._beats += 1
        return json.dumps({**self._facts, "beat": f"{self._beats:012}"}).encode()

    def wrote(self, record: bytes | None) -> bool:
        """Whether a record is of this owner."""
        return owner_in(record).get("id") == self.id


def owner_in(record: bytes | None) -> dict[str, Any]:
    """The owner that a record names; empty when it names none."""
    try:
        found = json.loads(record or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def this_machine() -> str | None:
    """A name for this machine since it started, and for the process ids seen here.

    None where the system does not tell: then nothing is known of the processes of others.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        processes = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None
    text = f"{boot} {processes} {socket.gethostname()}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def began(pid: int) -> int | None:
    """When a process began, in clock ticks since this machine started; None if that is not told."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
        return int(text.rpartition(b")")[2].split()[19])  # field 22 of proc(5); names hold spaces
    except (OSError, ValueError, IndexError):
        return None


def died_here(owner: Mapping[str, Any]) -> bool:
    """Whether its process ran on this machine and does so no longer; False when in doubt."""
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
