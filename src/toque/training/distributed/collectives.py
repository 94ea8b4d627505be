"""Collectives among the processes that share every update of a run, and what they agree on.

Each rank computes the gradient of its share of an update's rows. Losses are sums, divided by the
target tokens of the whole update before any backward, so the sum of the ranks' gradients is the
gradient of one process: one all-reduce after the last micro-batch is all that training needs.
Everything that is decided (when to stop, save, evaluate) is agreed on at the same place by all.

DistributedDataParallel is not used: its averages would have to be multiplied back, it wants every
call to go through its own forward, and a rank without rows, or with fewer micro-batches than
others, needs special care there and none here.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toque.errors import CheckpointError
from toque.training.distributed.rank_failures import RankFailures
from toque.training.events import Requests
from toque.units import Cursor, Progress

_BUCKET_BYTES: Final = 32 * 2**20
"""Gradients are all-reduced in buckets of this size, one under way while the next is filled."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that share the run; alone unless made by `launch.joined`.

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
        """Whether this rank writes files and prints for all."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there are others."""
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
        """What any rank asks for; of several reasons that of the lowest rank."""
        asked: list[Requests] = self.all_gather(wants)
        return reduce(or_, asked)

    def sum_gradients(self, parameters: Iterable[nn.Parameter], loss: Tensor) -> Tensor:
        """Replace every gradient by its sum over the ranks.

        A parameter that has a gradient on any rank gets one on all; one that has none anywhere
        keeps none, as in one process.

        Args:
            parameters: the same ones in the same order on every rank.
            loss: [] this rank's.

        Returns:
            [] the sum of `loss` over the ranks.
        """
        if not self.is_distributed:
            return loss
        trained = list(parameters)
        reached = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8)
        self._exchange(lambda: dist.all_reduce(reached, op=dist.ReduceOp.MAX))
        gradients = [_gradient(p) for p, hit in zip(trained, reached.tolist(), strict=True) if hit]
        total = loss.clone()
        self._exchange(lambda: self._sum_all([*gradients, total]))
        return total

    def _sum_all(self, tensors: list[Tensor]) -> None:
        under_way: tuple[list[Tensor], Tensor, Any] | None = None
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            work = dist.all_reduce(flat, async_op=True)
            if under_way is not None:
                _finish(*under_way)
            under_way = (bucket, flat, work)
        if under_way is not None:
            _finish(*under_way)

    def assert_in_sync(
        self, when: str, model: nn.Module, progress: Progress, cursor: Cursor
    ) -> None:
        """Make sure that all ranks are at the same place with the same weights.

        Args:
            when: for the message: "before a save".
            model: its trainable weights are compared by their sum.
            progress: of this rank.
            cursor: of this rank.

        Raises:
            CheckpointError: on every rank, when they differ.
        """
        if not self.is_distributed:
            return
        facts = {
            "the step": progress.step,
            "the place in the data": str(cursor),
            "the sum of the weights": weights_sum(model),
        }
        held = self.all_gather(facts)
        wrong = [
            f"{name} is {held[0][name]} on rank 0 and {other[name]} on rank {rank}"
            for rank, other in enumerate(held)
            for name in facts
            if other[name] != held[0][name]
        ]
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
    """A checksum of the trainable weights that any changed bit changes.

    The sum of their bits read as integers: cheap, and enough to tell replicas apart.
    """
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        p.detach().view(kinds[p.element_size()]).sum(dtype=torch.int64)
        for p in model.parameters()
        if p.requires_grad
    ]
    return int(torch.stack(sums).sum()) if sums else 0


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(tensors: list[Tensor]) -> Iterable[list[Tensor]]:
    """Consecutive tensors of one number format, about `_BUCKET_BYTES` together."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size >= _BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket


def _finish(bucket: list[Tensor], flat: Tensor, work: Any) -> None:
    work.wait()
    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
