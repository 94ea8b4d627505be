"""Curve: points that arrive one by one, kept few without losing a spike, and a running mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

MOST_POINTS: Final = 600
"""Points of a drawn line: about one a pixel."""
_SMOOTHED_OVER: Final = 0.04
"""Share of the values so far that the running mean looks back on."""

Points = tuple[list[float], list[float | None]]
"""(xs, ys)."""


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

    def cut(self, x: float) -> None:
        """Forget what lies beyond `x`."""
        kept = [(at, y) for at, y in self.points() if at <= x]
        ys = [(y, at) for at, y in kept if y is not None]
        self.low, self.high = min(ys, default=None), max(ys, default=None)
        self.gap = next((at for at, y in kept if y is None), None)


@final
class Curve:
    """A curve of any length in bounded memory, each point added in constant time.

    Of each block of neighbours the lowest and the highest point are kept, so no spike is lost; when
    there are too many blocks, neighbouring ones are joined.

    Args:
        most: number of points kept, about.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most_blocks = max(2, most // 2)  # a block draws up to two points
        self._size = 1
        self._blocks: list[_Block] = []
        self.last: tuple[float, float | None] | None = None
        """Newest point; drawn in any case."""

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
            self._blocks[-1].cut(x)
        points = self._blocks[-1].points() if self._blocks else []
        self.last = points[-1] if points else None

    def points(self) -> Points:
        """The points to draw, in their order."""
        found = [point for block in self._blocks for point in block.points()]
        if self.last is not None and (not found or found[-1][0] < self.last[0]):
            found.append(self.last)
        return [x for x, _ in found], [y for _, y in found]

    def values(self) -> list[float]:
        """The y of each point to draw that has one."""
        return [y for y in self.points()[1] if y is not None]

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


@dataclass(frozen=True)
class RunningMean:
    """Exponential mean over the newest twenty-fifth of all values so far.

    The window grows with the run. At the start it is one value: a loss falls fastest there, and a
    mean of all that has passed would lie far above it.
    """

    value: float = 0.0
    n: int = 0

    def after(self, value: float) -> RunningMean:
        """The mean once a value has been added.

        >>> RunningMean().after(5.0).after(5.0)
        RunningMean(value=5.0, n=2)
        """
        n = self.n + 1
        return RunningMean(self.value + (value - self.value) / max(1.0, _SMOOTHED_OVER * n), n)
