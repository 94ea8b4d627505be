"""Comparison of runs: tables, a sentence, a record for programs, and a page with their curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from toque.evaluation.bootstrap import MIN_TEXTS, ByText, Interval, TextTable, over_texts
from toque.reporter import clock_text
from toque.reports.figures import MOST_OVER, figures_over, losses_over
from toque.reports.page import (
    Figures,
    Grid,
    Page,
    PageHead,
    Part,
    Section,
    Sentence,
    aligned,
    written,
)
from toque.runs.history import metric_named
from toque.runs.run_record import COUNTS, RunRecord
from toque.runs.run_state import state_of
from toque.version import __version__

METHOD: Final = (
    "Differences are the other run's score minus the first's over the same held-out texts, with "
    f"the 95 % interval of a paired bootstrap ({MIN_TEXTS} texts or more); * where it leaves "
    "zero out. They tell these two models apart on texts like these. Another seed gives other "
    "models: `toque ablate` measures a setting over several."
)
_PRIMARY: Final = ("loss", "bits_per_byte", "recipe_score")  # of the sentence
_NONE: Final = "-"
_COSTS: Final[Sequence[tuple[str, str, Callable[[Any], str]]]] = (
    ("updates", "steps", "{:,d}".format),
    ("training time", "training_seconds", clock_text),
    ("tokens", "tokens", "{:,d}".format),
    ("GPU energy measured, Wh", "gpu_watt_hours", "{:,.1f}".format),
)


@dataclass(frozen=True)
class ComparedRun:
    """A run as a comparison reads it."""

    record: RunRecord
    settings: Mapping[str, str]  # values of its config.yaml by their dotted names, as written there
    scores: Mapping[str, float]  # final scores by name
    by_text: ByText | None  # scores of each text; None where there are none

    @property
    def loss(self) -> float | None:
        """Held-out loss of the finished model; of the best evaluation where there is none."""
        best = self.record.history.best
        return self.scores.get("loss", best[0] if best is not None else None)

    def cost(self) -> dict[str, Any]:
        """Updates, time, tokens and energy."""
        history = self.record.history
        joules = history.gpu_joules
        return {
            "steps": history.progress.step,
            "training_seconds": history.progress.seconds,
            "tokens": history.progress.tokens,
            "gpu_watt_hours": None if joules is None else joules / 3600,
        }


@dataclass(frozen=True)
class ScoreDifference:
    """One measure of a run against the first one's."""

    measure: str
    first: float
    other: float
    interval: Interval

    @property
    def other_is_better(self) -> bool | None:
        """True if the other run is better; None where the interval holds zero."""
        if not self.interval.decided:
            return None
        return (self.interval.mean < 0) == (metric_named(self.measure).better == "lower")

    def record(self) -> dict[str, Any]:
        """The difference as JSON."""
        better = self.other_is_better
        return {
            "first": self.first,
            "other": self.other,
            **asdict(self.interval),
            "decided": self.interval.decided,
            "better": None if better is None else ("other" if better else "first"),
        }

    def row(self) -> tuple[str, ...]:
        """The difference as a row of its table."""
        i = self.interval
        ends = _NONE if i.low is None or i.high is None else f"{i.low:+.4f} to {i.high:+.4f}"
        star = {True: "* better", False: "* worse", None: ""}[self.other_is_better]
        scores = written(self.first), written(self.other), f"{i.mean:+.4f}"
        return _title(self.measure), *scores, ends, f"{i.pairs:,}", star

    def in_words(self, *, worse: bool = False) -> str:
        """The measure with its difference and interval, as of the better run or the worse."""
        i, name = self.interval, _title(self.measure)
        over = f"{i.pairs:,} text{'s' * (i.pairs > 1)}"
        if i.low is None or i.high is None:
            return f"{name} differs by {i.mean:+.4f} ({over}, too few for an interval)"
        if not i.decided:
            return f"{name} differs by {i.mean:+.4f} ({i.low:+.4f} to {i.high:+.4f}, {over})"
        way = "lower" if (metric_named(self.measure).better == "lower") != worse else "higher"
        low, high = sorted((abs(i.low), abs(i.high)))
        return f"{name} {abs(i.mean):.4f} {way} ({low:.4f} to {high:.4f}, {over})"


