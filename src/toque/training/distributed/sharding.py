"""Sharded weights with FSDP2 (Zhao et al. 2023, arXiv 2304.11277): each rank has a part.

Weights, gradients and optimizer state are divided among the ranks. A block's weights are
all-gathered for its forward pass and again for its backward pass, and freed after each. Its
gradients are reduce-scattered in every micro-batch, as soon as they are computed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
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
from toque.training.distributed.data_parallel import (
    DataParallel,
    LossFn,
    LossModule,
    full_tensor,
)
from toque.training.distributed.exchange import divided_modules


@final
class Sharded(DataParallel):
    """Model with sharded weights on `device`. The constructor shards the model in place.

    On CUDA the weights of a block are gathered in `dtype`, the type of its matmuls. On a CPU they
    are gathered in their own type, and autocast converts them.
    """

    strategy = "fsdp"
    is_sharded = True

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(model)
        self._ranks = ranks
        self._skeleton = _copy_without_weights(model, device)
        mesh = init_device_mesh(
            device.type, (ranks.world_size,), mesh_dim_names=("shard",)
        )
        self._root = _shard(model, mesh, device, dtype)
        if device.type == "cpu":
            return_freed_memory()  # the full weights now, and gathered weights later

    @property
    def can_retry(self) -> bool:
        """False, because every forward and backward pass needs all ranks."""
        return False

    def micro_batches(self, batch: Batch, rows: int) -> Sequence[Batch]:
        """Split this rank's rows. All ranks need the same number of parts to gather weights."""
        parts = batch.split(rows)
        n_parts = max(1, self._ranks.all_reduce_max(len(parts)))
        return [*parts, *repeat(batch.unlabelled(), n_parts - len(parts))]

    def loss(self, loss_fn: LossFn, batch: Batch, *, last: bool) -> Tensor:
        """Compute `loss_fn(model, batch)`, a tensor []. Every backward pass sums the gradients."""
        del last
        return cast("Tensor", cast("nn.Module", self._root)(loss_fn, batch))

    def evaluate(self, loss_fn: LossFn, batch: Batch) -> Tensor:
        """Compute `loss_fn(model, batch)`, a tensor [], without gradients, on all ranks."""
        with torch.no_grad():
            loss = self.loss(loss_fn, batch, last=False)
        self._root.reshard()  # no backward pass follows, which would free the gathered weights
        return loss

    def sum_of_parts(self, values: Sequence[float]) -> Sequence[float]:
        """Sum each rank's statistics of its weights over the ranks."""
        return self._ranks.all_reduce_sum(values)

    @contextmanager
    def full_model(self) -> Iterator[nn.Module]:
        """Yield a copy of the model that is not sharded. Every rank gathers all weights for it."""
        empty = dict(self._skeleton.named_parameters())
        full_for_empty: dict[int, nn.Parameter] = {}
        empty_for_full: dict[int, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            tensor = full_tensor(parameter.detach())
            full = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            full_for_empty[id(empty[name])] = full
            empty_for_full[id(full)] = empty[name]
        exchange_parameters(self._skeleton, full_for_empty)
        try:
            yield self._skeleton.train(self.model.training)
        finally:
            exchange_parameters(self._skeleton, empty_for_full)


class _Root(LossModule):
    """Outermost sharded module. It has the weights outside the blocks."""

    def forward(self, loss_fn: LossFn, batch: Batch) -> Tensor:
        """Compute `loss_fn(model, batch)`, a tensor []."""
        # FSDP does not increment the version counters of the weights that it gathers. Cached copies
        # of the weights compare these counters.
        gathered = [p for p in self.model.parameters() if not isinstance(p, DTensor)]
        torch.autograd.graph.increment_version(gathered)
        return super().forward(loss_fn, batch)


def _shard(
    model: nn.Module, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype
) -> FSDPModule:
    """Shard `model` in place, block by block, and return the module to call."""
    gathers_in_dtype = device.type == "cuda" and dtype != torch.float32
    # Inputs keep their type: hidden states between blocks are float32, as with ddp.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if gathers_in_dtype else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    # A block returns packed rows as a view. Toque never modifies such a view in place.
    warnings.filterwarnings(
        "ignore", message="FSDP2-wrapped module .* returned a view tensor"
    )
    for module, is_block in divided_modules(model):
        if is_block:
            fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        else:
            fully_shard(module, mesh=mesh)
    root = fully_shard(_Root(model), mesh=mesh, reshard_after_forward=False)
    for module in cast("nn.Module", root).modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports only sums
    return root


def _copy_without_weights(model: nn.Module, device: torch.device) -> nn.Module:
    """Copy a model to `device`, with parameters on the meta device."""
    empty = {
        id(p): nn.Parameter(
            torch.empty_like(p, device="meta"), requires_grad=p.requires_grad
        )
        for p in model.parameters()
    }
    skeleton = copy.deepcopy(model, dict(empty))
    for module in skeleton.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)  # noqa: SLF001  # what __setattr__ writes to
    return skeleton
