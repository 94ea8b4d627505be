"""Plots of runs: curves of one run or several, and of the machine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from toque.reports.page import Figure
from toque.reports.svg_charts import Frame, Series, draw_lines
from toque.runs.curves import Points
from toque.runs.history import SYSTEM, RunHistory
from toque.runs.metric_names import (
    ACCURACY,
    LOSSES,
    MARGIN,
    METRIC_NAMES,
    PAIR_LOSS,
    REWARD,
    SUMMARY_SCORES,
    metric_named,
)

STYLES: Final = ("one", "two", "three", "four", "five", "six")
"""CSS classes of the curves."""
MAX_OVERLAID: Final = len(STYLES)
_WIDE: Final = Frame(1000.0, 330.0)
_MAX_DOTS: Final = 60
"""Number of points from which a curve is plotted without dots."""
_CURVES: Final = (
    "entropy",
    "text_tokens",
    "kl",
    "rollouts",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "data_wait",
    "pad_fraction",
    "mfu",
)
_NOT_SCORES: Final = (
    "held-out loss",
    f"held-out {PAIR_LOSS}",
    "held-out perplexity",
    "held-out rewards/chosen",
    "held-out rewards/rejected",
)
"""Curves that are not plotted as scores. A loss has its own plot. Perplexity repeats the loss, and
the rewards of both answers repeat their log-probabilities.
"""
_FIRST_SCORES: Final = tuple(f"held-out {name}" for name in SUMMARY_SCORES)


class _Plot(NamedTuple):
    """Plot of several curves of a run."""

    title: str
    unit: str
    curves: Mapping[str, str]
    """Curve by its label in the legend."""


_OBJECTIVE: Final = (
    _Plot(
        "Accuracy of pairs",
        METRIC_NAMES[ACCURACY].unit,
        {"training": ACCURACY, "held out": f"held-out {ACCURACY}"},
    ),
    _Plot(
        "Margin of pairs",
        METRIC_NAMES[MARGIN].unit,
        {"training": MARGIN, "held out": f"held-out {MARGIN}"},
    ),
    _Plot(
        "Log-probability of answers",
        METRIC_NAMES["logps/chosen"].unit,
        {
            "chosen": "logps/chosen",
            "rejected": "logps/rejected",
            "chosen, held out": "held-out logps/chosen",
            "rejected, held out": "held-out logps/rejected",
        },
    ),
    _Plot(
        "Equal rewards and cut texts",
        "share",
        {
            "prompts with equal rewards": "equal_groups",
            "texts at the maximum length": "cut_texts",
        },
    ),
)
"""Plots of the measurements of an objective."""
_GROUPED: Final = frozenset(
    curve for plot in _OBJECTIVE for curve in plot.curves.values()
)
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


def plot_learning(history: RunHistory) -> Figure:
    """Plot the reward of a run, or its training and held-out loss with a note."""
    if history.measure == REWARD:
        return _plot_reward(history)
    curves = history.curves
    measure = history.measure
    held_out = curves.points_of(f"held-out {measure}")
    series = [
        Series(
            "training, each update logged", *curves.points_of(measure), style="faint"
        ),
        Series("training, smoothed", *curves.points_of(f"{measure} smoothed")),
        Series("held out", *held_out, style="two", dots=len(held_out[0]) < _MAX_DOTS),
    ]
    title = f"Training and held-out {METRIC_NAMES[measure].title}"
    note = _held_out_note(history)
    return _plot_wide(title, METRIC_NAMES[measure].unit, series, note)


def _plot_reward(history: RunHistory) -> Figure:
    """Plot the mean reward of a run with the spread of the texts."""
    points_of = history.curves.points_of
    series = [
        Series("each update logged", *points_of(REWARD), style="faint"),
        Series("smoothed", *points_of(f"{REWARD} smoothed")),
        Series("one standard deviation above", *points_of("reward high"), style="two"),
        Series("one standard deviation below", *points_of("reward low"), style="three"),
    ]
    note = "Mean and standard deviation over the texts of an update."
    return _plot_wide("Reward", METRIC_NAMES[REWARD].unit, series, note)


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
    """Plot the remaining curves of a run: objective, updates, groups of layers and scores."""
    runs = {"": history}
    figures: list[Figure] = []
    for title, unit, curves in _OBJECTIVE:
        figures += _plot_group(history, title, unit, curves)
    if history.measure == REWARD:
        figures += _plot_held_out_losses(runs)
    scores = _plot_scores(runs, without=_GROUPED)
    return [*figures, *_plot_updates(runs), *_plot_layer_groups(history), *scores]


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


def plot_all_learning(runs: Runs) -> list[Figure]:
    """Plot the smoothed training losses, or rewards, of at most `MAX_OVERLAID` runs.

    Different quantities have different plots.
    """
    titles = {
        "loss": "Training loss, smoothed",
        PAIR_LOSS: "Training loss of pairs, smoothed",
        REWARD: "Reward, smoothed",
    }
    measures = {run.measure for run in runs.values()}
    return [
        _plot_wide(title, METRIC_NAMES[name].unit, _overlay(runs, f"{name} smoothed"))
        for name, title in titles.items()
        if name in measures
    ]


def plot_curves(runs: Runs) -> list[Figure]:
    """Plot the remaining curves of several runs."""
    names = ("equal_groups", "cut_texts", *_CURVES)
    return [
        *_plot_held_out_losses(runs),
        *_plot_updates(runs, names),
        *_plot_scores(runs),
    ]


def _plot_held_out_losses(runs: Runs) -> Iterable[Figure]:
    """Plot losses per token and losses per pair, each if a run has them."""
    for name in LOSSES:
        if any(f"held-out {name}" in run.curves for run in runs.values()):
            title = f"Held-out {METRIC_NAMES[name].title}"
            series = _overlay(runs, f"held-out {name}", label=title, dots=True)
            yield _plot(title, METRIC_NAMES[name].unit, series)


def plot_machine(history: RunHistory) -> list[Figure]:
    """Plot the use of the machine during the run's training."""
    figures = []
    for title, unit, parts in _MACHINE:
        curves = {label: SYSTEM + name for label, name in parts}
        figures += _plot_group(history, title, unit, curves, x_name="minutes")
    for title, unit, name in _GPUS:
        curves = {
            f"GPU {curve.split()[2]}": curve  # e.g. "system gpu 0 power_watts"
            for curve in history.curves
            if curve.startswith(f"{SYSTEM}gpu ") and curve.endswith(f" {name}")
        }
        figures += _plot_group(history, title, unit, curves, x_name="minutes")
    return figures