@dataclass(frozen=True)
class Comparison:
    """Runs held against the first of them."""

    runs: Mapping[str, ComparedRun]
    differences: Mapping[str, Sequence[ScoreDifference]]
    """Differences from the first run, keyed by the other run's name."""
    notes: Sequence[str]
    """Sentences about what could not be compared."""
    page: Path
    """HTML page with all of it, and curves."""

    def __str__(self) -> str:
        lines: list[str] = []
        for grid in self._grids():
            lines += [grid.title, *aligned(grid), ""] if grid.rows else []
        if not self._settings():
            lines.append("All settings are the same.")
        where = f"{self.page} is a page of it, with the curves over each other."
        return "\n".join([*lines, *self.notes, METHOD, "", self.sentence, where])

    @property
    def record(self) -> dict[str, Any]:
        """Every number, for programs."""
        return {
            "runs": {
                name: {
                    "folder": run.record.place.address,
                    "state": state_of(run.record).kind,
                    "scores": dict(run.scores),
                    "cost": run.cost(),
                }
                for name, run in self.runs.items()
            },
            "settings": self._settings(),
            "differences": {
                other: {d.measure: d.record() for d in found}
                for other, found in self.differences.items()
            },
            "notes": list(self.notes),
            "toque": __version__,
            "sentence": self.sentence,
            "method": METHOD,
        }

    @property
    def sentence(self) -> str:
        """The better run and its lead, or that they are not told apart, in a sentence."""
        return " ".join(map(self._against, self.differences))

    def html_page(self) -> Page:
        """The page."""
        histories = {name: run.record.history for name, run in self.runs.items()}
        curves: list[Part] = [
            Sentence(f"{name}: {state_of(run.record).sentence}", "soft")
            for name, run in self.runs.items()
        ]
        curves.append(losses_over(histories))
        if len(histories) > MOST_OVER:
            curves.append(Sentence(f"The first {MOST_OVER} runs are drawn.", "soft"))
        curves.append(Figures(figures_over(histories)))
        names = list(self.runs)
        title = " and ".join(names) if len(names) == 2 else f"{len(names)} runs"
        sections = (
            Section("notes", "", [Sentence(note, "warn") for note in self.notes]),
            Section("tables", "", [*self._grids()]),
            Section("method", "", [Sentence(METHOD, "soft")]),
            Section("curves", "Curves over each other", curves),
        )
        return Page(PageHead("Comparison", title, self.sentence), sections)

    def _settings(self) -> dict[str, dict[str, str]]:
        """Settings that are not the same in all runs; "-" where one does not have it."""
        names = dict.fromkeys(name for run in self.runs.values() for name in run.settings)
        rows = {
            name: {run: one.settings.get(name, _NONE) for run, one in self.runs.items()}
            for name in names
            if name != "run_dir"  # always another, and changes nothing
        }
        return {name: values for name, values in rows.items() if len(set(values.values())) > 1}

    def _grids(self) -> Iterator[Grid]:
        first, *_ = names = list(self.runs)
        settings = [(name, *values.values()) for name, values in self._settings().items()]
        yield Grid(("setting", *names), settings, title="Settings that differ")
        for other, found in self.differences.items():
            heads = ("measure", first, other, "difference", "95 % interval", "over", "")
            rows = [difference.row() for difference in found]
            yield Grid(heads, rows, title=f"{other} against {first}")
        runs = list(self.runs.values())
        shown = [{d.measure for d in found} for found in self.differences.values()]
        covered = COUNTS.union(set.intersection(*shown) if shown else ())
        final = [
            (_title(name), *(written(run.scores.get(name, _NONE)) for run in runs))
            for name in dict.fromkeys(name for run in runs for name in run.scores)
            if name not in covered
        ]
        best = [run.record.history.best for run in runs]
        lowest = [_NONE if b is None else f"{b[0]:.4f} at step {b[1]:,}" for b in best]
        final.append(("lowest held-out loss while training", *lowest))
        yield Grid(("", *names), final, title="Other final scores, each run on its own texts")
        cost = [("state", *(state_of(run.record).kind for run in runs))]
        costs = [run.cost() for run in runs]
        for label, name, form in _COSTS:
            known = (form(c[name]) if c[name] is not None else _NONE for c in costs)
            cost.append((label, *known))
        yield Grid(("", *names), cost, title="Cost")

    def _against(self, other: str) -> str:
        first = next(iter(self.runs))
        by_name = {d.measure: d for d in self.differences[other]}
        looked_at = [by_name[name] for name in _PRIMARY if name in by_name]
        for_other = [d for d in looked_at if d.other_is_better is True]
        for_first = [d for d in looked_at if d.other_is_better is False]
        undecided = [d for d in looked_at if d.other_is_better is None]
        if not looked_at:
            why = "there are no scores of both over the same held-out texts"
            words = f"{other} and {first} cannot be told apart from these files: {why}."
            return words + self._own_losses(other)
        if for_other and for_first:
            words = (
                f"{other} is better than {first} by {_all(for_other)}, and worse by "
                f"{_all(for_first, worse=True)}."
            )
        elif for_other or for_first:
            better, worse = (other, first) if for_other else (first, other)
            rest = f" Not told apart: {_all(undecided)}." if undecided else ""
            words = f"{better} is better than {worse}: {_all(for_other or for_first)}.{rest}"
        else:
            words = f"{other} and {first} are not told apart: {_all(undecided)}."
        mine, its = (self.runs[n].record.history.progress.seconds for n in (first, other))
        if mine and its:
            words += f" {other} took {its / mine:.2f} times the training time of {first}."
        return words + ("" if looked_at[0].measure in _PRIMARY[:2] else self._own_losses(other))

    def _own_losses(self, other: str) -> str:
        """The held-out losses that each run measured, where no difference by text is known."""
        first = next(iter(self.runs))
        mine, its = self.runs[first].loss, self.runs[other].loss
        if mine is None or its is None:
            return ""
        return (
            f" As each run measured it, the held-out loss is {its:.4f} for {other} and {mine:.4f} "
            f"for {first} ({its - mine:+.4f}), without an interval."
        )


