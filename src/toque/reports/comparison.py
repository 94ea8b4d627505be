"""Comparison of runs: tables, a conclusion, a JSON record, and a page with curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from toque.evaluation.bootstrap import (
    MIN_TEXTS,
    ByText,
    Interval,
    TextTable,
    subtract_scores,
)
from toque.reporter import clock_text
from toque.reports.figures import MAX_OVERLAID, figures_over, losses_over
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
    "Differences are the score of the other run minus the score of the first, over the same "
    f"held-out texts. With {MIN_TEXTS} texts or more, they have the 95 % interval of a paired "
    "bootstrap, and * if it excludes zero. They compare these two models on similar texts. Another "
    "seed gives different models: `toque ablate` compares settings over several seeds."
)
_PRIMARY: Final = ("loss", "bits_per_byte", "recipe_score")
"""Measures that decide which run is better."""
_NONE: Final = "-"
_COSTS: Final[Sequence[tuple[str, str, Callable[[Any], str]]]] = (
    ("updates", "steps", "{:,d}".format),
    ("training time", "training_seconds", clock_text),
    ("tokens", "tokens", "{:,d}".format),
    ("GPU energy measured, Wh", "gpu_watt_hours", "{:,.1f}".format),
)


@dataclass(frozen=True)
class ComparedRun:
    """A run to compare, with the files that it needs."""

    record: RunRecord
    settings: Mapping[str, str]
    """Values in config.yaml by dotted name."""
    scores: Mapping[str, float]
    """Final scores by name."""
    by_text: ByText | None
    """Scores per text, if they were stored."""

    @property
    def loss(self) -> float | None:
        """Held-out loss of the finished model, or otherwise of the best evaluation."""
        best = self.record.history.best
        return self.scores.get("loss", best[0] if best is not None else None)

    def cost(self) -> dict[str, Any]:
        """Return the updates, time, tokens and energy of the run."""
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
    """Difference of a measure between the first run and another."""

    measure: str
    first: float
    other: float
    interval: Interval

    @property
    def other_is_better(self) -> bool | None:
        """True if the second run is better, or None if the interval includes zero."""
        if not self.interval.decided:
            return None
        return (self.interval.mean < 0) == (
            metric_named(self.measure).better == "lower"
        )

    def record(self) -> dict[str, Any]:
        """Return the difference as JSON values."""
        better = self.other_is_better
        return {
            "first": self.first,
            "other": self.other,
            **asdict(self.interval),
            "decided": self.interval.decided,
            "better": None if better is None else ("other" if better else "first"),
        }

    def row(self) -> tuple[str, ...]:
        """Return the difference as a row of a table."""
        i = self.interval
        has_interval = i.low is not None and i.high is not None
        return (
            _title(self.measure),
            written(self.first),
            written(self.other),
            f"{i.mean:+.4f}",
            f"{i.low:+.4f} to {i.high:+.4f}" if has_interval else _NONE,
            f"{i.pairs:,}",
            {True: "* better", False: "* worse", None: ""}[self.other_is_better],
        )

    def in_words(self, *, worse: bool = False) -> str:
        """Describe the difference and its interval, for the better run or the worse one."""
        i = self.interval
        name = _title(self.measure)
        over = f"{i.pairs:,} {'text' if i.pairs == 1 else 'texts'}"
        if i.low is None or i.high is None:
            return f"{name} differs by {i.mean:+.4f} ({over}, too few for an interval)"
        if not i.decided:
            return f"{name} differs by {i.mean:+.4f} ({i.low:+.4f} to {i.high:+.4f}, {over})"
        is_lower = (metric_named(self.measure).better == "lower") != worse
        direction = "lower" if is_lower else "higher"
        low, high = sorted((abs(i.low), abs(i.high)))
        return f"{name} {abs(i.mean):.4f} {direction} ({low:.4f} to {high:.4f}, {over})"


@dataclass(frozen=True)
class Comparison:
    """Runs compared with the first run."""

    runs: Mapping[str, ComparedRun]
    differences: Mapping[str, Sequence[ScoreDifference]]
    """Differences from the first run, by the name of the other run."""
    notes: Sequence[str]
    """Reasons why scores could not be compared."""
    page: Path
    """HTML page with the tables and curves."""

    def __str__(self) -> str:
        lines: list[str] = []
        for grid in self._grids():
            if grid.rows:
                lines += [grid.title, *aligned(grid), ""]
        if not self._settings():
            lines.append("All settings are the same.")
        where = f"The page with curves is {self.page}."
        return "\n".join([*lines, *self.notes, METHOD, "", self.sentence, where])

    @property
    def record(self) -> dict[str, Any]:
        """All numbers as JSON values."""
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
                other: {d.measure: d.record() for d in differences}
                for other, differences in self.differences.items()
            },
            "notes": list(self.notes),
            "toque": __version__,
            "sentence": self.sentence,
            "method": METHOD,
        }

    @property
    def sentence(self) -> str:
        """Conclusion: the better run and its lead, or that the difference is not significant."""
        return " ".join(map(self._conclude, self.differences))

    def html_page(self) -> Page:
        """Make the page of the comparison."""
        histories = {name: run.record.history for name, run in self.runs.items()}
        curves: list[Part] = [
            Sentence(f"{name}: {state_of(run.record).sentence}", "soft")
            for name, run in self.runs.items()
        ]
        curves.append(losses_over(histories))
        if len(histories) > MAX_OVERLAID:
            curves.append(
                Sentence(f"The curves show the first {MAX_OVERLAID} runs.", "soft")
            )
        curves.append(Figures(figures_over(histories)))
        names = list(self.runs)
        title = " and ".join(names) if len(names) == 2 else f"{len(names)} runs"
        sections = (
            Section("notes", "", [Sentence(note, "warn") for note in self.notes]),
            Section("tables", "", [*self._grids()]),
            Section("method", "", [Sentence(METHOD, "soft")]),
            Section("curves", "Curves of all runs", curves),
        )
        return Page(PageHead("Comparison", title, self.sentence), sections)

    def _settings(self) -> dict[str, dict[str, str]]:
        """Return the settings that differ between runs, with "-" if a run lacks one."""
        different: dict[str, dict[str, str]] = {}
        names = dict.fromkeys(
            name for run in self.runs.values() for name in run.settings
        )
        for name in names:
            values = {
                key: run.settings.get(name, _NONE) for key, run in self.runs.items()
            }
            if name != "run_dir" and len(set(values.values())) > 1:
                different[name] = values
        return different

    def _grids(self) -> Iterator[Grid]:
        names = list(self.runs)
        first = names[0]
        settings = [
            (name, *values.values()) for name, values in self._settings().items()
        ]
        yield Grid(("setting", *names), settings, title="Settings that differ")
        for other, differences in self.differences.items():
            heads = ("measure", first, other, "difference", "95 % interval", "over", "")
            rows = [difference.row() for difference in differences]
            yield Grid(heads, rows, title=f"{other} against {first}")

        runs = list(self.runs.values())
        shown = [
            {d.measure for d in differences}
            for differences in self.differences.values()
        ]
        covered = COUNTS.union(set.intersection(*shown) if shown else ())
        final = [
            (_title(name), *(written(run.scores.get(name, _NONE)) for run in runs))
            for name in dict.fromkeys(name for run in runs for name in run.scores)
            if name not in covered
        ]
        best = [run.record.history.best for run in runs]
        lowest = [_NONE if b is None else f"{b[0]:.4f} at step {b[1]:,}" for b in best]
        final.append(("lowest held-out loss while training", *lowest))
        yield Grid(
            ("", *names), final, title="Other final scores, each run on its own texts"
        )

        cost = [("state", *(state_of(run.record).kind for run in runs))]
        costs = [run.cost() for run in runs]
        for label, name, form in _COSTS:
            values = (form(c[name]) if c[name] is not None else _NONE for c in costs)
            cost.append((label, *values))
        yield Grid(("", *names), cost, title="Cost")

    def _conclude(self, other: str) -> str:
        """Compare a run with the first one by the primary measures."""
        first = next(iter(self.runs))
        by_name = {d.measure: d for d in self.differences[other]}
        primary = [by_name[name] for name in _PRIMARY if name in by_name]
        if not primary:
            return (
                f"{other} and {first} cannot be compared, because they have no scores over the "
                f"same held-out texts.{self._compare_losses(other)}"
            )

        for_other = [d for d in primary if d.other_is_better is True]
        for_first = [d for d in primary if d.other_is_better is False]
        undecided = [d for d in primary if d.other_is_better is None]
        if for_other and for_first:
            text = (
                f"{other} is better than {first} by {_join(for_other)}, and worse by "
                f"{_join(for_first, worse=True)}."
            )
        elif for_other or for_first:
            better, worse = (other, first) if for_other else (first, other)
            text = f"{better} is better than {worse}: {_join(for_other or for_first)}."
            if undecided:
                text += f" Not significant: {_join(undecided)}."
        else:
            text = (
                f"{other} and {first} do not differ significantly: {_join(undecided)}."
            )

        first_seconds = self.runs[first].record.history.progress.seconds
        other_seconds = self.runs[other].record.history.progress.seconds
        if first_seconds and other_seconds:
            ratio = other_seconds / first_seconds
            text += f" {other} took {ratio:.2f} times the training time of {first}."
        if primary[0].measure not in _PRIMARY[:2]:
            text += self._compare_losses(other)
        return text

    def _compare_losses(self, other: str) -> str:
        """Compare the held-out losses of two runs on different texts."""
        first = next(iter(self.runs))
        first_loss = self.runs[first].loss
        other_loss = self.runs[other].loss
        if first_loss is None or other_loss is None:
            return ""
        return (
            f" The held-out loss of {other} is {other_loss:.4f} and of {first} {first_loss:.4f} "
            f"({other_loss - first_loss:+.4f}), each on its own texts and without an interval."
        )


def differences_of(
    first: ByText, other: ByText
) -> tuple[list[ScoreDifference], list[str]]:
    """Compare the measures that both runs have over the same texts.

    Also return notes about scores that could not be compared.
    """
    notes: list[str] = []
    examples = _match_texts(first.examples, other.examples, "held-out examples", notes)
    texts = _match_texts(first.texts, other.texts, "prompts of generated texts", notes)
    differences: list[ScoreDifference] = []
    if examples is not None:
        first_loss, other_loss = (table.measures.get("loss") for table in examples)
        left_out = "bits_per_byte"  # it gives the same order as the loss
        if (
            first_loss is not None
            and other_loss is not None
            and (first_loss.values != other_loss.values)[:, 1].any()
        ):
            # Losses per token of different tokenizers cannot be compared, but bits per byte can.
            left_out = "loss"
            notes.append(
                "The runs count tokens or weight examples differently, so bits per byte are "
                "compared instead of the loss per token."
            )
        differences += _compare_measures(*examples, left_out)
    if texts is not None:
        differences += _compare_measures(*texts, "")
    order = {name: position for position, name in enumerate(_PRIMARY)}
    return sorted(differences, key=lambda d: order.get(d.measure, len(order))), notes


def _match_texts(
    first: TextTable, other: TextTable, what: str, notes: list[str]
) -> tuple[TextTable, TextTable] | None:
    """Put both tables in the same order. Return None, with a note, if the texts differ."""
    if not first.keys and not other.keys:
        return None
    first_keys, other_keys = set(first.keys), set(other.keys)
    if first_keys == other_keys:
        # A text that is held out twice counts once.
        is_unique = len(first_keys) == len(first.keys) == len(other.keys)
        keys = first.keys if is_unique else sorted(first_keys)
        return first.select(keys), other.select(keys)
    notes.append(
        f"The runs were scored on different {what}: {len(first_keys):,} and {len(other_keys):,}, "
        f"with {len(first_keys & other_keys):,} in common. Therefore these scores are not "
        "compared. Score both runs with one configuration: `toque evaluate RUN my.yaml`."
    )
    return None


def _compare_measures(
    first: TextTable, other: TextTable, left_out: str
) -> Iterator[ScoreDifference]:
    for name, ours in first.measures.items():
        theirs = other.measures.get(name)
        if (
            theirs is None
            or name == left_out
            or ours.values.shape != theirs.values.shape
        ):
            continue
        interval = subtract_scores(theirs, ours)
        if interval is None:
            continue
        both = (ours.applies & theirs.applies)[:, None]
        first_score, other_score = (
            float(m.score((m.values * both).sum(axis=0))) for m in (ours, theirs)
        )
        yield ScoreDifference(name, first_score, other_score, interval)


def _join(differences: Sequence[ScoreDifference], *, worse: bool = False) -> str:
    return " and ".join(d.in_words(worse=worse) for d in differences)


def _title(measure: str) -> str:
    return "held-out loss" if measure == "loss" else metric_named(measure).title
