"""Rank failure diagnosis: which rank did not come to a collective, and one message about it.

The ranks share a key-value store beside their process group (under torchrun it lives in torchrun,
and so outlives any rank). A rank whose collective failed says there that it waits; who has not
said so within a few seconds is missing. gloo's `monitored_barrier` does less: it names a rank
that hangs, but not one that was killed, and only rank 0 learns the name.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil
from torch.distributed import Store  # type: ignore[attr-defined]  # public all the same
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from toque.errors import RankLost, ToqueError, argument
from toque.training.distributed.launcher import is_launched

_ANSWER_SECONDS: Final = 3.0
"""Time for the others to say that they wait, too."""
_FAREWELL_SECONDS: Final = 60.0
"""Most that rank 0 waits for the others at the end of a run, which is over."""
_BY_ITSELF: Final = (
    ""
    if is_launched()
    else "; torchrun --max-restarts=3, or `toque train` with its own "
    f"{argument('gpus')}, does so by itself"
)


@dataclass(frozen=True)
class RankFailures:
    """Knowledge that the ranks of a run share about each other's end."""

    store: Store
    rank: int
    world_size: int
    timeout_seconds: float

    def enrol(self) -> None:
        """Say which process on which machine this rank is."""
        self.store.set(f"process/{self.rank}", json.dumps([os.getpid(), socket.gethostname()]))

    def leave(self) -> None:
        """Say that this rank needs the store no more; rank 0, with which it may go, is the last."""
        # A rank is through a collective as soon as it has its own result, and the others may still
        # be waiting for theirs, or asking the store about it.
        deadline = time.monotonic() + _FAREWELL_SECONDS
        with suppress(RuntimeError):  # the store is gone, and all is done
            left = self.store.add("left", 1)
            while self.rank == 0 and left < self.world_size and time.monotonic() < deadline:
                time.sleep(0.01)
                left = self.store.add("left", 0)

    def report(self, error: BaseException) -> None:
        """Take note that `error` ends this rank; of all ranks' errors only the first is printed."""
        code = error.exit_code if isinstance(error, ToqueError) else RankLost.exit_code
        end = f"{self.rank} {code}"
        try:
            is_first = self.store.compare_set("ended", "", end).decode() == end
        except RuntimeError:
            is_first = True  # the store went with the rank that held it
        if isinstance(error, ToqueError):
            error.said_by_another = not is_first
        else:  # into the file that torchrun asks for, so that its summary names the rank that began
            get_error_handler().record_exception(error)

    def lost(self, cause: RuntimeError) -> RankLost:
        """The error after a collective failed, with the exit code of a rank that ended before."""
        reason = next(iter(str(cause).strip().splitlines()), repr(cause))
        code = RankLost.exit_code
        try:
            self.store.set(f"waiting/{self.rank}", "")
            who = self._missing() or f"All ranks are there, and still a collective failed: {reason}"
            if self.store.check(["ended"]):
                who = "Another rank ended first, and its message says why"
                code = int(self.store.get("ended").split()[1])
        except RuntimeError:
            who = "The store that the ranks share is gone, and rank 0 or its torchrun with it"
        is_late = any(words in reason.lower() for words in ("timed out", "timeout"))
        late = f" The others waited {self.timeout_seconds:g} s for it (TOQUE_RANK_TIMEOUT)."
        error = RankLost(
            f"{who}.{late if is_late else ''} All ranks stop, and the last "
            f"checkpoint stands. The same command continues from it{_BY_ITSELF}."
        )
        error.exit_code = code
        return error

    def _missing(self) -> str:
        """The ranks that do not wait: those whose process has ended, else all others."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        while True:
            silent = [rank for rank in others if not self.store.check([f"waiting/{rank}"])]
            processes = {rank: self._process(rank) for rank in silent}
            # Ranks that exchange nothing with a dead one notice last: they are not to blame.
            gone = [f"{name} is gone" for name, alive in processes.values() if not alive]
            if gone:
                return "; ".join(gone) + ": killed, or out of memory"
            if not silent or time.monotonic() > deadline:
                return "; ".join(f"{name} does not answer" for name, _ in processes.values())
            time.sleep(0.05)

    def _process(self, rank: int) -> tuple[str, bool]:
        """The name of a rank, and whether it may be alive, as far as this machine can tell."""
        if not self.store.check([f"process/{rank}"]):
            return f"Rank {rank}", True
        pid, host = json.loads(self.store.get(f"process/{rank}"))
        try:
            ended = host == socket.gethostname() and (
                psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
            )
        except psutil.Error:
            ended = True
        return f"Rank {rank} (process {pid} on {host})", not ended
