"""Plot of a curve in the terminal, in columns of eighths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from toque.reports.axes import written

_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
WIDTH: Final = 64
HEIGHT: Final = 10


def plot(
    ys: Sequence[float],
    *,
    title: str,
    unit: str,
    length: float,
    marks: Sequence[tuple[float, str]] = (),
    height: int = HEIGHT,
) -> str:
    """Columns from 0 to the largest of `ys`, and where things begin below them.

    Args:
        ys: one for each column, none negative.
        title: what they are.
        unit: of the x axis.
        length: what the x axis ends at.
        marks: share of the x axis, and what begins there.
        height: lines.

    >>> print(plot([0.0, 0.5, 1.0], title="rate", unit="steps", length=20, height=2))
    rate, 0 to 20 steps
           1 |  █
             | ██
    """
    most = max(ys) or 1.0
    filled = [round(8 * height * y / most) for y in ys]
    lines = [f"{title}, 0 to {written(length)} {unit}"]
    for row in range(height - 1, -1, -1):
        cells = "".join(_EIGHTHS[min(8, max(0, n - 8 * row))] for n in filled)
        label = written(most) if row == height - 1 else ""
        lines.append(f"{label:>8} |{cells}".rstrip())
    for number, (share, what) in enumerate(marks, start=1):
        at = min(len(ys) - 1, round(share * len(ys)))
        lines.append(f"{'':>8} |{' ' * at}^ stage {number}: {what}")
    return "\n".join(lines)
