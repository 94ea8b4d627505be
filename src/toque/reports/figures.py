"""Plots of runs: curves of one run or several, and of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from toque.reports.page import Figure
from toque.reports.svg_charts import Frame, Series, lines
from toque.runs.history import METRIC_NAMES, SYSTEM, Points, RunHistory, metric_named

STYLES: Final = ("one", "two", "three", "four", "five", "six")
"""CSS classes of the curves."""
MAX_OVERLAID: Final = len(STYLES)
_WIDE: Final = Frame(1000.0, 330.0)
_MAX_DOTS: Final = 60
"""Points of a curve up to which they are shown as dots."""
_CURVES: Final = (
    "lr",
    "grad_norm",
    "tokens_per_second",
    "data_wait",
    "pad_fraction",
    "mfu",
)
_SHOWN_SEPARATELY: Final = ("held-out loss", "held-out perplexity")
"""Curves that are shown in a separate plot."""
_MACHINE: Final = (
    (
        "Processor",
        "per cent",
        (("all cores", "cpu_percent"), ("this run", "process_cpu_percent")),
    ),
    (
        "Memory",
        "GB",
        (("in use", "memory_used_bytes"), ("this run", "process_resident_bytes")),
    ),
    (
        "Disk",
        "MB per second",
        (
            ("read", "disk_read_bytes_per_second"),
            ("written", "disk_write_bytes_per_second"),
        ),
    ),
    (
        "Network",
        "MB per second",
        (
            ("received", "network_received_bytes_per_second"),
            ("sent", "network_sent_bytes_per_second"),
        ),
    ),
)
"""Title, unit, and the label and field of each line."""
_GPUS: Final = (
    ("GPU use", "per cent", "utilisation_percent"),
    ("GPU memory", "GB", "memory_used_bytes"),
    ("GPU power", "watts", "power_watts"),
    ("GPU temperature", "degrees Celsius", "temperature_celsius"),
)

Runs = Mapping[str, RunHistory]
"""Histories of runs by name."""


def loss_of(history: RunHistory) -> Figure:
    """Plot the training and held-out loss of a run, with a note about the held-out loss."""
    curves = history.curves
    held_out = curves.points_of("held-out loss")
    series = [
        Series(
            "training, each update logged", *curves.points_of("loss"), style="faint"
        ),
        Series("training, smoothed", *curves.points_of("loss smoothed")),
        Series("held out", *held_out, style="two", dots=len(held_out[0]) < _MAX_DOTS),
    ]
    note = ""
    if history.best is not None and history.n_evaluations > 1:
        best, at = history.best
        since = sum(
            row.step > at and row.metrics.get("loss") is not None
            for row in history.evaluations
        )
        note = f"Held-out loss was lowest at the last evaluation, step {at:,}."
        if since:
            later = (
                "1 later evaluation was"
                if since == 1
                else f"{since} later evaluations were"
            )
            note = (
                f"Held-out loss was lowest at step {at:,} ({best:.4f}). {later} higher."
            )
    return _wide("Training and held-out loss", series, note)


def figures_of(history: RunHistory) -> list[Figure]:
    """Plot the curves of a run except the loss: updates, groups of layers and scores."""
    figures = [*_of_updates({"": history})]
    start, info = "group grad_norm ", metric_named("grad_norm")
    groups = [name for name in history.curves if name.startswith(start)][-MAX_OVERLAID:]
    if groups:
        series = [
            Series(
                name.removeprefix(start), *history.curves.points_of(name), style=style
            )
            for name, style in zip(groups, STYLES, strict=False)
        ]
        figures.append(_figure(f"{_title(info.title)} by group", info.unit, series))
    return [*figures, *_scores({"": history})]


def losses_over(runs: Runs) -> Figure:
    """Plot the smoothed training losses of at most `MAX_OVERLAID` runs."""
    return _wide("Training loss, smoothed", _over(runs, "loss smoothed"))


def figures_over(runs: Runs) -> list[Figure]:
    """Plot the curves of several runs except the training loss."""
    held_out = _figure(
        "Held-out loss",
        METRIC_NAMES["loss"].unit,
        _over(runs, "held-out loss", dots=True),
    )
    return [held_out, *_of_updates(runs), *_scores(runs)]


def machine_figures(history: RunHistory) -> list[Figure]:
    """Plot the use of the machine while the run trained."""
    curves = history.curves
    plots: list[tuple[str, str, list[tuple[str, str]]]] = [
        (title, unit, [(label, SYSTEM + name) for label, name in parts])
        for title, unit, parts in _MACHINE
    ]
    for title, unit, name in _GPUS:
        of_gpus = [
            c
            for c in curves
            if c.startswith(f"{SYSTEM}gpu ") and c.endswith(f" {name}")
        ]
        plots.append((title, unit, [(f"GPU {c.split()[2]}", c) for c in of_gpus]))
    figures = []
    for title, unit, named in plots:
        series = [
            Series(label, *curves.points_of(name), style=style)
            for (label, name), style in zip(named, STYLES, strict=False)
            if name in curves
        ]
        if series:
            figures.append(
                _figure(title, unit, series, x_name="minutes", from_zero=True)
            )
    return figures


def _of_updates(runs: Runs) -> Iterable[Figure]:
    for name in _CURVES:
        info = METRIC_NAMES[name]
        # The utilisation is missing if the speed of the machine is unknown.
        if any(
            name in run.curves and run.curves[name].values() for run in runs.values()
        ):
            series = _over(runs, name, label=_title(info.title))
            yield _figure(_title(info.title), info.unit, series, from_zero=True)


def _scores(runs: Runs) -> Iterable[Figure]:
    """Plot the held-out metrics, except the loss and metrics that never change."""
    names = {
        name
        for run in runs.values()
        for name, curve in run.curves.items()
        if name.startswith("held-out ") and len(set(curve.values())) > 1
    }
    for name in sorted(names.difference(_SHOWN_SEPARATELY)):
        info = metric_named(name.removeprefix("held-out "))
        series = _over(runs, name, label=info.title, dots=True)
        yield _figure(_title(info.title), info.unit, series)


def _over(
    runs: Runs, name: str, *, label: str = "", dots: bool = False
) -> list[Series]:
    """Make a curve per run. The curve of a single run has the label of the metric."""
    series = []
    for (run, history), style in zip(runs.items(), STYLES, strict=False):
        points: Points = history.curves.points_of(name)
        has_dots = dots and len(points[0]) < _MAX_DOTS
        series.append(Series(run or label, *points, style=style, dots=has_dots))
    return series


def _wide(title: str, series: Sequence[Series], note: str = "") -> Figure:
    unit = METRIC_NAMES["loss"].unit
    broad, narrow = (
        lines(title, series, x_name="step", y_name=unit, frame=frame)
        for frame in (_WIDE, Frame())
    )
    return Figure(title, broad, note, narrow)


def _figure(
    title: str,
    unit: str,
    series: Sequence[Series],
    *,
    x_name: str = "step",
    from_zero: bool = False,
) -> Figure:
    return Figure(
        title, lines(title, series, x_name=x_name, y_name=unit, from_zero=from_zero)
    )


def _title(name: str) -> str:
    return name[:1].upper() + name[1:]
