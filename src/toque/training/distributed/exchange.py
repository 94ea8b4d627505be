"""Bytes that the ranks of a run exchange per update, by formulas.

Of S bytes, each of n ranks sends (n-1)/n S in an all-gather or a reduce-scatter over a ring (Thakur
et al. 2005), and twice as much in an all-reduce, which consists of both (Patarasuk and Yuan 2009).
tests/fake_cuda checks S against the bytes that `Replicated` and `Sharded` exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch
from torch import nn

from toque.models.forward.blocks import blocks

_BACKWARD_SHARE: Final = 2 / 3
"""Share of the backward pass in an update's matmuls."""
_BIAS: Final = "relative_attention_bias"


def ring_bytes(total: float, ranks: int) -> float:
    """Compute the bytes that each rank sends in an all-gather or reduce-scatter of `total`."""
    return (ranks - 1) / ranks * total


def divided_modules(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield each module that fsdp gathers as a unit, inner ones first, and whether it is a block.

    The root module, which has all other weights, is not included.
    """
    for module in list(model.modules()):
        if hasattr(module, _BIAS):  # T5 computes this bias outside its block
            yield module.get_submodule(_BIAS), False
    for block in list(blocks(model)):
        yield block, True


class GatheredGroup(NamedTuple):
    """Bytes of the weights that fsdp gathers as a unit, summed over ranks, with padding."""

    stored: int
    """Bytes in the type of the parameters."""
    gathered: int
    """Bytes in the type that is gathered: for a block, the type of its matmuls."""
    gradients: int
    """Bytes of the float32 gradients."""


def groups_of(model: nn.Module, ranks: int, dtype: torch.dtype) -> list[GatheredGroup]:
    """List the groups of an undivided model, for GPUs that compute in `dtype`.

    The last group is the root. It has the remaining weights: embeddings and head.
    """
    groups = []
    seen = set[int]()
    for module, is_block in (*divided_modules(model), (model, False)):
        parameters = [p for p in module.parameters() if id(p) not in seen]
        seen.update(map(id, parameters))
        sizes = [
            (p, -(-len(p) // ranks) * ranks * (p.numel() // len(p))) for p in parameters
        ]
        stored = sum(n * p.element_size() for p, n in sizes)
        gathered = sum(n for _, n in sizes) * dtype.itemsize if is_block else stored
        gradients = sum(4 * n for p, n in sizes if p.requires_grad)
        groups.append(GatheredGroup(stored, gathered, gradients))
    return groups


@dataclass(frozen=True)
class Exchange:
    """Bytes in the collectives of one update, summed over the ranks' parts."""

    strategy: Literal["ddp", "fsdp"]
    ranks: int
    micro_batches: int
    """Number of micro-batches per rank."""
    gathered: int
    """Bytes in all-gathers."""
    scattered: int
    """Bytes in reduce-scatters."""
    reduced: int
    """Bytes in all-reduces."""

    @property
    def sent(self) -> float:
        """Bytes that each rank sends."""
        return ring_bytes(self.gathered + self.scattered + 2 * self.reduced, self.ranks)

    def exposed_seconds(self, seconds: float, computing: float) -> float:
        """Compute the seconds of exchange that do not overlap with computation.

        With ddp, only the last backward pass overlaps with the exchange. With fsdp, all matmuls
        do.

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
    """Compute the exchange of an undivided model's update, on GPUs that compute in `dtype`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if strategy == "ddp":
        # In addition to gradients, 4 bytes each: an idle weight, a flag per tensor, the loss.
        reduced = sum(p.nbytes for p in trained) + 4 * (1 + (len(trained) + 1) + 1)
        return Exchange(strategy, ranks, micro_batches, 0, 0, reduced)
    groups = groups_of(model, ranks, dtype)
    # Forward and backward passes both gather each group, except the root, which stays gathered.
    gathered = 2 * sum(g.gathered for g in groups) - groups[-1].gathered
    scattered = sum(g.gradients for g in groups)
    reduced = 4 * (1 + len(trained))  # the loss, and the norm of each gradient
    n = micro_batches
    return Exchange(strategy, ranks, n, n * gathered, n * scattered, reduced)
