"""Figures of watched runs: curves of one run, of several over each other, and of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from toque.reports.curves import Points
from toque.reports.parts import Figure
from toque.reports.svg_charts import Frame, Series, lines
from toque.watching.run_numbers import SYSTEM, Curves
from toque.watching.watched_run import WatchedRun

STYLES: Final = ("one", "two", "three", "four", "five", "six")
"""Of lines over each other, in the order of the page's colours."""
MOST_OVER: Final = len(STYLES)
_WIDE: Final = Frame(1000.0, 330.0)
_FEW: Final = 60
"""Points up to which each is a dot of its own."""
_NATS: Final = "nats per target token"
_CURVES: Final = (
    ("Learning rate", "lr", "learning rate"),
    ("Gradient norm", "grad_norm", "norm before clipping"),
    ("Speed", "tokens_per_second", "tokens per second"),
    ("Waiting for data", "data_wait", "share of the time"),
    ("Padding", "pad_fraction", "share of computed tokens"),
    ("Utilisation", "mfu", "share of peak arithmetic"),
)
"""Title, curve, name of the y axis."""
_LEFT_OUT: Final = ("held-out loss", "held-out perplexity")
"""The first has a figure of its own, and the second says the same."""
_MACHINE: Final = (
    ("Processor", "per cent", (("all cores", "cpu_percent"),
                               ("this run", "process_cpu_percent"))),
    ("Memory", "GB", (("in use", "memory_used_bytes"), ("this run", "process_resident_bytes"))),
    ("Disk", "MB per second", (("read", "disk_read_bytes_per_second"),
                               ("written", "disk_write_bytes_per_second"))),
    ("Network", "MB per second", (("received", "network_received_bytes_per_second"),
                                  ("sent", "network_sent_bytes_per_second"))),
)  # fmt: skip
_GPUS: Final = (
    ("GPU use", "per cent", "utilisation_percent"),
    ("GPU memory", "GB", "memory_used_bytes"),
    ("GPU power", "watts", "power_watts"),
    ("GPU temperature", "degrees Celsius", "temperature_celsius"),
)


def figures_of(run: WatchedRun) -> tuple[Figure, list[Figure]]:
    """The loss of a run, and its other curves."""
    curves = run.curves
    loss = _wide(
        "Training and held-out loss",
        [
            Series("training, each update logged", *_points(curves, "loss"), style="faint"),
            Series("training, smoothed", *_points(curves, "loss smoothed")),
            _dotted("held out", _points(curves, "held-out loss"), "two"),
        ],
    )
    others = [
        _figure(title, y_name, [Series(title, *curves[name].points())], from_zero=True)
        for title, name, y_name in _CURVES
        if _is_there(curves, name)
    ]
    for what, title in (("grad_norm", "Gradient norm by group"),
                        ("update_ratio", "Update-to-weight ratio by group")):  # fmt: skip
        start = f"group {what} "
        groups = [name for name in curves if name.startswith(start)][-MOST_OVER:]
        if groups:
            series = [
                Series(name.removeprefix(start), *curves[name].points(), style=style)
                for name, style in zip(groups, STYLES, strict=False)
            ]
            others.append(_figure(title, what.replace("_", " "), series))
    return loss, [*others, *_scores([("", run)])]


def figures_over(runs: Mapping[str, WatchedRun]) -> tuple[Figure, list[Figure]]:
    """The losses of several runs over each other, and their other curves; at most `MOST_OVER`."""
    chosen = list(runs.items())[:MOST_OVER]
    loss = _wide("Training loss, smoothed", _over(chosen, "loss smoothed"))
    others = [_figure("Held-out loss", _NATS, _over(chosen, "held-out loss", dots=True))]
    others += [
        _figure(title, y_name, _over(chosen, name), from_zero=True)
        for title, name, y_name in _CURVES
        if any(_is_there(run.curves, name) for _, run in chosen)
    ]
    return loss, [*others, *_scores(chosen)]


def machine_figures(run: WatchedRun) -> list[Figure]:
    """What the machine did while the run went on."""
    curves = run.curves
    found = []
    for title, unit, parts in _MACHINE:
        series = [
            Series(label, *curves[SYSTEM + name].points(), style=style)
            for (label, name), style in zip(parts, STYLES, strict=False)
            if SYSTEM + name in curves
        ]
        if series:
            found.append(_figure(title, unit, series, x_name="minutes", from_zero=True))
    for title, unit, name in _GPUS:
        of_gpus = [curve for curve in curves if curve.startswith(f"{SYSTEM}gpu ")
                   and curve.endswith(f" {name}")][:MOST_OVER]  # fmt: skip
        series = [
            Series(f"GPU {curve.split()[2]}", *curves[curve].points(), style=style)
            for curve, style in zip(of_gpus, STYLES, strict=False)
        ]
        if series:
            found.append(_figure(title, unit, series, x_name="minutes", from_zero=True))
    return found


def _scores(chosen: Sequence[tuple[str, WatchedRun]]) -> list[Figure]:
    """Held-out measures beside the loss; one that never changes is a number, not a curve."""
    names = dict.fromkeys(
        name
        for _, run in chosen
        for name, curve in run.curves.items()
        if name.startswith("held-out ") and len({y for y in curve.points()[1] if y is not None}) > 1
    )
    return [
        _figure(_title(name), _title(name), _over(chosen, name, dots=True))
        for name in sorted(names)
        if name not in _LEFT_OUT
    ]


def _title(name: str) -> str:
    return name.removeprefix("held-out ").replace("_", " ")


def _over(
    chosen: Sequence[tuple[str, WatchedRun]], name: str, *, dots: bool = False
) -> list[Series]:
    made = []
    for (run_name, run), style in zip(chosen, STYLES, strict=False):
        points = _points(run.curves, name)
        label = run_name or _title(name)
        made.append(_dotted(label, points, style) if dots else Series(label, *points, style=style))
    return made


def _dotted(name: str, points: Points, style: str) -> Series:
    return Series(name, *points, style=style, dots=len(points[0]) < _FEW)


def _is_there(curves: Curves, name: str) -> bool:
    """Whether a curve has a number; utilisation has none where the peak is not known."""
    return any(y is not None for y in _points(curves, name)[1])


def _points(curves: Curves, name: str) -> Points:
    return curves[name].points() if name in curves else ([], [])


def _wide(title: str, series: Sequence[Series]) -> Figure:
    broad, narrow = (
        lines(title, series, x_name="step", y_name=_NATS, frame=frame) for frame in (_WIDE, Frame())
    )
    return Figure(title, broad, narrow=narrow)


def _figure(
    title: str,
    y_name: str,
    series: Sequence[Series],
    *,
    x_name: str = "step",
    from_zero: bool = False,
) -> Figure:
    drawn = lines(title, series, x_name=x_name, y_name=y_name, from_zero=from_zero)
    return Figure(title, drawn)
