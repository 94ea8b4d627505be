"""Axes of a plot: the numbers that stand on one, their places and how they are written."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps [least, most] onto [start, end] in drawing units, linearly.

    >>> Scale(0, 10, 0, 100)(2.5)
    25.0
    """

    least: float
    most: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Place of `value`; the middle when the range is empty."""
        if self.most == self.least:
            return (self.start + self.end) / 2
        share = (value - self.least) / (self.most - self.least)
        return self.start + share * (self.end - self.start)


def ticks(least: float, most: float, n: int = 5, *, whole: bool = False) -> list[float]:
    """About `n` round numbers within [least, most]: multiples of 1, 2 or 5 times a power of ten.

    >>> ticks(0, 1000), ticks(0.13, 0.52), ticks(3, 3)
    ([0.0, 200.0, 400.0, 600.0, 800.0, 1000.0], [0.2, 0.3, 0.4, 0.5], [3])
    >>> ticks(0, 3, whole=True)
    [0.0, 1.0, 2.0, 3.0]
    """
    if not most > least:
        return [least]
    rough = (most - least) / n
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1.0, 2.0, 5.0, 10.0) if s * power >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, step)
    # Counted in whole steps, so that errors do not add up along the axis.
    first, last = math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def written(value: float, *, step: float | None = None) -> str:
    """A number as short as an axis needs it; `step` is the distance to its neighbours.

    >>> [written(v) for v in (0, 0.25, 1500, 24000, 3_400_000, 0.0003)]
    ['0', '0.25', '1,500', '24k', '3.4M', '3e-4']
    >>> written(1.0, step=0.5), written(2.25, step=0.25)
    ('1.0', '2.25')
    """
    size = abs(value)
    for least, unit, letter in (
        (1e12, 1e12, "T"),
        (1e9, 1e9, "G"),
        (1e6, 1e6, "M"),
        (1e4, 1e3, "k"),
    ):
        if size >= least:
            return f"{value / unit:.4g}{letter}"
    if 0 < size < 1e-3:
        digits, power = f"{value:.2e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    if step is not None and 1e-6 < step < 1:
        return f"{value:.{_decimals(step)}f}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"


def _decimals(step: float) -> int:
    """Digits after the point that tell multiples of `step` apart."""
    return next((d for d in range(1, 6) if abs(round(step, d) - step) < 1e-9), 6)
