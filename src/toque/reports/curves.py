"""Curves of a run from its step events, few enough points to draw and none of the spikes lost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

MOST_POINTS: Final = 600
"""Points of a drawn line: about one a pixel."""
_SMOOTHED_OVER: Final = 0.02
"""Share of a run that the smoothed loss looks back on."""
_SMOOTHED_OF_PAST: Final = 0.1
"""Largest share of what has passed that it looks back on: early losses fall fast."""

Points = tuple[list[float], list[float | None]]
"""(xs, ys)."""


def points(events: Sequence[Mapping[str, Any]], name: str) -> Points:
    """The values of one field by step; None where it is missing or was not finite."""
    xs = [float(event["step"]) for event in events]
    ys = [_number(event.get(name)) for event in events]
    return xs, ys


def thinned(curve: Points, most: int = MOST_POINTS) -> Points:
    """At most about `most` points: of each run of neighbours the lowest and the highest.

    >>> thinned(([0.0, 1.0, 2.0, 3.0], [1.0, 9.0, 2.0, 3.0]), most=2)
    ([0.0, 1.0], [1.0, 9.0])
    """
    xs, ys = curve
    if len(xs) <= most:
        return curve
    size = math.ceil(2 * len(xs) / most)
    chosen: list[int] = []
    for start in range(0, len(xs), size):
        block = range(start, min(start + size, len(xs)))
        there = [(y, i) for i in block if (y := ys[i]) is not None]
        gap = [i for i in block if ys[i] is None][:1]  # a break in the line stays one
        ends = [min(there)[1], max(there)[1]] if there else []
        chosen += sorted({*ends, *gap})
    return [xs[i] for i in chosen], [ys[i] for i in chosen]


def smoothed(curve: Points) -> Points:
    """An exponential mean over a fiftieth of the run, and at its start over a tenth of the past.

    It begins at the first value. With the whole window from the beginning it would be the mean of
    all values so far, far above a loss that falls by half within the first updates.
    """
    xs, ys = curve
    widest = max(2.0, _SMOOTHED_OVER * len(xs))
    mean, n_seen = 0.0, 0
    out: list[float | None] = []
    for y in ys:
        if y is None:
            out.append(None)
            continue
        n_seen += 1
        mean += (y - mean) / min(widest, max(1.0, _SMOOTHED_OF_PAST * n_seen))
        out.append(mean)
    return xs, out


def rates(events: Sequence[Mapping[str, Any]], over: str, under: str) -> Points:
    """One field as a share of another, e.g. waiting for data as a share of the time."""
    xs, parts = points(events, over)
    _, wholes = points(events, under)
    shares = [
        part / whole if part is not None and whole else None
        for part, whole in zip(parts, wholes, strict=True)
    ]
    return xs, shares


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
