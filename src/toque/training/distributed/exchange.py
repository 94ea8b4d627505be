"""Formulas for the bytes that the ranks of a run exchange per update.

In a ring all-gather or reduce-scatter of S bytes, each of n ranks sends (n-1)/n S bytes (Thakur et
al. 2005). An all-reduce consists of both, so each rank sends twice as much (Patarasuk and Yuan
2009). tests/fake_cuda compares S with the bytes that `Replicated` and `Sharded` exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch
from torch import nn

from toque.models.forward.blocks import blocks

_BACKWARD_SHARE: Final = 2 / 3
"""Fraction of an update's matmuls that are in the backward pass."""
_BIAS: Final = "relative_attention_bias"


def ring_bytes(total: float, ranks: int) -> float:
    """Compute the bytes that each rank sends in an all-gather or reduce-scatter of `total`."""
    return (ranks - 1) / ranks * total


def divided_modules(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the modules that FSDP shards separately, inner ones first, and whether each is a block.

    The root module, which has all other weights, is not included.
    """
    for module in list(model.modules()):
        if hasattr(module, _BIAS):  # T5 computes this bias outside its block
            yield module.get_submodule(_BIAS), False
    for block in list(blocks(model)):
        yield block, True


class GatheredGroup(NamedTuple):
    """Bytes of a module that FSDP shards separately, summed over the ranks, with padding."""

    stored: int
    """Bytes of the weights in the parameters' dtype."""
    gathered: int
    """Bytes of the weights in the gathered dtype: for a block, the dtype of its matmuls."""
    gradients: int
    """Bytes of the float32 gradients."""


def groups_of(model: nn.Module, ranks: int, dtype: torch.dtype) -> list[GatheredGroup]:
    """List the groups of a model that is not sharded, for GPUs that compute in `dtype`.

    The last group is the root. It has the remaining weights: embeddings and head.
    """
    groups = []
    seen = set[int]()
    for module, is_block in (*divided_modules(model), (model, False)):
        parameters = [p for p in module.parameters() if id(p) not in seen]
        seen.update(map(id, parameters))
        stored = gathered = gradients = 0
        for parameter in parameters:
            size = _padded_size(parameter, ranks)
            stored += size * parameter.element_size()
            gathered += size * (
                dtype.itemsize if is_block else parameter.element_size()
            )
            gradients += 4 * size if parameter.requires_grad else 0
        groups.append(GatheredGroup(stored, gathered, gradients))
    return groups


def _padded_size(parameter: nn.Parameter, ranks: int) -> int:
    """Count a parameter's elements after its first dimension is padded for the ranks."""
    length = len(parameter)
    padded_length = -(-length // ranks) * ranks  # the next multiple of the ranks
    return padded_length * (parameter.numel() // length)


@dataclass(frozen=True)
class Exchange:
    """Bytes in the collectives of one update, summed over the ranks' parts."""

    strategy: Literal["ddp", "fsdp"]
    ranks: int
    micro_batches: int
    """Number of micro-batches per rank."""
    gathered: int
    """Bytes in all-gathers per update."""
    scattered: int
    """Bytes in reduce-scatters per update."""
    reduced: int
    """Bytes in all-reduces per update."""

    @property
    def sent(self) -> float:
        """Bytes that each rank sends."""
        return ring_bytes(self.gathered + self.scattered + 2 * self.reduced, self.ranks)

    def exposed_seconds(self, seconds: float, computing: float) -> float:
        """Compute the seconds of the exchange that do not overlap with computation.

        With ddp, the exchange overlaps only with the last backward pass. With fsdp, it overlaps
        with all matmuls.

        Args:
            seconds: Seconds of the exchange alone.
            computing: Seconds of the computation alone.
        """
        share = 1.0 if self.strategy == "fsdp" else _BACKWARD_SHARE / self.micro_batches
        return max(0.0, seconds - share * computing)


def exchange_of(
    model: nn.Module,
    strategy: Literal["ddp", "fsdp"],
    ranks: int,
    *,
    dtype: torch.dtype,
    micro_batches: int = 1,
) -> Exchange:
    """Compute the exchange in one update of a model, on GPUs that compute in `dtype`.

    The model is not sharded. `micro_batches` is per rank.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if strategy == "ddp":
        # `Replicated` adds an unused weight. DDP also reduces a flag per weight tensor, and the
        # loop reduces the loss. Each of these numbers has 4 bytes.
        n_flags = len(trained) + 1
        reduced = sum(p.nbytes for p in trained) + 4 * (1 + n_flags + 1)
        return Exchange(
            strategy, ranks, micro_batches, gathered=0, scattered=0, reduced=reduced
        )

    groups = groups_of(model, ranks, dtype)
    # Each group is gathered for the forward pass and again for the backward pass. Only the root
    # stays gathered.
    gathered = 2 * sum(g.gathered for g in groups) - groups[-1].gathered
    scattered = sum(g.gradients for g in groups)
    reduced = 4 * (1 + len(trained))  # the loss, and the norm of each gradient
    return Exchange(
        strategy,
        ranks,
        micro_batches,
        gathered=micro_batches * gathered,
        scattered=micro_batches * scattered,
        reduced=reduced,
    )
