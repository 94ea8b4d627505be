"""Plots as inline SVG: histograms, bars and lines, with axes, units and descriptions.

Colours and fonts are in `templates/page.css`. All names and labels are escaped, because they come
from data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Margins of a plot, with space for the labels of the axes.
_LEFT = 66.0
_RIGHT = 14.0
_TOP = 12.0
_BOTTOM = 46.0
_BAR_HEIGHT = 22.0
_BAR_GAP = 8.0
_LETTER = 8.0
"""Approximate width of a letter in a label."""


@dataclass(frozen=True)
class Frame:
    """Size of a plot in drawing units. The page scales it."""

    width: float = 460.0
    height: float = 250.0


@dataclass(frozen=True)
class Series:
    """A line of a plot, with a gap at each y of None or NaN."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    style: str = "one"
    """CSS class: one, two, three, or faint."""
    dots: bool = False


def histogram(
    title: str, edges: Sequence[float], counts: Sequence[int], *, unit: str, of: str
) -> str:
    """Draw bars of `counts[i]` over [edges[i], edges[i + 1]). `of` is the counted noun."""
    if not counts:
        return _nothing(title)
    frame = Frame()
    x = Scale(edges[0], edges[-1], _LEFT, frame.width - _RIGHT)
    y = Scale(0, max(counts), frame.height - _BOTTOM, _TOP)
    parts = [*_axis_y(y, of, frame, integers_only=True), *_axis_x(x, unit, frame)]
    for i, count in enumerate(counts):
        left = x(edges[i])
        right = x(edges[i + 1])
        top = y(count)
        words = f"{written(edges[i])} to {written(edges[i + 1])} {unit}: {count:,} {of}"
        gap = min(1.0, (right - left) / 4)
        parts.append(
            f'<rect class="bar" x="{left:.1f}" y="{top:.1f}" width="{right - left - gap:.1f}" '
            f'height="{y(0) - top:.1f}"><title>{escape(words)}</title></rect>'
        )
    peak = max(range(len(counts)), key=lambda i: counts[i])
    described = (
        f"{sum(counts):,} {of} from {written(edges[0])} to {written(edges[-1])} {unit}, most "
        f"between {written(edges[peak])} and {written(edges[peak + 1])}."
    )
    return _svg(title, described, frame, parts)


def bars(
    title: str,
    rows: Sequence[tuple[str, Sequence[int]]],
    *,
    of: str,
    parts_named: Sequence[str] = (),
) -> str:
    """Draw a horizontal bar per label, divided by its counts. Parts without a name are the rest."""
    if not rows:
        return _nothing(title)
    width = Frame().width
    largest_total = max(1, *(sum(counts) for _, counts in rows))
    longest = max(len(label) for label, _ in rows)
    left = min(width / 2.6, 12 + _LETTER * longest)
    fits = max(1, int((left - 12) / _LETTER))
    room = 12 + _LETTER * len(f"{largest_total:,}  100.0 %")
    x = Scale(0, largest_total, left, width - room)
    total = sum(sum(counts) for _, counts in rows) or 1
    drawn: list[str] = []
    for i, (label, counts) in enumerate(rows):
        top, at = 6 + i * (_BAR_HEIGHT + _BAR_GAP), 0
        middle = top + _BAR_HEIGHT / 2 + 4.5
        shown = label if len(label) <= fits else label[: fits - 1] + "…"
        named = f"{escape(shown)}<title>{escape(label)}</title>"
        drawn.append(_text("tick", left - 8, middle, named, anchor="end"))
        for part, count in enumerate(counts):
            is_named = part < len(parts_named)
            name = f", {parts_named[part]}" if is_named else ""
            style = f"part{part}" if is_named or not parts_named else "rest"
            drawn.append(
                f'<rect class="bar {style}" x="{x(at):.1f}" y="{top:.1f}" '
                f'width="{x(at + count) - x(at):.1f}" height="{_BAR_HEIGHT:.0f}">'
                f"<title>{escape(f'{label}{name}: {count:,} {of}')}</title></rect>"
            )
            at += count
        drawn.append(_text("tick", x(at) + 6, middle, f"{at:,}  {at / total:.1%}"))
    height = 12 + len(rows) * (_BAR_HEIGHT + _BAR_GAP)
    described = "; ".join(f"{label}: {sum(counts):,}" for label, counts in rows[:12])
    legend = _legend([(name, f"part{i}") for i, name in enumerate(parts_named)])
    return _svg(title, f"{of}: {described}.", Frame(width, height), drawn) + legend


