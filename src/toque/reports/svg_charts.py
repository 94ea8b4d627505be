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
"""Approximate width of a letter in a label, in drawing units."""
_SPARK = (160, 36)
"""Width and height of a line without axes, in drawing units."""
_X_LABEL_DISTANCE = 62.0
"""Minimum distance between two labels on the x axis, in drawing units."""
_Y_LABEL_DISTANCE = 45.0
"""Minimum distance between two labels on the y axis, in drawing units."""


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


def draw_histogram(
    title: str,
    edges: Sequence[float],
    counts: Sequence[int],
    *,
    unit: str,
    noun: str,
) -> str:
    """Draw bars of `counts[i]` over [edges[i], edges[i + 1]). `noun` names the counted items."""
    if not counts:
        return _placeholder(title)
    frame = Frame()
    x = Scale(edges[0], edges[-1], _LEFT, frame.width - _RIGHT)
    y = Scale(0, max(counts), frame.height - _BOTTOM, _TOP, has_integers=True)
    parts = [
        *_draw_y_axis(y, noun, frame),
        *_draw_x_axis(x, unit, frame),
    ]
    labels = [format_number(edge) for edge in edges]
    for i, count in enumerate(counts):
        left = x(edges[i])
        right = x(edges[i + 1])
        top = y(count)
        gap = min(1.0, (right - left) / 4)
        tooltip = f"{labels[i]} to {labels[i + 1]} {unit}: {count:,} {noun}"
        parts.append(
            f'<rect class="bar" x="{left:.1f}" y="{top:.1f}" width="{right - left - gap:.1f}" '
            f'height="{y(0) - top:.1f}"><title>{escape(tooltip)}</title></rect>'
        )

    peak = max(range(len(counts)), key=counts.__getitem__)
    description = (
        f"{sum(counts):,} {noun} from {labels[0]} to {labels[-1]} {unit}, most between "
        f"{labels[peak]} and {labels[peak + 1]}."
    )
    return _svg(title, description, frame, parts)


def draw_bars(
    title: str,
    rows: Sequence[tuple[str, Sequence[int]]],
    *,
    noun: str,
    part_names: Sequence[str] = (),
) -> str:
    """Draw a horizontal bar per label, divided by its counts. Parts without a name are the rest."""
    if not rows:
        return _placeholder(title)
    width = Frame().width
    totals = [sum(counts) for _, counts in rows]
    largest_total = max(1, *totals)
    longest_label = max(len(label) for label, _ in rows)
    left = min(width / 2.6, 12 + _LETTER * longest_label)
    max_label = max(1, int((left - 12) / _LETTER))
    value_width = 12 + _LETTER * len(f"{largest_total:,}  100.0 %")
    x = Scale(0, largest_total, left, width - value_width)

    total = sum(totals) or 1
    elements = []
    for i, (label, counts) in enumerate(rows):
        top = 6 + i * (_BAR_HEIGHT + _BAR_GAP)
        middle = top + _BAR_HEIGHT / 2 + 4.5
        shown = label if len(label) <= max_label else label[: max_label - 1] + "…"
        html = f"{escape(shown)}<title>{escape(label)}</title>"
        elements.append(_text("tick", left - 8, middle, html, anchor="end"))
        elements += _bar_parts(x, top, label, counts, noun, part_names)
        value = f"{totals[i]:,}  {totals[i] / total:.1%}"
        elements.append(_text("tick", x(totals[i]) + 6, middle, value))

    frame = Frame(width, 12 + len(rows) * (_BAR_HEIGHT + _BAR_GAP))
    first_rows = "; ".join(f"{label}: {sum(counts):,}" for label, counts in rows[:12])
    legend = _legend([(name, f"part{i}") for i, name in enumerate(part_names)])
    return _svg(title, f"{noun}: {first_rows}.", frame, elements) + legend


def _bar_parts(
    x: Scale,
    top: float,
    label: str,
    counts: Sequence[int],
    noun: str,
    part_names: Sequence[str],
) -> list[str]:
    parts = []
    start = 0
    for part, count in enumerate(counts):
        has_name = part < len(part_names)
        name = f", {part_names[part]}" if has_name else ""
        style = f"part{part}" if has_name or not part_names else "rest"
        tooltip = f"{label}{name}: {count:,} {noun}"
        parts.append(
            f'<rect class="bar {style}" x="{x(start):.1f}" y="{top:.1f}" '
            f'width="{x(start + count) - x(start):.1f}" height="{_BAR_HEIGHT:.0f}">'
            f"<title>{escape(tooltip)}</title></rect>"
        )
        start += count
    return parts


