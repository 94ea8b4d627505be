"""Comparison of runs: tables, a conclusion, a JSON record, and a page with curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
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
from toque.reports.figures import MAX_OVERLAID, plot_all_learning, plot_curves
from toque.reports.page import (
    Figures,
    Grid,
    Page,
    PageHead,
    Part,
    Section,
    Sentence,
    format_columns,
    format_value,
)
from toque.runs.metric_names import (
    LOSSES,
    PAIR_LOSS,
    SUMMARY_SCORES,
    metric_named,
    name_pair_loss,
)
from toque.runs.run_record import COUNTS, RunRecord
from toque.runs.run_state import state_of
from toque.version import __version__

METHOD: Final = (
    "A difference is the score of the other run minus the score of the first run, over the same "
    f"held-out texts. With {MIN_TEXTS} texts or more, it has the 95 % interval of a paired "
    "bootstrap, and * if the interval excludes zero. The interval covers the choice of texts, not "
    "the seed: `toque ablate` compares settings over several seeds."
)
_LOSSES: Final = ("loss", "bits_per_byte")
"""Metrics of imitation. They do not rank runs with other objectives."""
_IMITATION: Final = "sft"
_PRIMARY: Final = (*_LOSSES, *SUMMARY_SCORES)
"""Metrics that decide which run is better."""
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
    def objective(self) -> str:
        """Value of objective.kind."""
        return self.settings.get("objective.kind", _IMITATION)

    @property
    def imitates(self) -> bool:
        """True if the run minimises the held-out loss."""
        return self.objective == _IMITATION

    @property
    def named_scores(self) -> dict[str, float]:
        """Final scores, with the name `pair_loss` for a loss of pairs."""
        return name_pair_loss(self.scores)

    @property
    def lowest_losses(self) -> dict[str, tuple[float, int]]:
        """Lowest held-out loss during training and its step, by the name of the loss."""
        history = self.record.history
        name = PAIR_LOSS if history.measure == PAIR_LOSS else "loss"
        return {} if history.best is None else {name: history.best}

    @property
    def loss(self) -> float | None:
        """Held-out loss per token of the finished model, otherwise of the best evaluation."""
        lowest, _ = self.lowest_losses.get("loss", (None, 0))
        return self.named_scores.get("loss", lowest)

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
    """Difference in a metric between the first run and another."""

    measure: str
    first: float
    other: float
    interval: Interval

    @property
    def other_is_better(self) -> bool | None:
        """True if the first run is worse, or None if the interval includes zero."""
        if not self.interval.decided:
            return None
        other_is_lower = self.interval.mean < 0
        return other_is_lower == self.lower_is_better

    @property
    def lower_is_better(self) -> bool:
        """True if lower values of the metric are better."""
        return metric_named(self.measure).better == "lower"

    def record(self) -> dict[str, Any]:
        """Return the difference as JSON values."""
        names = {True: "other", False: "first", None: None}
        return {
            "first": self.first,
            "other": self.other,
            **asdict(self.interval),
            "decided": self.interval.decided,
            "better": names[self.other_is_better],
        }

    def row(self) -> tuple[str, ...]:
        """Return the difference as a row of a table."""
        interval = self.interval
        low, high = interval.low, interval.high
        has_interval = low is not None and high is not None
        marks = {True: "* better", False: "* worse", None: ""}
        return (
            _title(self.measure),
            format_value(self.first),
            format_value(self.other),
            f"{interval.mean:+.4f}",
            f"{low:+.4f} to {high:+.4f}" if has_interval else _NONE,
            f"{interval.pairs:,}",
            marks[self.other_is_better],
        )

    def describe(self, *, worse: bool = False) -> str:
        """Describe the difference and its interval, for the better run or the worse one."""
        interval = self.interval
        low, high = interval.low, interval.high
        name = _title(self.measure)
        texts = f"{interval.pairs:,} {'text' if interval.pairs == 1 else 'texts'}"
        difference = f"{name} differs by {interval.mean:+.4f}"
        if low is None or high is None:
            return f"{difference} ({texts}, too few for an interval)"
        if not interval.decided:
            return f"{difference} ({low:+.4f} to {high:+.4f}, {texts})"
        direction = "lower" if self.lower_is_better != worse else "higher"
        smallest, largest = sorted((abs(low), abs(high)))
        size = abs(interval.mean)
        return (
            f"{name} {size:.4f} {direction} ({smallest:.4f} to {largest:.4f}, {texts})"
        )


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
                lines += [grid.title, *format_columns(grid), ""]
        if not self._differing_settings():
            lines.append("All settings are the same.")
        lines += [*self.all_notes, METHOD, "", self.sentence]
        lines.append(f"The page with curves is {self.page}.")
        return "\n".join(lines)

    @property
    def record(self) -> dict[str, Any]:
        """All numbers as JSON values."""
        return {
            "runs": {
                name: {
                    "folder": run.record.place.address,
                    "state": state_of(run.record).kind,
                    "scores": run.named_scores,
                    "cost": run.cost(),
                }
                for name, run in self.runs.items()
            },
            "settings": self._differing_settings(),
            "differences": {
                other: {d.measure: d.record() for d in differences}
                for other, differences in self.differences.items()
            },
            "notes": self.all_notes,
            "toque": __version__,
            "sentence": self.sentence,
            "method": METHOD,
        }

    @property
    def all_notes(self) -> list[str]:
        """`notes`, and a message about objectives other than imitation."""
        runs = self.runs.items()
        if all(run.imitates for _, run in runs):
            return list(self.notes)
        objectives = ", ".join(f"{run.objective} ({name})" for name, run in runs)
        note = (
            f"Objectives: {objectives}. The held-out loss and bits per byte measure imitation, so "
            "they decide only between runs with the objective sft."
        )
        return [*self.notes, note]

    @property
    def sentence(self) -> str:
        """Conclusion: the better run and its lead, or that the difference is not significant."""
        return " ".join(map(self._conclude, self.differences))

    def html_page(self) -> Page:
        """Build the page of the comparison."""
        histories = {name: run.record.history for name, run in self.runs.items()}
        curves: list[Part] = [
            Sentence(f"{name}: {state_of(run.record).sentence}", "soft")
            for name, run in self.runs.items()
        ]
        curves += plot_all_learning(histories)
        if len(histories) > MAX_OVERLAID:
            curves.append(
                Sentence(f"The curves show the first {MAX_OVERLAID} runs.", "soft")
            )
        curves.append(Figures(plot_curves(histories)))
        names = list(self.runs)
        title = " and ".join(names) if len(names) == 2 else f"{len(names)} runs"
        sections = (
            Section("notes", "", [Sentence(note, "warn") for note in self.all_notes]),
            Section("tables", "", [*self._grids()]),
            Section("method", "", [Sentence(METHOD, "soft")]),
            Section("curves", "Curves of all runs", curves),
        )
        return Page(PageHead("Comparison", title, self.sentence), sections)

    def _differing_settings(self) -> dict[str, dict[str, str]]:
        """Return the settings that differ between runs, with "-" for a run without the setting.

        The run folder is left out, because it always differs.
        """
        different = {}
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
        """Yield the tables of settings, differences, other scores and cost."""
        names = list(self.runs)
        settings = [
            (name, *values.values())
            for name, values in self._differing_settings().items()
        ]
        yield Grid(("setting", *names), settings, title="Settings that differ")

        for other, differences in self.differences.items():
            heads = (
                "measure",
                names[0],
                other,
                "difference",
                "95 % interval",
                "over",
                "",
            )
            rows = [difference.row() for difference in differences]
            yield Grid(heads, rows, title=f"{other} against {names[0]}")

        title = "Other final scores, each run on its own texts"
        yield Grid(("", *names), self._other_score_rows(), title=title)
        yield Grid(("", *names), self._cost_rows(), title="Cost")

    def _other_score_rows(self) -> list[tuple[str, ...]]:
        """Return the final scores that at least one table of differences does not contain."""
        runs = self.runs.values()
        compared = [{d.measure for d in ds} for ds in self.differences.values()]
        in_all_tables = set.intersection(*compared) if compared else set()
        hidden = COUNTS.union(in_all_tables)
        rows = []
        scores = [run.named_scores for run in runs]
        for name in dict.fromkeys(chain.from_iterable(scores)):
            if name not in hidden:
                values = [run_scores.get(name, _NONE) for run_scores in scores]
                rows.append((_title(name), *map(format_value, values)))

        lowest = [run.lowest_losses for run in runs]
        for name in LOSSES:
            if any(name in losses for losses in lowest):
                cells = [
                    "{:.4f} at step {:,}".format(*losses[name])
                    if name in losses
                    else _NONE
                    for losses in lowest
                ]
                rows.append((f"lowest {_title(name)}", *cells))
        return rows

    def _cost_rows(self) -> list[tuple[str, ...]]:
        states = [state_of(run.record).kind for run in self.runs.values()]
        rows = [("state", *states)]
        costs = [run.cost() for run in self.runs.values()]
        for label, name, format_cost in _COSTS:
            values = [cost[name] for cost in costs]
            cells = [_NONE if value is None else format_cost(value) for value in values]
            rows.append((label, *cells))
        return rows

    def _conclude(self, other: str) -> str:
        """Compare a run with the first one by the primary metrics."""
        first = next(iter(self.runs))
        by_name = {d.measure: d for d in self.differences[other]}
        imitate = self.runs[first].imitates and self.runs[other].imitates
        measures = _PRIMARY if imitate else SUMMARY_SCORES
        primary = [by_name[name] for name in measures if name in by_name]
        if not primary and by_name:
            return (
                f"{other} and {first} are not ranked, because they do not both have the objective "
                "sft, and they have no recipe scores."
            )
        if not primary:
            return (
                f"{other} and {first} cannot be compared, because they have no scores over the "
                f"same held-out texts.{self._compare_losses(first, other)}"
            )

        text = _describe_better_run(first, other, primary)
        first_seconds = self.runs[first].record.history.progress.seconds
        other_seconds = self.runs[other].record.history.progress.seconds
        if first_seconds and other_seconds:
            ratio = other_seconds / first_seconds
            text += f" {other} took {ratio:.2f} times the training time of {first}."
        if by_name.keys().isdisjoint(_LOSSES):
            text += self._compare_losses(first, other)
        return text

    def _compare_losses(self, first: str, other: str) -> str:
        """Compare the held-out losses of two runs on different texts."""
        first_loss = self.runs[first].loss
        other_loss = self.runs[other].loss
        if first_loss is None or other_loss is None:
            return ""
        return (
            f" The held-out loss of {other} is {other_loss:.4f} and of {first} {first_loss:.4f} "
            f"({other_loss - first_loss:+.4f}), each on its own texts and without an interval."
        )


def _describe_better_run(
    first: str, other: str, primary: Sequence[ScoreDifference]
) -> str:
    """Conclude which run is better by the primary metrics, or that neither is."""
    for_other = [d for d in primary if d.other_is_better is True]
    for_first = [d for d in primary if d.other_is_better is False]
    undecided = [d for d in primary if d.other_is_better is None]
    if for_other and for_first:
        return (
            f"{other} is better than {first} by {_join(for_other)}, and worse by "
            f"{_join(for_first, worse=True)}."
        )
    if not for_other and not for_first:
        return f"{other} and {first} do not differ significantly: {_join(undecided)}."

    better, worse = (other, first) if for_other else (first, other)
    text = f"{better} is better than {worse}: {_join(for_other or for_first)}."
    if undecided:
        text += f" Not significant: {_join(undecided)}."
    return text


def compare_scores(
    first: ByText, other: ByText
) -> tuple[list[ScoreDifference], list[str]]:
    """Compare the metrics that both runs have for the same texts.

    Also return notes about scores that could not be compared.
    """
    notes: list[str] = []
    examples = _match_or_note(
        first.examples, other.examples, "held-out examples", notes
    )
    texts = _match_or_note(
        first.texts, other.texts, "prompts of generated texts", notes
    )
    differences: list[ScoreDifference] = []
    if examples is not None:
        redundant = "bits_per_byte"  # they give the same order as the loss
        if _have_other_weights(*examples):
            # Losses per token of different tokenizers cannot be compared, but bits per byte can.
            redundant = "loss"
            notes.append(
                "The runs count tokens or weight examples differently, so bits per byte are "
                "compared instead of the loss per token."
            )
        differences += _compare_measures(*examples, left_out=redundant)
    if texts is not None:
        differences += _compare_measures(*texts)
    order = {name: position for position, name in enumerate(_PRIMARY)}
    return sorted(differences, key=lambda d: order.get(d.measure, len(order))), notes


def _have_other_weights(first: TextTable, other: TextTable) -> bool:
    """Check whether the same examples have different weights in the losses of two runs."""
    first_loss = first.measures.get("loss")
    other_loss = other.measures.get("loss")
    if first_loss is None or other_loss is None:
        return False
    return bool((first_loss.values[:, 1] != other_loss.values[:, 1]).any())


def _match_or_note(
    first: TextTable, other: TextTable, texts_name: str, notes: list[str]
) -> tuple[TextTable, TextTable] | None:
    """Put both tables in the same order. If their texts differ, add a note and return None."""
    if not first.keys and not other.keys:
        return None
    first_keys = set(first.keys)
    other_keys = set(other.keys)
    if first_keys == other_keys:
        # A text that is held out twice counts once.
        is_unique = len(first_keys) == len(first.keys) == len(other.keys)
        keys = first.keys if is_unique else sorted(first_keys)
        return first.select(keys), other.select(keys)
    notes.append(
        f"The runs were scored on different {texts_name}: {len(first_keys):,} and "
        f"{len(other_keys):,}, with {len(first_keys & other_keys):,} in common. Therefore these "
        "scores are not compared. Score both runs with one configuration: "
        "`toque evaluate RUN my.yaml`."
    )
    return None


def _compare_measures(
    first: TextTable, other: TextTable, left_out: str = ""
) -> Iterator[ScoreDifference]:
    """Compare the measures that both tables have, without the measure `left_out`."""
    for name, first_measure in first.measures.items():
        other_measure = other.measures.get(name)
        if other_measure is None or name == left_out:
            continue
        if first_measure.values.shape != other_measure.values.shape:
            continue
        interval = subtract_scores(other_measure, first_measure)
        if interval is None:
            continue

        # Both scores are over the texts to which the measure applies in both runs.
        is_compared = first_measure.applies & other_measure.applies
        first_score = first_measure.score_of(is_compared)
        other_score = other_measure.score_of(is_compared)
        yield ScoreDifference(name, first_score, other_score, interval)


def _join(differences: Sequence[ScoreDifference], *, worse: bool = False) -> str:
    return " and ".join(d.describe(worse=worse) for d in differences)


def _title(measure: str) -> str:
    title = metric_named(measure).title
    return f"held-out {title}" if measure in LOSSES else title
