"""Measurements of an objective: sums over an update, in addition to its loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toque.training.distributed.collectives import Ranks


@dataclass
class Measurements:
    """Sums of an update by metric name. They stay on the device, so that nothing waits for a GPU.

    >>> rewards = Measurements(("rewards/chosen", "rewards/margins"))
    >>> rewards.clear(torch.device("cpu"))
    >>> rewards.add(torch.tensor([1.0, 3.0])), rewards.add(torch.tensor([2.0, 3.0]))
    (None, None)
    >>> rewards.means(Ranks(), count=2)
    {'rewards/chosen': tensor(1.5000), 'rewards/margins': tensor(3.)}
    """

    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.sums = torch.zeros(len(self.names))

    def clear(self, device: torch.device) -> None:
        """Start an update, or another attempt at it, on a device."""
        self.sums = torch.zeros(len(self.names), device=device)

    def add(self, sums: Tensor) -> None:
        """Add the sums over a micro-batch, [names]."""
        self.sums += sums

    def means(self, ranks: Ranks, *, count: int) -> dict[str, Tensor]:
        """Return the means over the update, each []. `count` is the divisor of its loss."""
        if not self.names:
            return {}
        means = ranks.total(self.sums) / count
        return dict(zip(self.names, means, strict=True))
