"""Figures of runs: curves of one, of several over each other, and of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from toque.reports.page import Figure
from toque.reports.svg_charts import Frame, Series, lines
from toque.runs.history import METRIC_NAMES, SYSTEM, Points, RunHistory, metric_named

STYLES: Final = ("one", "two", "three", "four", "five", "six")  # as colours
MOST_OVER: Final = len(STYLES)
_WIDE: Final = Frame(1000.0, 330.0)
_FEW: Final = 60  # points up to which each is a dot of its own
_CURVES: Final = ("lr", "grad_norm", "tokens_per_second", "data_wait", "pad_fraction", "mfu")
_LEFT_OUT: Final = ("held-out loss", "held-out perplexity")  # drawn apart, shows the same
_MACHINE: Final = (
    ("Processor", "per cent", (("all cores", "cpu_percent"), ("this run", "process_cpu_percent"))),
    ("Memory", "GB", (("in use", "memory_used_bytes"), ("this run", "process_resident_bytes"))),
    (
        "Disk",
        "MB per second",
        (("read", "disk_read_bytes_per_second"), ("written", "disk_write_bytes_per_second")),
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

Runs = Mapping[str, RunHistory]  # runs to draw, by name


def loss_of(history: RunHistory) -> Figure:
    """Training and held-out loss of a run, with a sentence about the held-out one."""
    curves = history.curves
    held_out = curves.points_of("held-out loss")
    series = [
        Series("training, each update logged", *curves.points_of("loss"), style="faint"),
        Series("training, smoothed", *curves.points_of("loss smoothed")),
        Series("held out", *held_out, style="two", dots=len(held_out[0]) < _FEW),
    ]
    note = ""
    if history.best is not None and history.n_evaluations > 1:
        best, at = history.best
        since = sum(
            row.step > at and row.metrics.get("loss") is not None for row in history.evaluations
        )
        note = f"Held-out loss was lowest at the last evaluation, step {at:,}."
        if since:
            note = (
                f"Held-out loss was lowest at step {at:,} ({best:.4f}); the {since} "
                f"evaluation{'s' if since > 1 else ''} since were higher."
            )
    return _wide("Training and held-out loss", series, note)


def figures_of(history: RunHistory) -> list[Figure]:
    """The other curves of a run: its updates, its groups of layers, its scores."""
    found = [*_of_updates({"": history})]
    start, info = "group grad_norm ", metric_named("grad_norm")
    groups = [name for name in history.curves if name.startswith(start)][-MOST_OVER:]
    if groups:
        series = [
            Series(name.removeprefix(start), *history.curves.points_of(name), style=style)
            for name, style in zip(groups, STYLES, strict=False)
        ]
        found.append(_figure(f"{_title(info.title)} by group", info.unit, series))
    return [*found, *_scores({"": history})]


def losses_over(runs: Runs) -> Figure:
    """Smoothed training losses over each other; of at most `MOST_OVER` runs."""
    return _wide("Training loss, smoothed", _over(runs, "loss smoothed"))


def figures_over(runs: Runs) -> list[Figure]:
    """The other curves of several runs over each other."""
    held_out = _figure(
        "Held-out loss", METRIC_NAMES["loss"].unit, _over(runs, "held-out loss", dots=True)
    )
    return [held_out, *_of_updates(runs), *_scores(runs)]


def machine_figures(history: RunHistory) -> list[Figure]:
    """Use of the machine over the minutes that were measured while the run trained."""
    curves = history.curves
    drawn: list[tuple[str, str, list[tuple[str, str]]]] = [
        (title, unit, [(label, SYSTEM + name) for label, name in parts])
        for title, unit, parts in _MACHINE
    ]
    for title, unit, name in _GPUS:
        own = [c for c in curves if c.startswith(f"{SYSTEM}gpu ") and c.endswith(f" {name}")]
        drawn.append((title, unit, [(f"GPU {c.split()[2]}", c) for c in own]))
    found = []
    for title, unit, named in drawn:
        series = [
            Series(label, *curves.points_of(name), style=style)
            for (label, name), style in zip(named, STYLES, strict=False)
            if name in curves
        ]
        if series:
            found.append(_figure(title, unit, series, x_name="minutes", from_zero=True))
    return found


def _of_updates(runs: Runs) -> Iterable[Figure]:
    for name in _CURVES:
        info = METRIC_NAMES[name]
        # Utilisation has no number where the machine's peak is not known.
        if any(name in run.curves and run.curves[name].values() for run in runs.values()):
            series = _over(runs, name, label=_title(info.title))
            yield _figure(_title(info.title), info.unit, series, from_zero=True)


def _scores(runs: Runs) -> Iterable[Figure]:
    """Held-out metrics beside the loss; one that never changes is a number, not a curve."""
    names = {
        name
        for run in runs.values()
        for name, curve in run.curves.items()
        if name.startswith("held-out ") and len(set(curve.values())) > 1
    }
    for name in sorted(names.difference(_LEFT_OUT)):
        info = metric_named(name.removeprefix("held-out "))
        series = _over(runs, name, label=info.title, dots=True)
        yield _figure(_title(info.title), info.unit, series)


def _over(runs: Runs, name: str, *, label: str = "", dots: bool = False) -> list[Series]:
    """A curve of each run; the line of a run alone is labelled with what it shows."""
    found = []
    for (run, history), style in zip(runs.items(), STYLES, strict=False):
        points: Points = history.curves.points_of(name)
        few = dots and len(points[0]) < _FEW
        found.append(Series(run or label, *points, style=style, dots=few))
    return found


def _wide(title: str, series: Sequence[Series], note: str = "") -> Figure:
    unit = METRIC_NAMES["loss"].unit
    broad, narrow = (
        lines(title, series, x_name="step", y_name=unit, frame=frame) for frame in (_WIDE, Frame())
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
    return Figure(title, lines(title, series, x_name=x_name, y_name=unit, from_zero=from_zero))


def _title(name: str) -> str:
    return name[:1].upper() + name[1:]
