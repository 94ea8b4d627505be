"""Tables and the sentence of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from toque.reporter import clock_text
from toque.reports.parts import Grid
from toque.reports.score_tables import written
from toque.watching.run_state import state_of
from toque.watching.watched_run import WatchedRun
from toque.workflows.compare.scores import LOWER_IS_BETTER, PRIMARY, Difference, Scored

_NONE: Final = "-"
_COUNTS: Final = frozenset({"target_tokens", "target_bytes", "texts"})
"""Numbers of evaluation.json that are no scores."""
_LONGEST: Final = 40
"""Letters of a setting's value in a terminal."""


@dataclass(frozen=True)
class Tables:
    """What the tables of a comparison show."""

    settings: Mapping[str, Mapping[str, str]]
    runs: Mapping[str, WatchedRun]
    scored: Mapping[str, Scored]
    found: Mapping[str, Sequence[Difference]]
    """By the other run."""
    notes: Sequence[str]

    def grids(self) -> list[tuple[str, Grid]]:
        """A title and a table each."""
        names = list(self.runs)
        first = names[0]
        settings = [(name, *values.values()) for name, values in self.settings.items()]
        grids = [("Settings that differ", Grid(("setting", *names), settings))]
        for other, found in self.found.items():
            rows = [_difference_row(difference) for difference in found]
            heads = ("measure", first, other, "difference", "95 % interval", "over", "")
            grids.append((f"{other} against {first}", Grid(heads, rows, frozenset(range(1, 6)))))
        columns: tuple[str, ...] = ("", *names)
        numeric = frozenset(range(1, len(columns)))
        grids.append(("Other final scores, each run on its own texts",
                      Grid(columns, self._final_rows(), numeric)))  # fmt: skip
        return [*grids, ("Cost", Grid(columns, self._cost_rows(), numeric))]

    def lines(self) -> Iterator[str]:
        """The same for a terminal."""
        for title, grid in self.grids():
            if grid.rows:
                yield title
                yield from _aligned(grid)
                yield ""
        if not self.settings:
            yield "All settings are the same."
        yield from self.notes

    def record(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "runs": {
                name: {
                    "folder": run.place.address,
                    "state": state_of(run).kind,
                    "scores": self.scored[name].values,
                    "cost": _cost(run),
                }
                for name, run in self.runs.items()
            },
            "settings": {name: dict(values) for name, values in self.settings.items()},
            "differences": {
                other: {d.measure: d.record() for d in found} for other, found in self.found.items()
            },
            "notes": list(self.notes),
        }

    def _final_rows(self) -> list[tuple[str, ...]]:
        shown = [{d.measure for d in found} for found in self.found.values()]
        covered = set.intersection(*shown) if shown else set()
        names = dict.fromkeys(
            name
            for own in self.scored.values()
            for name in own.values
            if name not in covered and name not in _COUNTS
        )
        rows = [
            (
                _named(name),
                *(written(own.values.get(name, _NONE)) for own in self.scored.values()),
            )
            for name in names
        ]
        best = [run.facts.best for run in self.runs.values()]
        told = [_NONE if b is None else f"{b[0]:.4f} at step {b[1]:,}" for b in best]
        return [*rows, ("lowest held-out loss while training", *told)]

    def _cost_rows(self) -> list[tuple[str, ...]]:
        costs = [_cost(run) for run in self.runs.values()]

        def row(label: str, name: str, form: str) -> tuple[str, ...]:
            values = [cost[name] for cost in costs]
            return label, *(_NONE if v is None else format(v, form) for v in values)

        seconds = [clock_text(cost["training_seconds"] or 0.0) for cost in costs]
        return [
            ("state", *(state_of(run).kind for run in self.runs.values())),
            row("updates", "steps", ",d"),
            ("training time", *seconds),
            row("tokens", "tokens", ",d"),
            row("GPU energy measured, Wh", "gpu_watt_hours", ",.1f"),
        ]


def sentence_of(
    first: str,
    found: Mapping[str, Sequence[Difference]],
    runs: Mapping[str, WatchedRun],
    scored: Mapping[str, Scored],
) -> str:
    """Which is better and by how much, one sentence for each run against the first."""
    return " ".join(
        _against(first, other, differences, runs) + _losses(first, other, differences, runs, scored)
        for other, differences in found.items()
    )


