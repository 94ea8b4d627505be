"""Ragged arrays: the ids of many examples side by side, with gaps for padding between them.

A batch holds some hundred short pieces. Cutting and joining bytes costs a fifth of what cutting and
joining arrays does, so pieces are bytes until they are whole rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.generic]


@dataclass(frozen=True)
class Pieces:
    """The ids of several examples' prompts, or targets."""

    lengths: NDArray[np.int64]
    """[examples] ids in each."""
    parts: Sequence[memoryview | bytes]
    """Each one's ids as bytes."""
    dtype: np.dtype[np.generic]

    @classmethod
    def of(cls, ids: Iterable[Ids]) -> Self:
        """Arrays given one by one, of any integer type."""
        arrays = [np.asarray(some, np.int64) for some in ids]
        lengths = np.array([len(some) for some in arrays], np.int64)
        return cls(lengths, [some.tobytes() for some in arrays], np.dtype(np.int64))

    def joined(self, gaps: Iterable[tuple[int, int]] = ()) -> Ids:
        """All ids side by side; (i, n) among `gaps` puts n zeros after example i.

        >>> three = Pieces.of([np.array([7, 8]), np.array([5]), np.array([9, 6])])
        >>> three.joined([(1, 1), (2, 2)]).tolist()
        [7, 8, 5, 0, 9, 6, 0, 0]
        """
        size = self.dtype.itemsize
        spaced: list[memoryview | bytes] = [b""] * (2 * len(self.parts))
        spaced[::2] = self.parts
        for example, n in gaps:
            spaced[2 * example + 1] = bytes(n * size)
        return np.frombuffer(b"".join(spaced), self.dtype)

    def without_last(self) -> Pieces:
        """All but the last id of each; none may be empty."""
        size = self.dtype.itemsize
        return Pieces(self.lengths - 1, [part[:-size] for part in self.parts], self.dtype)

    def last(self) -> Ids:
        """[examples] the last id of each; none may be empty."""
        size = self.dtype.itemsize
        return np.frombuffer(b"".join([part[-size:] for part in self.parts]), self.dtype)

    def followed_by(self, other: Pieces) -> Pieces:
        """Each one's ids and then the other's, which are of the same type."""
        pairs = zip(self.parts, other.parts, strict=True)
        return Pieces(self.lengths + other.lengths, [b"".join(p) for p in pairs], self.dtype)