def lines(
    title: str,
    series: Sequence[Series],
    *,
    x_name: str,
    y_name: str,
    frame: Frame = Frame(),
    from_zero: bool = False,
) -> str:
    """Draw lines with common axes, and a legend for several lines."""
    drawn = [s for s in series if _numbers(s)]
    if not drawn:
        return _nothing(title)
    ys = [y for s in drawn for y in _numbers(s)]
    xs = [x for s in drawn for x in s.xs]
    lowest, highest = (min(0.0, *ys) if from_zero else min(ys)), max(ys)
    room = (highest - lowest) * 0.04 or abs(highest) * 0.1 or 1.0
    floor = lowest if from_zero and lowest == 0 else lowest - room
    x = Scale(min(xs), max(xs), _LEFT, frame.width - _RIGHT)
    y = Scale(floor, highest + room, frame.height - _BOTTOM, _TOP)
    parts = [*_axis_y(y, y_name, frame), *_axis_x(x, x_name, frame, integers_only=True)]
    described: list[str] = []
    for one in drawn:
        parts += _path(one, x, y)
        values = _numbers(one)
        ends = f"from {written(values[0])} to {written(values[-1])}"
        described.append(f"{one.name} {ends}, lowest {written(min(values))}")
    plot = _svg(title, f"{y_name} by {x_name}: {'; '.join(described)}.", frame, parts)
    return plot + (
        _legend([(s.name, s.style) for s in drawn]) if len(drawn) > 1 else ""
    )


def _path(one: Series, x: Scale, y: Scale) -> list[str]:
    pieces: list[list[str]] = [[]]
    for at, value in zip(one.xs, one.ys, strict=True):
        if value is None or not math.isfinite(value):
            pieces.append([])
        else:
            pieces[-1].append(f"{x(at):.1f},{y(value):.1f}")
    parts = [
        f'<polyline class="line {one.style}" points="{" ".join(points)}"/>'
        for points in pieces
        if len(points) > 1
    ]
    dots = [p for points in pieces for p in points if one.dots or len(points) == 1]
    for dot in dots:
        cx, cy = dot.split(",")
        parts.append(f'<circle class="dot {one.style}" cx="{cx}" cy="{cy}" r="3"/>')
    return parts


def _numbers(one: Series) -> list[float]:
    return [y for y in one.ys if y is not None and math.isfinite(y)]


def _axis_x(
    x: Scale, name: str, frame: Frame, *, integers_only: bool = False
) -> list[str]:
    base = frame.height - _BOTTOM
    at = _labelled(
        ticks(
            x.least,
            x.most,
            max(3, int((x.end - x.start) / 62)),
            integers_only=integers_only,
        )
    )
    parts = [
        f'<line class="axis" x1="{x.start}" y1="{base}" x2="{x.end}" y2="{base}"/>'
    ]
    for value, label in at:
        # The last number would otherwise be cut at the edge of the plot.
        anchor = "end" if x(value) > x.end - 14 else "middle"
        parts.append(
            f'<line class="axis" x1="{x(value):.1f}" y1="{base}" x2="{x(value):.1f}" '
            f'y2="{base + 4}"/>'
            + _text("tick", x(value), base + 18, label, anchor=anchor)
        )
    middle = (x.start + x.end) / 2
    return [
        *parts,
        _text("name", middle, frame.height - 8, escape(name), anchor="middle"),
    ]