def _losses(
    first: str, other: str, found: Sequence[Difference], runs: Mapping[str, WatchedRun],
    scored: Mapping[str, Scored],
) -> str:  # fmt: skip
    """The held-out losses that each run measured, where they are not known text by text."""
    best = {name: runs[name].facts.best or (None,) for name in (first, other)}
    ours, theirs = (scored[name].values.get("loss", best[name][0]) for name in (first, other))
    if ours is None or theirs is None or any(d.measure in PRIMARY[:2] for d in found):
        return ""
    return (
        f" As each run measured it, the held-out loss is {theirs:.4f} for {other} and {ours:.4f} "
        f"for {first} ({theirs - ours:+.4f}), without an interval."
    )


def _against(
    first: str, other: str, found: Sequence[Difference], runs: Mapping[str, WatchedRun]
) -> str:
    by_name = {d.measure: d for d in found}
    looked_at = [by_name[name] for name in PRIMARY if name in by_name]
    if not looked_at:
        why = "there are no scores of both over the same held-out texts"
        return f"{other} and {first} cannot be told apart from these files: {why}."
    for_other = [d for d in looked_at if d.other_is_better is True]
    for_first = [d for d in looked_at if d.other_is_better is False]
    cost = _cost_in_words(first, other, runs)
    if not for_other and not for_first:
        return f"{other} and {first} are not told apart: {_all(looked_at)}.{cost}"
    if for_other and for_first:
        return (
            f"{other} is better than {first} by {_all(for_other)}, and worse by "
            f"{_all(for_first, worse=True)}.{cost}"
        )
    better, worse = (other, first) if for_other else (first, other)
    undecided = [d for d in looked_at if d.other_is_better is None]
    rest = f" Not told apart: {_all(undecided)}." if undecided else ""
    return f"{better} is better than {worse}: {_all(for_other or for_first)}.{rest}{cost}"


def _named(measure: str) -> str:
    return "held-out loss" if measure == "loss" else measure.replace("_", " ")


def _all(found: Sequence[Difference], *, worse: bool = False) -> str:
    return " and ".join(_in_words(d, worse=worse) for d in found)


def _in_words(d: Difference, *, worse: bool) -> str:
    """A measure with its difference and the ends of its interval, of the better or the worse."""
    i = d.interval
    name = _named(d.measure)
    if i.low is None or i.high is None:
        few = f"{i.pairs:,} text{'s' * (i.pairs > 1)}, too few for an interval"
        return f"{name} differs by {i.mean:+.4f} ({few})"
    if not i.decided:
        return f"{name} differs by {i.mean:+.4f} ({i.low:+.4f} to {i.high:+.4f}, {i.pairs:,} texts)"
    way = "lower" if (d.measure in LOWER_IS_BETTER) != worse else "higher"
    low, high = sorted((abs(i.low), abs(i.high)))
    return f"{name} {abs(i.mean):.4f} {way} ({low:.4f} to {high:.4f}, {i.pairs:,} texts)"


def _cost_in_words(first: str, other: str, runs: Mapping[str, WatchedRun]) -> str:
    ours, theirs = (runs[name].facts.totals.seconds for name in (first, other))
    if not ours or not theirs:
        return ""
    return f" {other} took {theirs / ours:.2f} times the training time of {first}."


def _cost(run: WatchedRun) -> dict[str, Any]:
    facts = run.facts
    return {
        "steps": facts.progress.step,
        "training_seconds": facts.totals.seconds,
        "tokens": facts.totals.tokens,
        "gpu_watt_hours": facts.watt_hours,
    }


def _difference_row(d: Difference) -> tuple[str, ...]:
    i = d.interval
    ends = _NONE if i.low is None or i.high is None else f"{i.low:+.4f} to {i.high:+.4f}"
    better = {True: "* better", False: "* worse", None: ""}[d.other_is_better]
    name = _named(d.measure)
    return name, written(d.first), written(d.other), f"{i.mean:+.4f}", ends, f"{i.pairs:,}", better


def _aligned(grid: Grid) -> Iterator[str]:
    """Columns of one width each, cut where a value is long."""
    rows = [[_short(cell) for cell in row] for row in (grid.heads, *grid.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(grid.heads))]
    for row in rows:
        cells = [
            cell.rjust(width) if column in grid.numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()


def _short(cell: str) -> str:
    shown = "".join(c if c.isprintable() else "?" for c in cell)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"
