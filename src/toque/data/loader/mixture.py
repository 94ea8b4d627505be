"""Mixture of sources by weight: the examples an epoch draws, without state.

A source of weight w is passed over w times an epoch: 1 is every example once, 2 twice, 0.5 half of
them, the other half in the next epoch. A source is a stream of passes, each a permutation of all
its examples; epoch e takes the positions from e * draws to (e + 1) * draws of the stream. So after
any number of epochs, two examples of a source differ by at most one in how often they were seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from toque.keyed_random import key_of, permute

Positions = NDArray[np.int64]
_PASS = 2
"""Sets these keys apart from those of the epoch's order."""


@dataclass(frozen=True)
class Mixture:
    """Sources and how often an epoch passes over each.

    Args:
        source: [N] source number of each example.
        weights: passes an epoch makes over each source; positive.
        seed: of the run.
    """

    source: NDArray[np.integer]
    weights: Sequence[float]
    seed: int

    @cached_property
    def members(self) -> list[Positions]:
        """The examples of each source."""
        return [np.flatnonzero(self.source == number) for number in range(len(self.weights))]

    @cached_property
    def draws(self) -> list[int]:
        """Examples an epoch takes from each source; at least one where there are any.

        300 examples of weight 2 and 101 of weight 0.5:

            [600, 50]
        """
        return [
            max(1, round(weight * len(examples))) if len(examples) else 0
            for weight, examples in zip(self.weights, self.members, strict=True)
        ]

    def examples(self, positions: Positions, *, epoch: int) -> Positions:
        """The examples at `positions`, each below sum(draws), of an epoch not yet shuffled."""
        ends = np.cumsum(self.draws)
        number = np.searchsorted(ends, positions, side="right")
        out = np.empty(len(positions), np.int64)
        for source in np.unique(number).tolist():
            here = number == source
            draws, members = self.draws[source], self.members[source]
            stream = epoch * draws + positions[here] - (int(ends[source]) - draws)
            out[here] = members[self._passed_over(stream, len(members), source)]
        return out

    def _passed_over(self, stream: Positions, n: int, source: int) -> Positions:
        passes, offsets = np.divmod(stream, n)
        out = np.empty(len(stream), np.int64)
        for number in np.unique(passes).tolist():
            here = passes == number
            key = key_of(self.seed, number, source, _PASS)
            out[here] = permute(offsets[here], n=n, key=key)
        return out
