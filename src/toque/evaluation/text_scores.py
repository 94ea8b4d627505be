"""Scores of a set of generated texts: every metric with its interval, overall and by slice.

Numbers are kept of each text; the texts themselves only for the user's own metrics. The answers to
a task with metrics of its own are scored apart from all other texts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final, Self

import numpy as np

from toque.config.field_types import ANY_TEXTS, METRIC_GROUPS, OF_CLASSES
from toque.config.schema import DataConfig, EvaluationConfig
from toque.config.user_code import ForeignCode, imported
from toque.cooking.prompts import task_table
from toque.cooking.recipe_scores import NAMES as RECIPE_NAMES
from toque.errors import ConfigError
from toque.evaluation.answer_scores import (
    class_counts,
    exact_match,
    macro_f1_of,
    token_f1,
    valid_json,
)
from toque.evaluation.bootstrap import Estimate, Floats, PerText, estimates, key_of_text
from toque.evaluation.ngram_metrics import (
    MAX_PAIRS,
    U64,
    bleu_counts,
    bleu_of,
    distinct,
    hash_ngrams,
    repetition,
    words,
)
from toque.evaluation.rouge import NAMES as ROUGE_NAMES
from toque.evaluation.rouge import rouge_f1
from toque.evaluation.text_samples import Sample, metrics_of
from toque.runs.run_record import BITS, COUNTS, HELD_OUT, TASK_SCORES

_BY_TEXT: Final[Mapping[str, Callable[[str, str], float]]] = {
    "exact_match": exact_match,
    "accuracy": exact_match,  # the usual name where answers are classes
    "token_f1": token_f1,
}
_NAMES_OF: Final[Mapping[str, Sequence[str]]] = {
    "rouge": ROUGE_NAMES,
    "repetition": ("repetition", "distinct_1", "distinct_2"),
    "recipe": RECIPE_NAMES,
}  # of metrics that give several scores
NO_CLASS: Final = "no_class"  # share of the answers that are none of a task's classes
PART: Final = MAX_PAIRS // 4  # texts scored at once: few enough to stay in a core's cache
MOST_SLICES: Final = 12  # most labels of a slicing that are reported; the most frequent ones are

UserMetric = Callable[[Sequence[str], Sequence[str]], Any]
"""(predictions, references) -> {name: one score, or one per text}, or what stands under a name."""


def names_in(metrics: Collection[str]) -> list[str]:
    """The names of the scores that metrics included in Toque give."""
    return [name for m in metrics if ":" not in m for name in _NAMES_OF.get(m, (m,))]


@dataclass(frozen=True)
class Scores:
    """Scores of a set of texts."""

    n_texts: int
    overall: Mapping[str, Estimate]
    slices: Mapping[str, Mapping[str, Mapping[str, Estimate]]]  # slicing -> label -> name
    sizes: Mapping[str, Mapping[str, int]]  # number of texts: slicing -> label -> texts
    failed: Mapping[str, str]  # metrics that raised, each with its error
    each: Mapping[str, PerText] = field(default_factory=dict)  # the sums of each score, by name
    keys: Sequence[str] = ()  # of each text, the same in another run; see `key_of_text`

    @property
    def metrics(self) -> dict[str, float]:
        """Every score by its name, without intervals."""
        return {name: e.value for name, e in self.overall.items()}

    def __str__(self) -> str:
        """The table for people."""
        lines = [f"{self.n_texts} written texts, with 95 % intervals:"]
        for name, e in self.overall.items():
            ends = f"   {e.low:.3f} to {e.high:.3f}" if e.low is not None else ""
            some = f"   ({e.n} texts)" if e.n != self.n_texts else ""
            lines.append(f"  {name.replace('_', ' '):26}{e.value:8.3f}{ends}{some}")
        return "\n".join(lines)


@dataclass
class TextScores:
    """Accumulates scores of texts: of groups, and of the user's functions by dotted path."""

    groups: Sequence[str] = METRIC_GROUPS
    user_metrics: Mapping[str, UserMetric] = field(default_factory=dict)
    classes: Sequence[str] = ()
    taken: Collection[str] = ()
    """Names of scores of held-out examples, which a user's metric cannot give to its own."""

    @classmethod
    def named(
        cls,
        names: Sequence[str],
        foreign: ForeignCode,
        setting: str,
        classes: Sequence[str] = (),
        taken: Collection[str] = (),
    ) -> Self:
        """An empty collection of the metrics that a setting names; functions are imported."""
        groups = groups_in(names)
        wanted = "a function of the predictions and the references that returns {name: score}"
        own: dict[str, UserMetric] = {}
        for path in names:
            if ":" not in path:
                continue
            found = imported(foreign, path, setting=setting, wanted=wanted)
            if not callable(found):
                raise ConfigError(
                    f"{setting} names {path}, which is a {type(found).__name__} and no "
                    "function of predictions and references."
                )
            own[path] = found
        return cls(groups, own, classes, taken)

    def __post_init__(self) -> None:
        self.n_texts = 0
        self.failed: dict[str, str] = {}
        self._unscored: Counter[str] = Counter()
        self._keys: list[str] = []
        self._rows: dict[str, list[tuple[int, Floats]]] = defaultdict(list)
        self._labels: dict[str, list[str]] = defaultdict(list)
        self._texts: tuple[list[str], list[str]] = ([], [])
        self._grams: dict[int, list[U64]] = {1: [], 2: []} if "repetition" in self.groups else {}

    def add(self, samples: Iterable[Sample]) -> None:
        """Add the scores of these texts."""
        remaining = iter(samples)
        while part := list(islice(remaining, PART)):
            self._add_part(part)

    def _add_part(self, samples: Sequence[Sample]) -> None:
        texts = [sample.text for sample in samples]
        self._keys += [key_of_text(s.prompt, s.reference or "") for s in samples]
        before, self.n_texts = self.n_texts, self.n_texts + len(samples)
        if "recipe" in self.groups:  # the domain's scores come first in every table
            for name in dict.fromkeys(name for sample in samples for name in sample.metrics):
                values = [sample.metrics.get(name, np.nan) for sample in samples]
                self._rows[name].append((before, np.array(values, float)[:, None]))
            self._unscored.update(sample.failed for sample in samples if sample.failed)
        for name, rows in self._columns(texts, [sample.reference for sample in samples]).items():
            self._rows[name].append((before, rows))
        for sample in samples:
            for slicing, label in sample.slices.items():
                self._labels[slicing].append(label)
        if self.user_metrics:
            both = [(s.text, s.reference) for s in samples if s.reference is not None]
            self._texts[0].extend(text for text, _ in both)
            self._texts[1].extend(reference for _, reference in both)

    def _columns(self, texts: Sequence[str], references: Sequence[str | None]) -> dict[str, Floats]:
        """Text metrics, [texts, k] each; NaN for a text without the reference a metric needs."""
        missing = np.array([reference is None for reference in references])
        theirs = [reference or "" for reference in references]
        found: dict[str, Floats] = {}
        cut = words(texts) if {"bleu", "repetition"} & set(self.groups) else None
        if "rouge" in self.groups:
            scored = rouge_f1(texts, theirs)
            found |= {name: scored[:, [i]] for i, name in enumerate(ROUGE_NAMES)}
        if "bleu" in self.groups and cut is not None:
            found["bleu"] = bleu_counts(cut, words(theirs))
        for name, of in _BY_TEXT.items():
            if name in self.groups:
                found[name] = np.array([[of(*both)] for both in zip(texts, theirs, strict=True)])
        if "macro_f1" in self.groups:
            found["macro_f1"] = class_counts(texts, theirs, self.classes)
        for rows in found.values():
            rows[missing] = np.nan
        if missing.all():
            found = {}
        if self._grams and cut is not None:
            found["repetition"] = repetition(cut)[:, None]
            for n, parts in self._grams.items():
                parts.append(hash_ngrams(cut, n)[0])
        if "valid_json" in self.groups:
            found["valid_json"] = np.array([[valid_json(text)] for text in texts])
        if self.classes:
            none = [[float(text.strip() not in self.classes)] for text in texts]
            found[NO_CLASS] = np.array(none)
        return found

    def result(self, *, resamples: int = 1000) -> Scores:
        """Scores of all texts so far; a user's metric that raises is left out, with its error."""
        measures = {name: self._measure(name, rows) for name, rows in self._rows.items()}
        totals = {  # without an interval: resampling a set of texts only lowers it
            f"distinct_{n}": Estimate(score, None, None, self.n_texts)
            for n, parts in self._grams.items()
            if (score := distinct(parts)) is not None
        }
        for path, metric in self.user_metrics.items() if self.n_texts else ():
            try:
                self._call(path, metric, measures, totals)
            except Exception as error:  # noqa: BLE001  # whatever a user's function may raise
                self.failed[path] = f"{type(error).__name__}: {error}".splitlines()[0]
        overall = estimates(measures, resamples=resamples) | totals
        slices: dict[str, dict[str, dict[str, Estimate]]] = {}
        sizes: dict[str, dict[str, int]] = {}
        for slicing, labels in self._labels.items():
            rows = _rows_of(labels)
            sizes[slicing] = {label: len(own) for label, own in rows.items()}
            slices[slicing] = {
                label: estimates(measures, own, resamples=resamples) for label, own in rows.items()
            }
        if n := self._unscored.total():
            reasons = "; ".join(f"{n} {reason}" for reason, n in self._unscored.most_common())
            self.failed["recipe"] = f"left out {n} of {self.n_texts} texts: {reasons}"
        return Scores(self.n_texts, overall, slices, sizes, self.failed, measures, self._keys)

    def _measure(self, name: str, parts: Sequence[tuple[int, Floats]]) -> PerText:
        rows = np.full((self.n_texts, parts[0][1].shape[1]), np.nan)
        for first, part in parts:  # a part whose texts have no such score is missing
            rows[first : first + len(part)] = part
        of_sums = {"bleu": bleu_of, "macro_f1": macro_f1_of}
        if name not in of_sums or name not in self.groups:
            return PerText.mean(rows[:, 0])
        applies = ~np.isnan(rows[:, 0])
        return PerText(np.nan_to_num(rows), of_sums[name], applies)

    def _call(
        self,
        path: str,
        metric: UserMetric,
        measures: dict[str, PerText],
        totals: dict[str, Estimate],
    ) -> None:
        """Add a user's scores: a number for all texts, or a number for each."""
        given = metric(*map(list, self._texts))  # copies, which it may change
        if not isinstance(given, Mapping):
            given = {path.rpartition(":")[2]: given}
        found = {name: np.asarray(v, float) for name, v in given.items()}
        n = len(self._texts[0])
        for name, values in found.items():
            if values.shape not in {(), (n,)}:
                raise ValueError(f"{name} is of shape {values.shape}, not a number or {n} of them")
            if name in measures or name in totals or name in self.taken:
                raise ValueError(f"the name {name} is taken; give the score another")
            # NaN in a number for each text says that it does not apply to that text.
            if np.isinf(values).any() or np.isnan(values).all():
                raise ValueError(f"{name} holds infinity, or NaN for every text")
        for name, values in found.items():
            if values.shape == () or n != self.n_texts:
                totals[name] = Estimate(float(values.mean()), None, None, n)
            else:
                measures[name] = PerText.mean(values)


