"""Collectives (all-reduce, all-gather, broadcast) of the ranks that share a run.

After a failed collective, each rank records in a key-value store that it waits. A rank without such
a record after a few seconds is missing. The store is separate from the process group. Under
torchrun it belongs to torchrun, so it outlives any rank. gloo's `monitored_barrier` is not enough:
it names a rank that hangs, but not a rank that was killed, and only rank 0 receives the name.
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
from typing import Any, Final, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from toque.errors import CheckpointError, RankLost, ToqueError, argument
from toque.training.callbacks import Requests
from toque.training.distributed.data_parallel import DataParallel, local_part
from toque.training.distributed.launcher import is_launched
from toque.units import Cursor, Progress

_BACKEND_WORDS: Final = ("gloo", "nccl", "connection", "process group", "pair closure")
"""Words that identify a backend error during the backward pass. gloo reports "pair closure" for
an all-reduce that is waiting when another one times out."""
_ANSWER_SECONDS: Final = 3.0
"""Seconds in which the other ranks must record that they are waiting."""
_LEAVE_SECONDS: Final = 60.0
"""Maximum time for which rank 0 waits for the other ranks at the end of a run."""
_RESTART_ADVICE: Final = (
    f" torchrun --max-restarts=3, or `toque train` with {argument('gpus')}, restarts it "
    "automatically."
)


class _RankProcess(NamedTuple):
    """Process of a rank."""

    name: str
    is_alive: bool = True


@dataclass(frozen=True)
class RankFailures:
    """Shared record of how the ranks of a run ended."""

    store: Store
    rank: int
    world_size: int
    timeout_seconds: float

    def register(self) -> None:
        """Record the process and the machine of this rank."""
        self.store.set(
            f"process/{self.rank}", json.dumps([os.getpid(), socket.gethostname()])
        )

    def leave(self) -> None:
        """Record that this rank no longer needs the store. Rank 0 waits for all ranks.

        Rank 0 may own the store, and another rank may still wait for the last collective.
        """
        deadline = time.monotonic() + _LEAVE_SECONDS
        with suppress(RuntimeError):  # the store is closed, so all ranks have finished
            n_left = self.store.add("left", 1)
            if self.rank > 0:
                return
            while n_left < self.world_size and time.monotonic() < deadline:
                time.sleep(0.01)
                n_left = self.store.add("left", 0)

    def report(self, error: BaseException) -> None:
        """Record that `error` ends this rank. Only the first error of all ranks will be printed."""
        code = error.exit_code if isinstance(error, ToqueError) else RankLost.exit_code
        end = f"{self.rank} {code}"
        try:
            is_first = self.store.compare_set("ended", "", end).decode() == end
        except RuntimeError:
            is_first = True  # the rank that owned the store has ended
        if isinstance(error, ToqueError):
            error.said_by_another = not is_first
        else:  # torchrun reads this file to name the first failed rank in its summary
            get_error_handler().record_exception(error)

    def diagnose(self, cause: RuntimeError) -> RankLost:
        """Find the lost ranks after a failed collective, and return the error to raise.

        The error has the exit code of the rank that ended first, if that rank recorded it.
        """
        reason = next(iter(str(cause).strip().splitlines()), repr(cause))
        first_code: int | None = None
        try:
            self.store.set(f"waiting/{self.rank}", "")
            missing = self._describe_missing_ranks()
            first_code = self._first_exit_code()
        except RuntimeError:
            problem = (
                "The store of the ranks is gone, so rank 0 or its torchrun has ended"
            )
        else:
            problem = missing or f"A collective of all ranks failed: {reason}"
            if first_code is not None:
                problem = "Another rank ended first. Its message has the reason"

        timeout = ""
        if "timed out" in reason.lower() or "timeout" in reason.lower():
            timeout = f" The others waited {self.timeout_seconds:g} s for it (TOQUE_RANK_TIMEOUT)."
        advice = "" if is_launched() else _RESTART_ADVICE
        error = RankLost(
            f"{problem}.{timeout} All ranks stop. The last checkpoint is intact, and the same "
            f"command continues from it.{advice}"
        )
        if first_code is not None:
            error.exit_code = first_code
        return error

    def _first_exit_code(self) -> int | None:
        """Return the exit code of the rank that ended first. None if no rank recorded its end."""
        if not self.store.check(["ended"]):
            return None
        return int(self.store.get("ended").split()[1])

    def _describe_missing_ranks(self) -> str:
        """List the ranks that have ended. If all are alive, list the ranks that do not answer.

        Wait a few seconds for answers. Return "" if all ranks answer.
        """
        deadline = time.monotonic() + _ANSWER_SECONDS
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        while True:
            silent = [
                rank for rank in others if not self.store.check([f"waiting/{rank}"])
            ]
            processes = [self._find_process(rank) for rank in silent]
            # A silent rank may not have noticed the failure yet, so name ended ranks if possible.
            ended = [f"{each.name} is gone" for each in processes if not each.is_alive]
            if ended:
                return "; ".join(ended) + ": killed, or out of memory"
            if not silent or time.monotonic() > deadline:
                return "; ".join(f"{each.name} does not answer" for each in processes)
            time.sleep(0.05)

    def _find_process(self, rank: int) -> _RankProcess:
        """Look up the process of a rank. A process on another machine counts as alive."""
        if not self.store.check([f"process/{rank}"]):
            return _RankProcess(f"Rank {rank}")
        pid, host = json.loads(self.store.get(f"process/{rank}"))
        is_alive = True
        if host == socket.gethostname():
            try:
                is_alive = psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            except psutil.Error:
                is_alive = False
        return _RankProcess(f"Rank {rank} (process {pid} on {host})", is_alive)


@dataclass(frozen=True)
class Ranks:
    """Ranks that share the run, with this process as `rank`. The default is a single process.

    Methods that exchange data raise RankLost if another rank has ended or does not answer.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Index of this rank on its machine, and of its CUDA device."""
    failures: RankFailures | None = None

    @property
    def is_main(self) -> bool:
        """True if this rank writes the files and the output of the run."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """True if there are several ranks."""
        return self.world_size > 1

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Sum values over the ranks, in float64."""
        if not self.is_distributed:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        self._exchange(lambda: dist.all_reduce(sums))
        return sums.tolist()

    def all_gather(self, value: Any) -> list[Any]:
        """Gather a plain Python value from every rank, in the order of the ranks."""
        values: list[Any] = [value] * self.world_size
        if self.is_distributed:
            self._exchange(lambda: dist.all_gather_object(values, value))
        return values

    def broadcast(self, value: Any = None) -> Any:
        """Return the value of rank 0 on all ranks. Other ranks' values are ignored."""
        values = [value]
        if self.is_distributed:
            self._exchange(lambda: dist.broadcast_object_list(values, src=0))
        return values[0]

    def combine_requests(self, requests: Requests) -> Requests:
        """Combine the requests from all ranks. The reason is from the first rank that has one."""
        requests_by_rank: list[Requests] = self.all_gather(requests)
        return reduce(or_, requests_by_rank)

    def all_reduce_max(self, count: int) -> int:
        """Return the largest count of all ranks."""
        largest = torch.tensor(count)
        if self.is_distributed:
            self._exchange(lambda: dist.all_reduce(largest, op=dist.ReduceOp.MAX))
        return int(largest)

    def total(self, value: Tensor) -> Tensor:
        """Sum a tensor [] over the ranks, on its device."""
        if not self.is_distributed:
            return value
        total = value.clone()
        self._exchange(lambda: dist.all_reduce(total))
        return total

    @contextmanager
    def diagnosing_failures(self) -> Iterator[None]:
        """Convert errors from the backend in the forward and backward passes into RankLost."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).lower()
            is_backend_error = isinstance(error, dist.DistError) or any(
                words in text for words in _BACKEND_WORDS
            )
            if self.failures is None or not is_backend_error:
                raise
            raise self.failures.diagnose(error) from error

    def assert_in_sync(
        self, when: str, sharing: DataParallel, progress: Progress, cursor: Cursor
    ) -> None:
        """Check that all ranks have the same step, data position and weights.

        Args:
            when: Point in the run, for the message, e.g. "before a save".
            sharing: Model on which the ranks work together.
            progress: Progress of this rank.
            cursor: Data position of this rank.

        Raises:
            CheckpointError: The ranks differ.
        """
        if not self.is_distributed:
            return
        facts: dict[str, Any] = {
            "the step": progress.step,
            "the data position": str(cursor),
        }
        if not sharing.is_sharded:
            facts["the sum of the weights"] = weights_sum(sharing.model)
        first, *others = self.all_gather(facts)
        differences = [
            f"{name} is {first[name]} on rank 0 and {value} on rank {rank}"
            for rank, rank_facts in enumerate(others, start=1)
            for name, value in rank_facts.items()
            if value != first[name]
        ]
        if differences:
            raise CheckpointError(
                f"The ranks do not agree {when}: {'; '.join(differences)}. The last checkpoint is "
                "intact. All ranks must see the same run folder, model and store, on the same kind "
                "of device. If they do, a machine may have faulty memory."
            )

    def _exchange(self, collective: Callable[[], object]) -> None:
        """Run a collective, and start a timer for the next one."""
        assert self.failures is not None
        try:
            collective()
        except RuntimeError as error:  # such as a closed connection or a timeout
            raise self.failures.diagnose(error) from error
        # If this rank hangs before its next collective, a thread in C prints the stacks of its
        # threads. It does not need Python's lock.
        faulthandler.dump_traceback_later(self.failures.timeout_seconds, exit=False)


def weights_sum(model: nn.Module) -> int:
    """Sum the trainable weights on this rank, read as integers so that every bit counts."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        local_part(p).view(kinds[p.element_size()]).sum(dtype=torch.int64)
        for p in model.parameters()
        if p.requires_grad
    ]
    return int(torch.stack(sums).sum()) if sums else 0
