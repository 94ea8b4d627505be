"""Growing curve: points that arrive one by one, kept few without losing a spike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from toque.reports.curves import MOST_POINTS, Points

_OF_EACH: Final = 2
"""Points that a block may draw: its lowest and its highest."""


@dataclass
class _Block:
    """Some neighbours: the lowest, the highest, and the first whose y is missing."""

    n: int
    low: tuple[float, float] | None = None
    """(y, x)"""
    high: tuple[float, float] | None = None
    gap: float | None = None

    def join(self, other: _Block) -> None:
        self.n += other.n
        self.low = min(filter(None, (self.low, other.low)), default=None)
        # Of equal values the first one stays: the point must not wander while the curve grows.
        tops = list(filter(None, (self.high, other.high)))
        self.high = max(tops, key=lambda top: top[0], default=None)
        self.gap = other.gap if self.gap is None else self.gap

    def points(self) -> list[tuple[float, float | None]]:
        found: set[tuple[float, float | None]] = {
            (x, y) for y, x in filter(None, (self.low, self.high))
        }
        if self.gap is not None:
            found.add((self.gap, None))
        return sorted(found, key=lambda point: point[0])


@final
class GrowingCurve:
    """A curve of any length in bounded memory, each point added in constant time.

    `curves.thinned` of a whole run takes longer the longer the run is; a page that is drawn every
    second cannot have that.

    Args:
        most: about so many points are kept.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most_blocks = max(2, most // _OF_EACH)
        self._size = 1
        self._blocks: list[_Block] = []
        self.last: tuple[float, float | None] | None = None
        """The newest point; drawn in any case."""

    def add(self, x: float, y: float | None) -> None:
        """Take a point in; x never falls, None breaks the line."""
        self.last = (x, y)
        one = _Block(1, gap=x) if y is None else _Block(1, (y, x), (y, x))
        if self._blocks and self._blocks[-1].n < self._size:
            self._blocks[-1].join(one)
            return
        self._blocks.append(one)
        if len(self._blocks) > self._most_blocks:
            self._halve()

    def drop_after(self, x: float) -> None:
        """Forget the points beyond `x`: a continued run computes them again."""
        while self._blocks and self._blocks[-1].points()[0][0] > x:
            self._blocks.pop()
        if self._blocks:
            self._cut(self._blocks[-1], x)
        points = self._blocks[-1].points() if self._blocks else []
        self.last = points[-1] if points else None

    def points(self) -> Points:
        """What is to be drawn, in its order."""
        found = [point for block in self._blocks for point in block.points()]
        if self.last is not None and (not found or found[-1][0] < self.last[0]):
            found.append(self.last)
        return [x for x, _ in found], [y for _, y in found]

    def __len__(self) -> int:
        return sum(block.n for block in self._blocks)

    def _halve(self) -> None:
        pairs = zip(self._blocks[::2], self._blocks[1::2], strict=False)
        odd = self._blocks[-1:] if len(self._blocks) % 2 else []
        joined = []
        for first, second in pairs:
            first.join(second)
            joined.append(first)
        self._blocks, self._size = joined + odd, 2 * self._size

    @staticmethod
    def _cut(block: _Block, x: float) -> None:
        kept = [(at, y) for at, y in block.points() if at <= x]
        ys = [(y, at) for at, y in kept if y is not None]
        block.low, block.high = min(ys, default=None), max(ys, default=None)
        block.gap = next((at for at, y in kept if y is None), None)
