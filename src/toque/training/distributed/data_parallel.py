"""Data parallelism: how the ranks of a run compute an update together.

A loss is a sum, divided by the target tokens of the entire update before any backward pass. So the
sum of the ranks' gradients is the gradient that a single process would compute. PyTorch sums the
gradients during the backward pass: with DistributedDataParallel if every rank has all weights (this
module), or with FSDP2 if each rank has a part (`sharding.py`). Both average by default and are
configured to sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, TypeGuard, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from toque.batch import Batch
from toque.hardware.glibc_malloc import keep_freed_memory

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # loading it takes a second

LossFn = Callable[[nn.Module, Batch], Tensor]
BUCKET_MIB: Final = {"cpu": 4, "cuda": 25}
"""Size of DDP's gradient buckets in MiB. 25 is the default. With gloo, smaller buckets are faster,
because their exchange starts earlier (lab/performance.md)."""


class DataParallel:
    """Model of a run and this rank's share of each update. The base class is for one process."""

    strategy = "single"  # single, ddp or fsdp
    is_sharded = False
    """True if a rank has only a part of the weights. Then all ranks must compute together."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def can_retry(self) -> bool:
        """True if this rank can retry the current update alone."""
        return True

    def micro_batches(self, batch: Batch, rows: int) -> Sequence[Batch]:
        """Start an attempt at an update: split this rank's rows into parts of at most `rows`."""
        return batch.split(rows)

    def loss(self, loss_fn: LossFn, batch: Batch, *, last: bool) -> Tensor:
        """Compute `loss_fn(model, batch)`, a tensor [].

        Args:
            loss_fn: The loss function, a sum over target tokens.
            batch: A micro-batch.
            last: Whether this is the last micro-batch of the update. Only its backward pass sums
                the gradients over the ranks.
        """
        del last
        return loss_fn(self.model, batch)

    def evaluate(self, loss_fn: LossFn, batch: Batch) -> Tensor:
        """Compute `loss_fn(model, batch)`, a tensor [], without gradients."""
        with torch.no_grad():
            return loss_fn(self.model, batch)

    def sum_of_parts(self, values: Sequence[float]) -> Sequence[float]:
        """Sum statistics of the weights, such as squared norms, over the ranks' parts."""
        return values

    def full_model(self) -> AbstractContextManager[nn.Module]:
        """Return a context with the entire model, for use without other ranks. All must enter."""
        return nullcontext(self.model)


class LossModule(nn.Module):
    """Module that computes a model's loss in its forward pass. DDP and FSDP wrap this module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # DDP reads this attribute and then does not synchronise the buffers, which are equal on all
        # ranks. The argument with the same effect has a different name in torch 2.11.
        self._ddp_params_and_buffers_to_ignore = [
            name for name, _ in self.named_buffers()
        ]

    def forward(self, loss_fn: LossFn, batch: Batch) -> Tensor:
        """Compute `loss_fn(model, batch)`, a tensor []."""
        return loss_fn(self.model, batch)


@final
class Replicated(DataParallel):
    """Model with all weights on every rank. DistributedDataParallel sums the gradients.

    `find_unused_parameters` makes DDP keep the first layout of the buckets, and leaves unused
    weights without a gradient. With more than two ranks, the order of a sum depends on the position
    in the bucket. So a resumed run needs the same layout to be bitwise identical.
    """

    strategy = "ddp"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._exchanging = False
        device = next(model.parameters()).device
        if device.type == "cpu":
            keep_freed_memory()
        module = LossModule(model)
        # An unused weight: DDP warns if it looks for unused weights and finds none.
        module.idle = nn.Parameter(torch.zeros(1, device=device))
        self._ddp = DistributedDataParallel(
            module,
            init_sync=False,  # `assert_in_sync` checks that the weights are equal
            bucket_cap_mb=BUCKET_MIB[device.type],
            gradient_as_bucket_view=True,
            find_unused_parameters=True,
        )
        # DDP rejects a function with string annotations, so register a lambda.
        self._ddp.register_comm_hook(None, lambda _, bucket: _sum_bucket(bucket))

    def micro_batches(self, batch: Batch, rows: int) -> Sequence[Batch]:
        """Start an attempt with at least one part, because all ranks must all-reduce."""
        self._exchanging = False
        return batch.split(rows) or [batch.unlabelled()]

    def loss(self, loss_fn: LossFn, batch: Batch, *, last: bool) -> Tensor:
        """Compute `loss_fn(model, batch)`, a tensor []. Only the last backward pass all-reduces."""
        self._ddp.require_backward_grad_sync = last
        loss = cast("Tensor", self._ddp(loss_fn, batch))
        self._exchanging = last
        return loss

    @property
    def can_retry(self) -> bool:
        """True if this rank has not started to exchange gradients."""
        return not self._exchanging


def _sum_bucket(bucket: Any) -> Any:
    """Sum a gradient bucket over the ranks. This is a DDP communication hook. DDP averages."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Check whether each rank has a part of the tensor."""
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without its gradient history. It shares the memory."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the entire tensor. If it is sharded, this is a collective of all ranks."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def shard_like(model_tensor: Tensor, tensor: Tensor) -> Tensor:
    """Shard a tensor in the same way as `model_tensor`, without communication.

    Every rank must have the entire tensor. It is returned unchanged if `model_tensor` is not
    sharded, or if it is sharded already.
    """
    if not is_sharded(model_tensor) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = model_tensor.device_mesh, model_tensor.placements
    # Without a source rank, each rank takes its own slice.
    return distribute_tensor(
        tensor.to(model_tensor.device), mesh, placements, src_data_rank=None
    )


@torch.no_grad()
def gather_tensors(
    files: Mapping[str, Mapping[str, Tensor]], *, keep: bool
) -> dict[str, dict[str, Tensor]]:
    """Gather the sharded tensors of a save in CPU memory, one at a time. All ranks must call this.

    Args:
        files: Tensors by file stem and name.
        keep: Whether this rank needs the tensors. If not, the result is empty.
    """
    gathered: dict[str, dict[str, Tensor]] = {}
    for stem, tensors in files.items():
        gathered[stem] = {}
        for name, tensor in tensors.items():
            full = full_tensor(tensor).cpu() if is_sharded(tensor) else tensor
            if keep:
                gathered[stem][name] = full
    return gathered