def draw_lines(
    title: str,
    series: Sequence[Series],
    *,
    x_name: str,
    y_name: str,
    frame: Frame = Frame(),
    from_zero: bool = False,
) -> str:
    """Draw lines with common axes, and a legend for several lines."""
    shown = [one for one in series if _finite_values(one)]
    if not shown:
        return _placeholder(title)
    xs = [x for one in shown for x in one.xs]
    x = Scale(min(xs), max(xs), _LEFT, frame.width - _RIGHT, has_integers=True)
    y = _y_scale(shown, frame, from_zero=from_zero)
    parts = [
        *_draw_y_axis(y, y_name, frame),
        *_draw_x_axis(x, x_name, frame),
    ]
    descriptions = []
    for one in shown:
        parts += _draw_path(one, x, y)
        values = _finite_values(one)
        ends = f"from {format_number(values[0])} to {format_number(values[-1])}"
        lowest = format_number(min(values))
        descriptions.append(f"{one.name} {ends}, lowest {lowest}")

    plot = _svg(
        title, f"{y_name} by {x_name}: {'; '.join(descriptions)}.", frame, parts
    )
    if len(shown) == 1:
        return plot
    return plot + _legend([(one.name, one.style) for one in shown])


def draw_spark(xs: Sequence[float], ys: Sequence[float | None]) -> str:
    """Draw a small line without axes. The text next to it must say the same. Return "" for none."""
    series = Series("", xs, ys)
    values = _finite_values(series)
    if len(values) < 2:
        return ""
    width, height = _SPARK
    x = Scale(min(xs), max(xs), 1, width - 1)
    y = Scale(min(values), max(values), height - 3, 3)
    path = "".join(_draw_path(series, x, y))
    return f'<svg class="spark" viewBox="0 0 {width} {height}" aria-hidden="true">{path}</svg>'


def _y_scale(series: Sequence[Series], frame: Frame, *, from_zero: bool) -> Scale:
    """Scale the values of all lines, with a margin so that lines do not touch the frame."""
    ys = [y for one in series for y in _finite_values(one)]
    lowest = min(ys)
    if from_zero:
        lowest = min(0.0, lowest)
    highest = max(ys)
    # Lines with a constant value have a margin of a tenth of it. Lines at 0 have a margin of 1.
    margin = (highest - lowest) * 0.04 or abs(highest) * 0.1 or 1.0
    floor = lowest if from_zero and lowest == 0 else lowest - margin
    return Scale(floor, highest + margin, frame.height - _BOTTOM, _TOP)


