"""Bytes that the ranks of a run exchange for an update, by formulas.

What a rank sends of S bytes over n ranks: (n-1)/n S for an all-gather or a reduce-scatter as a ring
(Thakur et al. 2005), twice that for an all-reduce, which is both (Patarasuk and Yuan 2009). S is
what `Replicated` and `Sharded` hand to the collectives: tests/fake_cuda counts the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch
from torch import nn

from toque.models.forward.blocks import blocks

_BACKWARD: Final = 2 / 3  # of an update's products
_BIAS: Final = "relative_attention_bias"


def ring_bytes(total: float, ranks: int) -> float:
    """Bytes that each of `ranks` sends when `total` are gathered, or reduced and scattered."""
    return (ranks - 1) / ranks * total


def divided_modules(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Modules whose weights fsdp gathers together, innermost first, and whether each is a block."""
    for module in list(model.modules()):
        if hasattr(module, _BIAS):  # T5's is computed outside of the block that holds it
            yield module.get_submodule(_BIAS), False
    for block in list(blocks(model)):
        yield block, True


class GatheredGroup(NamedTuple):
    """Bytes of weights that fsdp gathers together, of all ranks' parts, padded to equal ones."""

    held: int  # as the ranks hold them
    gathered: int  # as they are gathered: blocks in the format of products
    gradients: int  # in float32


def groups_of(model: nn.Module, ranks: int, dtype: torch.dtype) -> list[GatheredGroup]:
    """The groups of a model that is not divided yet, on GPUs that compute in `dtype`.

    The last is the root: what no other module has, embeddings and head.
    """
    found, seen = [], set[int]()
    for module, is_block in (*divided_modules(model), (model, False)):
        own = {id(p): p for p in module.parameters() if id(p) not in seen}
        seen |= own.keys()
        sizes = [(p, -(-len(p) // ranks) * ranks * (p.numel() // len(p))) for p in own.values()]
        held = sum(n * p.element_size() for p, n in sizes)
        gathered = sum(n for _, n in sizes) * dtype.itemsize if is_block else held
        found.append(GatheredGroup(held, gathered, sum(4 * n for p, n in sizes if p.requires_grad)))
    return found


@dataclass(frozen=True)
class Exchange:
    """Bytes that the collectives of one update work on, all ranks' parts together."""

    strategy: Literal["ddp", "fsdp"]
    ranks: int
    micro_batches: int  # of a rank
    gathered: int  # by all-gathers
    scattered: int  # by reduce-scatters
    reduced: int  # by all-reduces

    @property
    def sent(self) -> float:
        """Bytes that each rank sends."""
        return ring_bytes(self.gathered + self.scattered + 2 * self.reduced, self.ranks)

    def shown(self, seconds: float, computing: float) -> float:
        """Seconds of exchange that an update of `computing` seconds cannot hide.

        ddp sums behind the last backward, fsdp exchanges behind all products.
        """
        hides = 1.0 if self.strategy == "fsdp" else _BACKWARD / self.micro_batches
        return max(0.0, seconds - hides * computing)


def exchange_of(
    model: nn.Module,
    strategy: Literal["ddp", "fsdp"],
    ranks: int,
    *,
    dtype: torch.dtype,
    micro_batches: int = 1,
) -> Exchange:
    """The exchange of an update on GPUs that compute in `dtype`; the model is not divided yet."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if strategy == "ddp":
        # Beside the gradients 4 bytes each: an idle weight, which tensors were used, the loss.
        reduced = sum(p.nbytes for p in trained) + 4 * (1 + (len(trained) + 1) + 1)
        return Exchange(strategy, ranks, micro_batches, 0, 0, reduced)
    groups = groups_of(model, ranks, dtype)
    # Forward and backward gather a group, but for the root, which stays whole in between.
    gathered = 2 * sum(g.gathered for g in groups) - groups[-1].gathered
    scattered = sum(g.gradients for g in groups)
    reduced = 4 * (1 + len(trained))  # the loss, and every gradient's length
    n = micro_batches
    return Exchange(strategy, ranks, n, n * gathered, n * scattered, reduced)
