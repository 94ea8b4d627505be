"""Curves of a run: any number of points, reduced to the points to plot, and a running mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Final, final

MAX_POINTS: Final = 600
"""Maximum number of points in a plotted curve, about one per pixel."""
_MAX_CURVES: Final = 400
_SMOOTHING_SHARE: Final = 0.04
"""Window of the running mean, as a fraction of all values so far."""

Point = tuple[float, float | None]
"""(x, y). y is None if the value is missing."""
Points = tuple[list[float], list[float | None]]
"""x and y values of a curve."""


def _extremes(points: Iterable[Point]) -> list[Point]:
    """Return the lowest, the highest and the first missing point, in their order."""
    points = list(points)
    values = [(y, i) for i, (_, y) in enumerate(points) if y is not None]
    missing = [i for i, (_, y) in enumerate(points) if y is None]
    indices = set(missing[:1])
    if values:
        # The first of equal values stays, so that a point does not move while the curve grows.
        lowest, highest = min(values), max(values, key=itemgetter(0))
        indices |= {lowest[1], highest[1]}
    return [points[i] for i in sorted(indices)]


@final
class Curve:
    """Curve of any number of points, reduced to about `max_points` points to plot.

    Each block of neighbouring points keeps its lowest and highest point, so no spike is lost. When
    there are too many blocks, neighbouring blocks are joined. On average, adding a point takes
    constant time.
    """

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_blocks = max(2, max_points // 2)  # two points per block
        self._block_size = 1
        """Number of points in a full block."""
        self._blocks: list[list[Point]] = []
        self._last_block_size = 0
        """Number of points added to the last block."""
        self.last: Point | None = None
        """Newest point. It is always plotted."""

    def add(self, x: float, y: float | None) -> None:
        """Add a point. x never decreases, and a y of None interrupts the line."""
        self.last = (x, y)
        if self._blocks and self._last_block_size < self._block_size:
            self._blocks[-1] = _extremes([*self._blocks[-1], self.last])
            self._last_block_size += 1
            return
        self._blocks.append([self.last])
        self._last_block_size = 1
        if len(self._blocks) > self._max_blocks:
            self._join_blocks()

    def _join_blocks(self) -> None:
        """Join blocks in pairs. An odd last block stays alone."""
        if len(self._blocks) % 2 == 0:
            # The last block is joined with a full block.
            self._last_block_size += self._block_size
        self._block_size *= 2
        self._blocks = [
            _extremes(chain(*self._blocks[start : start + 2]))
            for start in range(0, len(self._blocks), 2)
        ]

    def drop_after(self, x: float) -> None:
        """Drop the points after `x`, which a resumed run recomputes."""
        while self._blocks and self._blocks[-1][0][0] > x:
            self._blocks.pop()
            # Every block before the last one is full.
            self._last_block_size = self._block_size
        self.last = None
        if self._blocks:
            self._blocks[-1] = [point for point in self._blocks[-1] if point[0] <= x]
            self.last = self._blocks[-1][-1]

    def points(self) -> Points:
        """Return the x and y values to plot, in order of x."""
        points = [point for block in self._blocks for point in block]
        if self.last is not None and (not points or points[-1][0] < self.last[0]):
            points.append(self.last)
        return [x for x, _ in points], [y for _, y in points]

    def values(self) -> list[float]:
        """Return the y values to plot, without missing values."""
        return [y for y in self.points()[1] if y is not None]


@dataclass(frozen=True)
class RunningMean:
    """Exponential moving average over the newest 4 % of all values so far.

    The window starts with a single value, because a loss falls fastest at the start.
    """

    value: float = 0.0
    n: int = 0
    """Number of values so far."""

    def add(self, value: float) -> RunningMean:
        """Return the mean with one more value.

        >>> RunningMean().add(5.0).add(5.0)
        RunningMean(value=5.0, n=2)
        """
        n = self.n + 1
        window = max(1.0, _SMOOTHING_SHARE * n)
        return RunningMean(self.value + (value - self.value) / window, n)


class Curves(dict[str, Curve]):
    """Curves by name. Access to a missing name adds a curve, up to a limit."""

    def __missing__(self, name: str) -> Curve:
        curve = Curve()
        if len(self) < _MAX_CURVES:
            self[name] = curve
        return curve

    def points_of(self, name: str) -> Points:
        """Return the points of a curve, or no points if it does not exist."""
        return self[name].points() if name in self else ([], [])