def differences_of(first: ByText, other: ByText) -> tuple[list[ScoreDifference], list[str]]:
    """Measures that both have over the same texts, and sentences about what was not compared."""
    notes: list[str] = []
    examples = _paired(first.examples, other.examples, "held-out examples", notes)
    texts = _paired(first.texts, other.texts, "prompts that texts were written for", notes)
    found: list[ScoreDifference] = []
    if examples is not None:
        mine, its = (table.measures.get("loss") for table in examples)
        left_out = "bits_per_byte"  # the same order by another unit
        if mine is not None and its is not None and (mine.values != its.values)[:, 1].any():
            # The loss is per token: of two tokenizers it says nothing, and bits per byte does.
            left_out = "loss"
            notes.append(
                "The two count tokens, or weigh examples, differently: bits per byte stand in "
                "place of the loss per token."
            )
        found += _differences(*examples, left_out)
    if texts is not None:
        found += _differences(*texts, "")
    order = {name: place for place, name in enumerate(_PRIMARY)}
    return sorted(found, key=lambda d: order.get(d.measure, len(order))), notes


def _paired(
    first: TextTable, other: TextTable, what: str, notes: list[str]
) -> tuple[TextTable, TextTable] | None:
    """Both in one order; None, and a sentence, where they are not the same texts."""
    if not first.keys and not other.keys:
        return None
    mine, its = set(first.keys), set(other.keys)
    if mine == its:
        # A text may be held out twice; it then stands twice in both, and once here.
        whole = len(mine) == len(first.keys) == len(other.keys)
        keys = first.keys if whole else sorted(mine)
        return first.in_order(keys), other.in_order(keys)
    notes.append(
        f"The two were scored on different {what}: {len(mine):,} and {len(its):,}, of which "
        f"{len(mine & its):,} are the same. So no difference is given there. Score both on the "
        "same: `toque evaluate RUN my.yaml` with one configuration."
    )
    return None


def _differences(first: TextTable, other: TextTable, left_out: str) -> Iterator[ScoreDifference]:
    for name, mine in first.measures.items():
        its = other.measures.get(name)
        if its is None or name == left_out or mine.values.shape != its.values.shape:
            continue
        interval = over_texts(its, mine)
        if interval is None:
            continue
        both = (mine.applies & its.applies)[:, None]
        ours, theirs = (float(m.score((m.values * both).sum(axis=0))) for m in (mine, its))
        yield ScoreDifference(name, ours, theirs, interval)


def _all(found: Sequence[ScoreDifference], *, worse: bool = False) -> str:
    return " and ".join(d.in_words(worse=worse) for d in found)


def _title(measure: str) -> str:
    return "held-out loss" if measure == "loss" else metric_named(measure).title