def _draw_path(one: Series, x: Scale, y: Scale) -> list[str]:
    """Draw the pieces of a line between its gaps. A piece of one point is a dot."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x_value, y_value in zip(one.xs, one.ys, strict=True):
        if y_value is None or not math.isfinite(y_value):
            pieces.append([])
        else:
            pieces[-1].append((x(x_value), y(y_value)))

    lines = []
    dots = []
    for piece in pieces:
        if len(piece) > 1:
            points = " ".join(f"{left:.1f},{top:.1f}" for left, top in piece)
            lines.append(f'<polyline class="line {one.style}" points="{points}"/>')
        if one.dots or len(piece) == 1:
            dots += [
                f'<circle class="dot {one.style}" cx="{left:.1f}" cy="{top:.1f}" r="3"/>'
                for left, top in piece
            ]
    return lines + dots  # dots are on top of the lines


def _finite_values(one: Series) -> list[float]:
    return [y for y in one.ys if y is not None and math.isfinite(y)]


def _draw_x_axis(x: Scale, name: str, frame: Frame) -> list[str]:
    """Draw the line, the labelled ticks and the name of the x axis."""
    base = frame.height - _BOTTOM
    parts = [
        f'<line class="axis" x1="{x.start}" y1="{base}" x2="{x.end}" y2="{base}"/>'
    ]
    for value, label in _labelled_ticks(x, _X_LABEL_DISTANCE):
        at = x(value)
        # The edge of the plot would cut a centred label at the right end.
        anchor = "end" if at > x.end - 14 else "middle"
        parts.append(
            f'<line class="axis" x1="{at:.1f}" y1="{base}" x2="{at:.1f}" y2="{base + 4}"/>'
        )
        parts.append(_text("tick", at, base + 18, label, anchor=anchor))
    middle = (x.start + x.end) / 2
    name_at = frame.height - 8
    parts.append(_text("name", middle, name_at, escape(name), anchor="middle"))
    return parts


def _draw_y_axis(y: Scale, name: str, frame: Frame) -> list[str]:
    """Draw the labelled grid lines and the rotated name of the y axis."""
    parts = []
    right = frame.width - _RIGHT
    for value, label in _labelled_ticks(y, _Y_LABEL_DISTANCE):
        at = y(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>'
        )
        parts.append(_text("tick", _LEFT - 7, at + 4, label, anchor="end"))
    middle = (y.start + y.end) / 2
    parts.append(
        f'<text class="name" transform="translate(13 {middle:.1f}) rotate(-90)" '
        f'text-anchor="middle">{escape(name)}</text>'
    )
    return parts


def _text(kind: str, x: float, y: float, html: str, *, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html}</text>'


def _labelled_ticks(scale: Scale, distance: float) -> list[tuple[float, str]]:
    """Choose the ticks of an axis, about `distance` apart, with their labels."""
    n = max(3, int(abs(scale.end - scale.start) / distance))
    values = choose_ticks(scale.low, scale.high, n, integers_only=scale.has_integers)
    step = values[1] - values[0] if len(values) > 1 else None
    return [(value, format_number(value, step=step)) for value in values]


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    """Make a legend of names and CSS classes, or "" without entries."""
    items = "".join(
        f'<li><span class="swatch {style}"></span>{escape(name)}</li>'
        for name, style in entries
    )
    return f'<ul class="legend">{items}</ul>' if entries else ""


def _svg(title: str, description: str, frame: Frame, parts: Sequence[str]) -> str:
    """Make an SVG element. The title and the description are its accessible name."""
    return (
        f'<svg viewBox="0 0 {frame.width:g} {frame.height:g}" role="img" '
        f'aria-label="{escape(title)}. {escape(description)}">{"".join(parts)}</svg>'
    )


def _placeholder(title: str) -> str:
    return f'<p class="none">{escape(title)}: nothing to show yet.</p>'


@dataclass(frozen=True)
class Scale:
    """Linear map from [low, high] to [start, end] in drawing units.

    >>> Scale(0, 10, 0, 100)(2.5)
    25.0
    """

    low: float
    high: float
    start: float
    end: float
    has_integers: bool = False
    """True to label only integers."""

    def __call__(self, value: float) -> float:
        """Return the position of a value, or the middle if the range is empty."""
        if self.high == self.low:
            return (self.start + self.end) / 2
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def choose_ticks(
    lowest: float, highest: float, n: int = 5, *, integers_only: bool = False
) -> list[float]:
    """Choose about `n` multiples of 1, 2 or 5 times a power of ten within [lowest, highest].

    >>> choose_ticks(0, 1000), choose_ticks(0.13, 0.52), choose_ticks(3, 3)
    ([0.0, 200.0, 400.0, 600.0, 800.0, 1000.0], [0.2, 0.3, 0.4, 0.5], [3])
    >>> choose_ticks(0, 3, integers_only=True)
    [0.0, 1.0, 2.0, 3.0]
    """
    if not highest > lowest:
        return [lowest]
    min_step = (highest - lowest) / n
    power = 10.0 ** math.floor(math.log10(min_step))
    steps = (power, 2.0 * power, 5.0 * power, 10.0 * power)
    # The tolerances are for rounding errors of the divisions.
    step = next(step for step in steps if step >= min_step * (1 - 1e-9))
    if integers_only:
        step = max(1.0, step)
    first = math.ceil(lowest / step - 1e-9)
    last = math.floor(highest / step + 1e-9)
    # Multiply the step instead of adding it, so that errors do not accumulate.
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def format_number(value: float, *, step: float | None = None) -> str:
    """Format a number briefly for an axis. `step` is the distance between labels.

    >>> [format_number(v) for v in (0, 0.25, 1500, 24000, 3_400_000, 0.0003)]
    ['0', '0.25', '1,500', '24k', '3.4M', '3e-4']
    >>> format_number(1.0, step=0.5), format_number(2.25, step=0.25)
    ('1.0', '2.25')
    """
    size = abs(value)
    # Four digits of thousands are still readable without a unit.
    units = (1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")
    for threshold, unit, letter in units:
        if size >= threshold:
            return f"{value / unit:.4g}{letter}"
    if 0 < size < 1e-3:
        mantissa, power = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    if step is not None and 1e-6 < step < 1:
        # Use as many decimals as multiples of the step need.
        decimals = 1
        while decimals < 6 and abs(round(step, decimals) - step) >= 1e-9:
            decimals += 1
        return f"{value:.{decimals}f}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"
