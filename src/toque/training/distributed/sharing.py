"""Sharing of an update: how the ranks of a run hold its model and sum its gradients.

Losses are sums, divided by the target tokens of the whole update before any backward, so the sum of
the ranks' gradients is the gradient of one process. PyTorch's own engine adds them while backward
goes on: DistributedDataParallel where every rank holds all weights (here), FSDP2 where each holds a
part (`sharding.py`). Both average by default and are told to sum.
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
"""Gradients are exchanged in buckets of this size while backward goes on. 25 is DDP's own; over
gloo smaller ones begin earlier, and less is left when backward ends (lab/performance.md)."""


class Sharing:
    """The model of a run as its ranks hold it: here whole, by one process."""

    strategy = "single"  # single, ddp or fsdp
    is_sharded = False
    """True if a rank holds parts of the weights, so that all ranks must compute together."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def may_repeat(self) -> bool:
        """True if this rank alone may begin the attempt again, unseen by the others."""
        return True

    def micro_batches(self, batch: Batch, rows: int) -> Sequence[Batch]:
        """A new attempt at an update: this rank's share of it, at most `rows` rows at once."""
        return batch.split(rows)

    def loss(self, loss_fn: LossFn, batch: Batch, *, last: bool) -> Tensor:
        """[] `loss_fn(model, batch)`; once `last`, backward sums the gradients over the ranks."""
        del last
        return loss_fn(self.model, batch)

    def evaluate(self, loss_fn: LossFn, batch: Batch) -> Tensor:
        """[] `loss_fn(model, batch)` without gradients."""
        with torch.no_grad():
            return loss_fn(self.model, batch)

    def sum_of_parts(self, values: Sequence[float]) -> Sequence[float]:
        """Sums over the parts of the weights, of which each rank gives its own's."""
        return values

    def whole(self) -> AbstractContextManager[nn.Module]:
        """The model with all weights, for this rank alone to compute with; all ranks enter."""
        return nullcontext(self.model)


class Entered(nn.Module):
    """A model entered through one forward whatever is computed of it: what DDP and FSDP wrap."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # DDP reads this. Buffers are alike on all ranks; the argument that says so has another name
        # in torch 2.11 than in the newest.
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_buffers()]

    def forward(self, loss_fn: LossFn, batch: Batch) -> Tensor:
        """[] `loss_fn(model, batch)`."""
        return loss_fn(self.model, batch)


@final
class Replicated(Sharing):
    """All weights on every rank; DistributedDataParallel sums the gradients during backward.

    Buckets stay as they were laid out first (`find_unused_parameters`, which also leaves what
    nothing reaches without a gradient): more than two ranks add a number up in an order that
    depends on its place in its bucket, and a continued run must, too.
    """

    strategy = "ddp"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._exchanging = False
        device = next(model.parameters()).device
        if device.type == "cpu":
            keep_freed_memory()
        entered = Entered(model)
        # A number that nothing reaches: DDP warns about looking for one in vain.
        entered.idle = nn.Parameter(torch.zeros(1, device=device))
        self._ddp = DistributedDataParallel(
            entered,
            init_sync=False,  # the weights are equal, which is checked where a run begins
            bucket_cap_mb=BUCKET_MIB[device.type],
            gradient_as_bucket_view=True,
            find_unused_parameters=True,
        )
        # A lambda: DDP compares annotations, and does not read those that are strings.
        self._ddp.register_comm_hook(None, lambda _, bucket: _summed(bucket))

    def micro_batches(self, batch: Batch, rows: int) -> Sequence[Batch]:
        """This rank's micro-batches, at least one, for every rank takes part in the sum."""
        self._exchanging = False
        return batch.split(rows) or [batch.unlabelled()]

    def loss(self, loss_fn: LossFn, batch: Batch, *, last: bool) -> Tensor:
        """[] `loss_fn(model, batch)`; the gradients of those before the last stay here."""
        self._ddp.require_backward_grad_sync = last
        loss = cast("Tensor", self._ddp(loss_fn, batch))
        self._exchanging = last
        return loss

    @property
    def may_repeat(self) -> bool:
        """Until the backward begins that exchanges."""
        return not self._exchanging


def _summed(bucket: Any) -> Any:
    """A communication hook: the sum over the ranks, where DDP would average."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def is_divided(tensor: Tensor) -> TypeGuard[DTensor]:
    """True if ranks hold parts of `tensor`."""
    return hasattr(tensor, "full_tensor")


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, without its gradient history; shares its memory."""
    held = tensor.detach()
    return held.to_local() if is_divided(held) else held


def whole(tensor: Tensor) -> Tensor:
    """All of `tensor`; where it is divided, a collective that every rank takes part in."""
    return tensor.full_tensor() if is_divided(tensor) else tensor


def divided_like(own: Tensor, full: Tensor) -> Tensor:
    """`full`, which every rank has, divided as `own` is, if it is not yet; exchanges nothing."""
    if not is_divided(own) or is_divided(full):
        return full
    from torch.distributed.tensor import distribute_tensor

    on_device = full.to(own.device)
    # Nobody sends: each takes its own rows.
    return distribute_tensor(on_device, own.device_mesh, own.placements, src_data_rank=None)


@torch.no_grad()
def gathered(
    files: Mapping[str, Mapping[str, Tensor]], *, keep: bool
) -> dict[str, dict[str, Tensor]]:
    """The tensors of a save, made whole one after another; a collective where any is divided.

    The rank that keeps them gets divided ones in host memory, the others get nothing.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for file, tensors in files.items():
        found[file] = {}
        for name, tensor in tensors.items():
            full = whole(tensor).cpu() if is_divided(tensor) else tensor
            if keep:
                found[file][name] = full
    return found