def _plot_group(
    history: RunHistory,
    title: str,
    unit: str,
    curves: Mapping[str, str],
    *,
    x_name: str = "step",
) -> list[Figure]:
    """Plot curves of a run by their labels. Without a known curve, return no plot."""
    series = []
    for (label, curve), style in zip(curves.items(), STYLES, strict=False):
        if curve in history.curves:
            points = history.curves.points_of(curve)
            has_dots = curve.startswith("held-out ") and len(points[0]) < _MAX_DOTS
            series.append(Series(label, *points, style=style, dots=has_dots))
    if not series:
        return []
    return [_plot(title, unit, series, x_name=x_name, from_zero=True)]


def _plot_updates(runs: Runs, names: Sequence[str] = _CURVES) -> Iterable[Figure]:
    for name in names:
        # The utilisation is missing if the speed of the machine is unknown.
        is_measured = any(
            name in run.curves and run.curves[name].values() for run in runs.values()
        )
        if is_measured:
            info = METRIC_NAMES[name]
            title = _capitalise(info.title)
            series = _overlay(runs, name, label=title)
            yield _plot(title, info.unit, series, from_zero=True)


def _plot_scores(
    runs: Runs, without: Collection[str] = frozenset()
) -> Iterable[Figure]:
    """Plot the held-out metrics, except losses, metrics that never change, and `without`.

    The scores of entire recipes are first.
    """
    names = {
        name
        for run in runs.values()
        for name, curve in run.curves.items()
        if name.startswith("held-out ") and len(set(curve.values())) > 1
    }
    shown = sorted(names.difference(_NOT_SCORES, without))
    for name in sorted(shown, key=lambda name: name not in _FIRST_SCORES):
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


def _plot_wide(
    title: str, unit: str, series: Sequence[Series], note: str = ""
) -> Figure:
    """Plot losses or rewards in two sizes, for wide and narrow screens."""
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
