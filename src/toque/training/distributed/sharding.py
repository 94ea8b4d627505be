"""Sharded weights by FSDP2 (Zhao et al. 2023, arXiv 2304.11277): each rank holds a part.

Weights, gradients and optimizer state are divided among the ranks. A block's weights are gathered
for its forward and again for its backward, and dropped after each; its gradients are summed and
divided again as soon as they are there, after every micro-batch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from toque.batch import Batch
from toque.hardware.glibc_malloc import return_freed_memory
from toque.models.families import exchange_parameters
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.exchange import divided_modules
from toque.training.distributed.sharing import Entered, LossFn, Sharing, whole


@final
class Sharded(Sharing):
    """A model whose weights are divided among the ranks, in place, onto `device`.

    On CUDA the weights of blocks are gathered in `dtype`, that of matrix products; elsewhere in
    their own, and autocast rounds them.
    """

    strategy = "fsdp"
    is_sharded = True

    def __init__(
        self, model: nn.Module, ranks: Ranks, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(model)
        self._ranks = ranks
        self._outline = _outline(model, device)
        mesh = init_device_mesh(device.type, (ranks.world_size,), mesh_dim_names=("shard",))
        self._root = _divided(model, mesh, device, dtype)
        if device.type == "cpu":
            return_freed_memory()  # of the whole weights now, and of gathered ones later

    @property
    def may_repeat(self) -> bool:
        """Never: the others wait in the middle of a forward or backward."""
        return False

    def micro_batches(self, batch: Batch, rows: int) -> Sequence[Batch]:
        """The same number on every rank, that of the one with most: all gather weights together."""
        own = batch.split(rows)
        most = max(1, self._ranks.all_reduce_max(len(own)))
        return own + [batch.unlabelled()] * (most - len(own))

    def loss(self, loss_fn: LossFn, batch: Batch, *, last: bool) -> Tensor:
        """[] `loss_fn(model, batch)`; every backward sums: no rank holds a whole gradient."""
        del last
        return cast("Tensor", cast("nn.Module", self._root)(loss_fn, batch))

    def evaluate(self, loss_fn: LossFn, batch: Batch) -> Tensor:
        """[] `loss_fn(model, batch)` without gradients; all ranks together."""
        with torch.no_grad():
            found = cast("Tensor", cast("nn.Module", self._root)(loss_fn, batch))
        self._root.reshard()  # where no backward comes, the outermost weights would stay whole
        return found

    def sum_of_parts(self, values: Sequence[float]) -> Sequence[float]:
        """Sums over the ranks."""
        return self._ranks.all_reduce_sum(values)

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """A model like the one before it was divided, with weights that every rank gathers."""
        full: dict[str, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            tensor = whole(parameter.detach())
            full[name] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        outlined = dict(self._outline.named_parameters())
        exchange_parameters(self._outline, {id(outlined[name]): p for name, p in full.items()})
        try:
            yield self._outline.train(self.model.training)
        finally:
            exchange_parameters(self._outline, {id(p): outlined[name] for name, p in full.items()})


class _Rooted(Entered):
    """The outermost module that is divided: its own weights are those outside of the blocks."""

    def forward(self, loss_fn: LossFn, batch: Batch) -> Tensor:
        """[] `loss_fn(model, batch)`."""
        # FSDP writes gathered weights without counting, and copies of weights go by the count.
        gathered = [p for p in self.model.parameters() if not isinstance(p, DTensor)]
        torch.autograd.graph.increment_version(gathered)
        return super().forward(loss_fn, batch)


def _divided(
    model: nn.Module, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype
) -> FSDPModule:
    """Divide `model` in place, block by block; the module to enter it by."""
    # Inputs keep their format: what passes from block to block is float32, as it is under ddp.
    rounded = dtype if device.type == "cuda" and dtype != torch.float32 else None
    policy = MixedPrecisionPolicy(
        param_dtype=rounded, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # Packed rows leave a block as a view. Nothing here adds to one in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module, is_block in divided_modules(model):
        if is_block:
            fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        else:
            fully_shard(module, mesh=mesh)
    root = fully_shard(_Rooted(model), mesh=mesh, reshard_after_forward=False)
    for module in cast("nn.Module", root).modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return root


def _outline(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a model on `device` whose parameters have no memory."""
    empty = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    outline = copy.deepcopy(model, dict(empty))
    for module in outline.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)  # noqa: SLF001  # what __setattr__ writes to
    return outline