def groups_in(names: Collection[str]) -> list[str]:
    """The metrics included in Toque that are named, or stand under auto, in one order."""
    usual = METRIC_GROUPS if "auto" in names else ()
    return [name for name in (*ANY_TEXTS, *OF_CLASSES) if name in names or name in usual]


@dataclass(frozen=True)
class ScoresByTask:
    """Accumulates scores of texts, those of each task with metrics of its own by themselves."""

    parts: Mapping[str, TextScores]  # by the name of the task; "" for all other texts

    @classmethod
    def from_settings(
        cls, evaluation: EvaluationConfig, data: DataConfig, foreign: ForeignCode
    ) -> Self:
        """An empty collection of what a configuration names; functions are imported."""
        asked = ("auto",) if evaluation.metrics == "auto" else evaluation.metrics
        taken = {*HELD_OUT, BITS, *COUNTS, *(f"{t}_{s}" for t in data.tasks for s in TASK_SCORES)}
        parts = {"": TextScores.named(asked, foreign, "evaluation.metrics", taken=taken)}
        table = task_table(data)
        for name in data.tasks:
            if names := metrics_of(table[name]):
                setting, classes = f"data.tasks.{name}.metrics", table[name].classes
                classes = tuple(map(str.strip, classes))
                parts[name] = TextScores.named(names, foreign, setting, classes, TASK_SCORES)
        return cls(parts)

    def add(self, samples: Sequence[Sample]) -> None:
        """Add the scores of these texts."""
        for name, part in self.parts.items():
            part.add(sample for sample in samples if sample.task == name)

    def result(self, *, resamples: int = 1000) -> Scores:
        """Scores of all texts so far, a task's as NAME_SCORE; see `TextScores.result`."""
        found = {
            f"{task}_" if task else "": part.result(resamples=resamples)
            for task, part in self.parts.items()
            if part.n_texts or not task
        }
        common, total, before = found[""], sum(s.n_texts for s in found.values()), 0
        each: dict[str, PerText] = {}
        for task, scores in found.items():
            each |= {f"{task}{n}": m.among(before, total) for n, m in scores.each.items()}
            before += scores.n_texts
        return replace(
            common,
            n_texts=total,
            overall={
                f"{t}{n}": e for t, scores in found.items() for n, e in scores.overall.items()
            },
            failed={f"{t}{n}": why for t, s in found.items() for n, why in s.failed.items()},
            each=each,
            keys=[key for scores in found.values() for key in scores.keys],
        )


def _rows_of(labels: Sequence[str]) -> dict[str, np.ndarray]:
    """Rows of each label, the most frequent labels, in the order of their names."""
    names, which, counts = np.unique(np.array(labels), return_inverse=True, return_counts=True)
    kept = sorted(np.argsort(-counts, kind="stable")[:MOST_SLICES].tolist())
    return {str(names[i]): np.flatnonzero(which == i) for i in kept}
