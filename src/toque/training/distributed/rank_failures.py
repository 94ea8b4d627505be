"""Who is missing, when the ranks of a run do not meet: one message, from one of those left.

The ranks share a small key-value store beside their collectives (under torchrun it lives in
torchrun, so it outlives any rank). Each says there who it is, a failing one why it fails, and one
that waits in vain that it waits. Whoever has said nothing within a few seconds is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass
from typing import Any, Final

import psutil
from torch.distributed import Store  # type: ignore[attr-defined]  # public all the same

from toque.errors import RankLost, ToqueError

_ANSWER_SECONDS: Final = 3.0
"""Time for the others to say that they wait too, or why they failed."""


@dataclass(frozen=True)
class RollCall:
    """What the ranks say of themselves.

    Args:
        store: shared by all ranks.
        rank: this one.
        world_size: how many there are.
        timeout_seconds: after which a rank that does not answer is given up.
    """

    store: Store
    rank: int
    world_size: int
    timeout_seconds: float

    def enrol(self) -> None:
        """Say which process on which machine this rank is."""
        self._say("who", {"pid": os.getpid(), "host": socket.gethostname()})

    def failed(self, error: BaseException) -> None:
        """Tell the others why this rank ends; of equal errors only rank 0's is for the user."""
        code = error.exit_code if isinstance(error, ToqueError) else 1
        self._say("failed", {"kind": type(error).__name__, "exit_code": code})
        if self.rank == 0 or not isinstance(error, ToqueError):
            return
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            first = self._said("failed", 0)
            if first is not None:
                error.said_by_another = first["kind"] == type(error).__name__
                return
            if self._said("waiting", 0) is not None:
                return  # rank 0 has no error of its own
            time.sleep(0.05)

    def lost(self, cause: RuntimeError) -> RankLost:
        """The error to raise after a collective failed with `cause`."""
        self._say("waiting", {})
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            missing = [r for r in others if not self._spoke(r)]
            # Asked after: a rank that failed says so before it is gone.
            failures = [f for r in others if (f := self._said("failed", r)) is not None]
            if failures or time.monotonic() > deadline or not missing:
                break
            if all(map(self._is_gone, missing)) and not any(map(self._spoke, missing)):
                break
            time.sleep(0.05)
        if failures:
            error = RankLost("Another rank failed; its message says why.")
            error.exit_code = failures[0]["exit_code"]  # type: ignore[misc]  # of this error alone
            error.said_by_another = True
            return error
        reason = str(cause).strip().splitlines()[0] if str(cause).strip() else repr(cause)
        who = " ".join(map(self._of, missing)) or (
            f"All ranks are there, and still an exchange between them failed: {reason}."
        )
        waited = f" They waited {self.timeout_seconds:g} s for it (TOQUE_RANK_TIMEOUT)."
        error = RankLost(
            f"{who}{waited if 'timed out' in reason.lower() else ''} The other ranks stop, too, "
            "and the last checkpoint stands. The same command continues from it; torchrun "
            "--max-restarts=3 does so by itself."
        )
        error.said_by_another = not self._speaks_first()
        return error

    def _of(self, rank: int) -> str:
        """A sentence about a missing rank."""
        who = self._said("who", rank)
        if who is None:
            return f"Rank {rank} is lost."
        name = f"Rank {rank} (process {who['pid']} on {who['host']})"
        if who["host"] != socket.gethostname():
            return f"{name} is lost: it died, its machine did, or the network to it."
        state = _state(who["pid"])
        if state is None:
            return f"{name} is gone: it was killed, or ran out of memory."
        if state == psutil.STATUS_STOPPED:
            with contextlib.suppress(psutil.Error):
                psutil.Process(who["pid"]).resume()  # only awake it can write where it stood
            return f"{name} was stopped by a signal; it is woken to write its stack and end."
        return f"{name} is alive ({state}) and does not answer; its stack is in its error output."

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank cannot answer any more, as far as this machine can tell."""
        who = self._said("who", rank)
        here = who is not None and who["host"] == socket.gethostname()
        return who is not None and here and _state(who["pid"]) is None

    def _spoke(self, rank: int) -> bool:
        return self._said("waiting", rank) is not None or self._said("failed", rank) is not None

    def _speaks_first(self) -> bool:
        try:
            return bool(self.store.add("speaker", 1) == 1)
        except RuntimeError:
            return True  # the store went with the rank that held it

    def _say(self, what: str, content: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the same
            self.store.set(f"{what}/{self.rank}", json.dumps(content))

    def _said(self, what: str, rank: int) -> dict[str, Any] | None:
        key = f"{what}/{rank}"
        try:
            if not self.store.check([key]):
                return None
            said: dict[str, Any] = json.loads(self.store.get(key))
        except RuntimeError:
            return None
        return said


def _state(pid: int) -> str | None:
    """What a process of this machine does; None when it has ended."""
    try:
        state: str = psutil.Process(pid).status()
    except psutil.Error:
        return None
    return None if state == psutil.STATUS_ZOMBIE else state
