"""Plots of runs: curves of one run or several, and of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from toque.reports.page import Figure
from toque.reports.svg_charts import Frame, Series, draw_lines
from toque.runs.curves import Points
from toque.runs.history import METRIC_NAMES, SYSTEM, RunHistory, metric_named

STYLES: Final = ("one", "two", "three", "four", "five", "six")
"""CSS classes of the curves."""
MAX_OVERLAID: Final = len(STYLES)
_WIDE: Final = Frame(1000.0, 330.0)
_MAX_DOTS: Final = 60
"""Number of points from which a curve is plotted without dots."""
_CURVES: Final = (
    "lr",
    "grad_norm",
    "tokens_per_second",
    "data_wait",
    "pad_fraction",
    "mfu",
)
_NOT_SCORES: Final = ("held-out loss", "held-out perplexity")
"""Curves that are not plotted as scores. The loss has its own plot, and perplexity repeats it.
"""
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
"""Title and unit of each plot, and the label and field of each of its lines."""
_GPUS: Final = (
    ("GPU use", "per cent", "utilisation_percent"),
    ("GPU memory", "GB", "memory_used_bytes"),
    ("GPU power", "watts", "power_watts"),
    ("GPU temperature", "degrees Celsius", "temperature_celsius"),
)
"""Title, unit and field of each plot with one line per GPU."""

Runs = Mapping[str, RunHistory]
"""Histories of runs by name."""


def plot_loss(history: RunHistory) -> Figure:
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
    return _plot_wide("Training and held-out loss", series, _held_out_note(history))


def _held_out_note(history: RunHistory) -> str:
    """Describe when the held-out loss was lowest, if there are several evaluations."""
    if history.best is None or history.n_evaluations < 2:
        return ""
    best, best_step = history.best
    n_later = sum(
        row.step > best_step and row.metrics.get("loss") is not None
        for row in history.evaluations
    )
    if not n_later:
        return f"Held-out loss was lowest at the last evaluation, step {best_step:,}."
    later = "1 later evaluation was"
    if n_later > 1:
        later = f"{n_later} later evaluations were"
    return (
        f"Held-out loss was lowest at step {best_step:,} ({best:.4f}). {later} higher."
    )


def plot_run(history: RunHistory) -> list[Figure]:
    """Plot the curves of a run except the loss: updates, groups of layers and scores."""
    runs = {"": history}
    return [*_plot_updates(runs), *_plot_layer_groups(history), *_plot_scores(runs)]


def _plot_layer_groups(history: RunHistory) -> list[Figure]:
    prefix = "group grad_norm "
    groups = [name for name in history.curves if name.startswith(prefix)]
    groups = groups[-MAX_OVERLAID:]
    if not groups:
        return []
    series = [
        Series(name.removeprefix(prefix), *history.curves.points_of(name), style=style)
        for name, style in zip(groups, STYLES, strict=False)
    ]
    info = metric_named("grad_norm")
    return [_plot(f"{_capitalise(info.title)} by group", info.unit, series)]


def plot_losses(runs: Runs) -> Figure:
    """Plot the smoothed training losses of at most `MAX_OVERLAID` runs."""
    return _plot_wide("Training loss, smoothed", _overlay(runs, "loss smoothed"))


def plot_curves(runs: Runs) -> list[Figure]:
    """Plot the curves of several runs except the training loss."""
    series = _overlay(runs, "held-out loss", dots=True)
    held_out = _plot("Held-out loss", METRIC_NAMES["loss"].unit, series)
    return [held_out, *_plot_updates(runs), *_plot_scores(runs)]


def plot_machine(history: RunHistory) -> list[Figure]:
    """Plot the use of the machine during the run's training."""
    figures = []
    for title, unit, parts in _MACHINE:
        curves = {label: SYSTEM + name for label, name in parts}
        figures += _plot_system(history, title, unit, curves)
    for title, unit, name in _GPUS:
        curves = {
            f"GPU {curve.split()[2]}": curve  # e.g. "system gpu 0 power_watts"
            for curve in history.curves
            if curve.startswith(f"{SYSTEM}gpu ") and curve.endswith(f" {name}")
        }
        figures += _plot_system(history, title, unit, curves)
    return figures


def _plot_system(
    history: RunHistory, title: str, unit: str, curves: Mapping[str, str]
) -> list[Figure]:
    """Plot curves of the machine by their labels. Without a known curve, return no plot."""
    series = [
        Series(label, *history.curves.points_of(curve), style=style)
        for (label, curve), style in zip(curves.items(), STYLES, strict=False)
        if curve in history.curves
    ]
    if not series:
        return []
    return [_plot(title, unit, series, x_name="minutes", from_zero=True)]


def _plot_updates(runs: Runs) -> Iterable[Figure]:
    for name in _CURVES:
        # The utilisation is missing if the speed of the machine is unknown.
        is_measured = any(
            name in run.curves and run.curves[name].values() for run in runs.values()
        )
        if is_measured:
            info = METRIC_NAMES[name]
            title = _capitalise(info.title)
            series = _overlay(runs, name, label=title)
            yield _plot(title, info.unit, series, from_zero=True)


def _plot_scores(runs: Runs) -> Iterable[Figure]:
    """Plot the held-out metrics, except the loss and metrics that never change."""
    names = {
        name
        for run in runs.values()
        for name, curve in run.curves.items()
        if name.startswith("held-out ") and len(set(curve.values())) > 1
    }
    for name in sorted(names.difference(_NOT_SCORES)):
        info = metric_named(name.removeprefix("held-out "))
        series = _overlay(runs, name, label=info.title, dots=True)
        yield _plot(_capitalise(info.title), info.unit, series)


def _overlay(
    runs: Runs, name: str, *, label: str = "", dots: bool = False
) -> list[Series]:
    """Make a curve per run. The curve of a single run has the metric's label."""
    series = []
    for (run, history), style in zip(runs.items(), STYLES, strict=False):
        points: Points = history.curves.points_of(name)
        has_dots = dots and len(points[0]) < _MAX_DOTS
        series.append(Series(run or label, *points, style=style, dots=has_dots))
    return series


def _plot_wide(title: str, series: Sequence[Series], note: str = "") -> Figure:
    """Plot losses in two sizes, for wide and narrow screens."""
    unit = METRIC_NAMES["loss"].unit
    draw = partial(draw_lines, title, series, x_name="step", y_name=unit)
    return Figure(title, draw(frame=_WIDE), note, draw(frame=Frame()))


def _plot(
    title: str,
    unit: str,
    series: Sequence[Series],
    *,
    x_name: str = "step",
    from_zero: bool = False,
) -> Figure:
    svg = draw_lines(title, series, x_name=x_name, y_name=unit, from_zero=from_zero)
    return Figure(title, svg)


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]
