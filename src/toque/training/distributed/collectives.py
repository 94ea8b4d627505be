"""Collectives (all-reduce, all-gather, broadcast) by which the processes that share a run agree.

Everything that is decided (when to stop, save, evaluate) is agreed on at the same place by all.
Gradients are summed by PyTorch's own engine (`sharing.py`, `sharding.py`).
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toque.errors import CheckpointError
from toque.training.callbacks import Requests
from toque.training.distributed.rank_failures import RankFailures
from toque.training.distributed.sharing import Sharing, own_part
from toque.units import Cursor, Progress

_OF_COLLECTIVES: Final = ("gloo", "nccl", "connection", "process group", "pair closure")
"""Words of errors that a backend raises during backward, where others come from, too.

The last is gloo's, of a sum that waits beside the one that ran out of time: it names no backend,
and which of the two ends the backward pass is a race.
"""
_SUM: Final = "the sum of the weights"


@dataclass(frozen=True)
class Ranks:
    """This process among those that share the run; alone unless made by `process_group.joined`.

    Every method that exchanges something raises RankLost when another rank is gone or does not
    answer.

    Args:
        rank: which one; 0 is the main one: it alone writes files and prints.
        world_size: how many there are.
        local_rank: which one on this machine, and so which CUDA device.
        failures: finds out which rank is missing when the others do not answer.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
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
        self, when: str, sharing: Sharing, progress: Progress, cursor: Cursor
    ) -> None:
        """Make sure that all ranks are at the same place with the same weights, or CheckpointError.

        Trainable weights of ranks that hold the same part are compared by their sum.
        """
        if not self.is_distributed:
            return
        facts = {
            "the step": progress.step,
            "the place in the data": str(cursor),
            _SUM: weights_sum(sharing.model),
        }
        held = self.all_gather((sharing.part, facts))
        first = {of: rank for rank, (of, _) in reversed(list(enumerate(held)))}
        wrong = []
        for rank, (of, own) in enumerate(held):
            for name, here in own.items():
                like = first[of] if name == _SUM else 0
                there = held[like][1][name]
                if here != there:
                    wrong.append(f"{name} is {there} on rank {like} and {here} on rank {rank}")
        if wrong:
            raise CheckpointError(
                f"The ranks do not agree {when}: {'; '.join(wrong)}. Nothing was saved of it and "
                "the last checkpoint stands. All ranks must see the same run folder, model and "
                "store, on the same kind of device; if they do, suspect a machine's memory."
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
        own_part(p).view(kinds[p.element_size()]).sum(dtype=torch.int64)
        for p in model.parameters()
        if p.requires_grad
    ]
    return int(torch.stack(sums).sum()) if sums else 0