def _axis_y(
    y: Scale, name: str, frame: Frame, *, integers_only: bool = False
) -> list[str]:
    at = _labelled(
        ticks(
            y.least,
            y.most,
            max(3, int((y.start - y.end) / 45)),
            integers_only=integers_only,
        )
    )
    parts = []
    for value, label in at:
        parts.append(
            f'<line class="grid" x1="{_LEFT}" y1="{y(value):.1f}" x2="{frame.width - _RIGHT}" '
            f'y2="{y(value):.1f}"/>'
            + _text("tick", _LEFT - 7, y(value) + 4, label, anchor="end")
        )
    middle = (y.start + y.end) / 2
    parts.append(
        f'<text class="name" transform="translate(13 {middle:.1f}) rotate(-90)" '
        f'text-anchor="middle">{escape(name)}</text>'
    )
    return parts


def _text(kind: str, x: float, y: float, html: str, *, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html}</text>'


def _labelled(values: Sequence[float]) -> list[tuple[float, str]]:
    step = values[1] - values[0] if len(values) > 1 else None
    return [(value, written(value, step=step)) for value in values]


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<li><span class="swatch {style}"></span>{escape(name)}</li>'
        for name, style in entries
    )
    return f'<ul class="legend">{items}</ul>' if entries else ""


def _svg(title: str, described: str, frame: Frame, parts: Sequence[str]) -> str:
    """Make an SVG element. `title` is its accessible name."""
    return (
        f'<svg viewBox="0 0 {frame.width:g} {frame.height:g}" role="img" '
        f'aria-label="{escape(title)}. {escape(described)}">{"".join(parts)}</svg>'
    )


def _nothing(title: str) -> str:
    return f'<p class="none">{escape(title)}: nothing to show yet.</p>'


@dataclass(frozen=True)
class Scale:
    """Linear map from [least, most] to [start, end] in drawing units.

    >>> Scale(0, 10, 0, 100)(2.5)
    25.0
    """

    least: float
    most: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the position of a value, or the middle if the range is empty."""
        if self.most == self.least:
            return (self.start + self.end) / 2
        share = (value - self.least) / (self.most - self.least)
        return self.start + share * (self.end - self.start)


def ticks(
    lowest: float, highest: float, n: int = 5, *, integers_only: bool = False
) -> list[float]:
    """Choose about `n` multiples of 1, 2 or 5 times a power of ten within [lowest, highest].

    >>> ticks(0, 1000), ticks(0.13, 0.52), ticks(3, 3)
    ([0.0, 200.0, 400.0, 600.0, 800.0, 1000.0], [0.2, 0.3, 0.4, 0.5], [3])
    >>> ticks(0, 3, integers_only=True)
    [0.0, 1.0, 2.0, 3.0]
    """
    if not highest > lowest:
        return [lowest]
    rough = (highest - lowest) / n
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(
        s * power for s in (1.0, 2.0, 5.0, 10.0) if s * power >= rough * (1 - 1e-9)
    )
    if integers_only:
        step = max(1.0, step)
    # Multiply the step instead of adding it, so that errors do not accumulate.
    first, last = math.ceil(lowest / step - 1e-9), math.floor(highest / step + 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def written(value: float, *, step: float | None = None) -> str:
    """Format a number briefly for an axis. `step` is the distance between labels.

    >>> [written(v) for v in (0, 0.25, 1500, 24000, 3_400_000, 0.0003)]
    ['0', '0.25', '1,500', '24k', '3.4M', '3e-4']
    >>> written(1.0, step=0.5), written(2.25, step=0.25)
    ('1.0', '2.25')
    """
    size = abs(value)
    units = (1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")
    for threshold, unit, letter in units:
        if size >= threshold:
            return f"{value / unit:.4g}{letter}"
    if 0 < size < 1e-3:
        digits, power = f"{value:.2e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    if step is not None and 1e-6 < step < 1:
        # Use as many decimals as multiples of the step need.
        decimals = next(
            (d for d in range(1, 6) if abs(round(step, d) - step) < 1e-9), 6
        )
        return f"{value:.{decimals}f}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"
