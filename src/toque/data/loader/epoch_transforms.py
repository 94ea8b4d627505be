"""Epoch transforms: examples that change from epoch to epoch, as a function of (epoch key, row).

The epoch plan needs their lengths to pack a window, and collation needs their ids later; a cache
makes each example once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.generic]
Sides = tuple[Ids, Ids]
Vary = Callable[[int, int], Sides]
"""(row, epoch key) -> prompt and target ids; a pure function."""
_KEPT = 16384
"""Examples in the cache: several windows."""


class Varied:
    """Examples after a random transform, such as augmentation or span corruption."""

    def __init__(self, vary: Vary, *, encoder: bool) -> None:
        self._encoder = encoder
        self.sides = lru_cache(_KEPT)(vary)
        """(row, epoch key) -> prompt and target of a store row in the epoch of this key."""

    def lengths(
        self, rows: NDArray[np.int64], key: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and target lengths, as `EpochPlan` counts them."""
        sides = [self.sides(row, key) for row in rows.tolist()]
        prompt = np.array([len(p) for p, _ in sides], np.int64)
        target = np.array([len(t) for _, t in sides], np.int64)
        return (prompt, target) if self._encoder else (0 * prompt, prompt + target - 1)

    def at(self, key: int) -> InEpoch:
        """The examples of the epoch with this key."""
        return InEpoch(self, key)


@dataclass(frozen=True)
class InEpoch:
    """The examples of one epoch."""

    varied: Varied
    key: int

    def prompt(self, row: int, /) -> Ids:
        """Prompt ids of a store row."""
        return self.varied.sides(int(row), self.key)[0]

    def target(self, row: int, /) -> Ids:
        """Target ids of a store row."""
        return self.varied.sides(int(row), self.key)[1]
