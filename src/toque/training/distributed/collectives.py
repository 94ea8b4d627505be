"""Collectives (all-reduce, all-gather, broadcast) by which the processes that share a run agree.

Which rank did not come to a collective is found out by a key-value store beside the process group
(under torchrun it lives in torchrun, and so outlives any rank). A rank whose collective failed says
there that it waits; who has not said so within a few seconds is missing. gloo's `monitored_barrier`
names a rank that hangs, but not one that was killed, and only rank 0 learns the name.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]  # public all the same
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from toque.errors import CheckpointError, RankLost, ToqueError, argument
from toque.training.callbacks import Requests
from toque.training.distributed.data_parallel import DataParallel, local_part
from toque.training.distributed.launcher import is_launched
from toque.units import Cursor, Progress

_OF_COLLECTIVES: Final = ("gloo", "nccl", "connection", "process group", "pair closure")
"""Words of errors that a backend raises during backward, where others come from, too; the last of a
sum of gloo's that waits beside the one that ran out of time."""
_ANSWER_SECONDS: Final = 3.0  # for the others to say that they wait, too
_FAREWELL_SECONDS: Final = 60.0  # most that rank 0 waits at the end of a run, which is over
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
            processes = [self._process(rank) for rank in silent]
            # Ranks that exchange nothing with a dead one notice last: they are not to blame.
            gone = [f"{name} is gone" for name, alive in processes if not alive]
            if gone:
                return "; ".join(gone) + ": killed, or out of memory"
            if not silent or time.monotonic() > deadline:
                return "; ".join(f"{name} does not answer" for name, _ in processes)
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


@dataclass(frozen=True)
class Ranks:
    """This process among those that share the run; alone unless made by `process_group.joined`.

    What exchanges something raises RankLost when another rank is gone or does not answer.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # number of this rank on its machine, and so of its CUDA device
    failures: RankFailures | None = None

    @property
    def is_main(self) -> bool:
        """True if this rank writes files and prints for all."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """True if there are others."""
        return self.world_size > 1

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The sums over the ranks, in float64; `values` itself when alone."""
        if not self.is_distributed:
            return list(values)
        held = torch.tensor(values, dtype=torch.float64)
        self._exchange(lambda: dist.all_reduce(held))
        return held.tolist()

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, by rank; any plain Python value."""
        found: list[Any] = [value] * self.world_size
        if self.is_distributed:
            self._exchange(lambda: dist.all_gather_object(found, value))
        return found

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's `value`; the others' does not matter."""
        found = [value]
        if self.is_distributed:
            self._exchange(lambda: dist.broadcast_object_list(found, src=0))
        return found[0]

    def any_rank(self, wants: Requests) -> Requests:
        """The requests of all ranks together; of several reasons that of the lowest rank."""
        asked: list[Requests] = self.all_gather(wants)
        return reduce(or_, asked)

    def all_reduce_max(self, count: int) -> int:
        """The largest of the ranks' counts."""
        held = torch.tensor(count)
        if self.is_distributed:
            self._exchange(lambda: dist.all_reduce(held, op=dist.ReduceOp.MAX))
        return int(held)

    def total(self, value: Tensor) -> Tensor:
        """[] the sum of `value` over the ranks, on its device; `value` itself when alone."""
        if not self.is_distributed:
            return value
        held = value.clone()
        self._exchange(lambda: dist.all_reduce(held))
        return held

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Forward and backward passes that exchange gradients or weights; see the class."""
        try:
            yield
        except RuntimeError as error:
            words = str(error).lower()
            known = isinstance(error, dist.DistError) or any(w in words for w in _OF_COLLECTIVES)
            if self.failures is None or not known:
                raise
            raise self.failures.lost(error) from error

    def assert_in_sync(
        self, when: str, sharing: DataParallel, progress: Progress, cursor: Cursor
    ) -> None:
        """Make sure that all ranks are at one place with the same weights, or CheckpointError."""
        if not self.is_distributed:
            return
        facts: dict[str, Any] = {
            "the step": progress.step,
            "the place in the data": str(cursor),
        }
        if not sharing.is_sharded:
            facts["the sum of the weights"] = weights_sum(sharing.model)
        first, *others = self.all_gather(facts)
        wrong = [
            f"{name} is {first[name]} on rank 0 and {here} on rank {rank}"
            for rank, own in enumerate(others, start=1)
            for name, here in own.items()
            if here != first[name]
        ]
        if wrong:
            raise CheckpointError(
                f"The ranks do not agree {when}: {'; '.join(wrong)}. The last checkpoint stands. "
                "All ranks must see the same run folder, model and store, on the same kind of "
                "device; if they do, suspect a machine's memory."
            )

    def _exchange(self, act: Callable[[], object]) -> None:
        """Run a collective, and restart the time within which the next one must come."""
        assert self.failures is not None
        try:
            act()
        except RuntimeError as error:  # every backend's errors, from a closed socket to a timeout
            raise self.failures.lost(error) from error
        # The stacks of a rank that never comes back here are written by a thread without Python,
        # so also when Python itself is stuck.
        faulthandler.dump_traceback_later(self.failures.timeout_seconds, exit=False)


def weights_sum(model: nn.Module) -> int:
    """The sum of the bits of the trainable weights on this rank, read as integers."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        local_part(p).view(kinds[p.element_size()]).sum(dtype=torch.int64)
        for p in model.parameters()
        if p.requires_grad
    ]
    return int(torch.stack(sums).sum()) if sums else 0
