"""Scores of a set of generated texts: every metric with its interval, overall and by slice.

Only numbers are stored per text, except for the user's metrics, which need the texts. If a task has
separate metrics, its answers are not scored with other texts.
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
from toque.config.user_code import ForeignCode, import_user_code
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
from toque.evaluation.bootstrap import (
    Estimate,
    Floats,
    PerText,
    estimate_scores,
    key_of_text,
)
from toque.evaluation.ngram_metrics import (
    MAX_PAIRS,
    U64,
    HashedTokens,
    bleu_counts,
    bleu_of,
    distinct_share,
    hash_ngrams,
    hash_words,
    repetition,
)
from toque.evaluation.rouge import NAMES as ROUGE_NAMES
from toque.evaluation.rouge import rouge_f1
from toque.evaluation.text_samples import Sample, metrics_of
from toque.runs.run_record import BITS, COUNTS, HELD_OUT, TASK_SCORES

_BY_TEXT: Final[Mapping[str, Callable[[str, str], float]]] = {
    "exact_match": exact_match,
    "accuracy": exact_match,  # the common name if the answers are classes
    "token_f1": token_f1,
}
_NAMES_OF: Final[Mapping[str, Sequence[str]]] = {
    "rouge": ROUGE_NAMES,
    "repetition": ("repetition", "distinct_1", "distinct_2"),
    "recipe": RECIPE_NAMES,
}
"""Score names of metrics that have several scores."""
NO_CLASS: Final = "no_class"
"""Name of a score: the fraction of answers that are not a class of the task."""
PART: Final = MAX_PAIRS // 4
"""Number of texts per step. Their hashes fit in a core's cache."""
MAX_SLICES: Final = 12
"""Maximum number of labels to report per slicing, the most frequent first."""

UserMetric = Callable[[Sequence[str], Sequence[str]], Any]
"""Function from predictions and references to one score, one score per text, or {name: score(s)}.

Scores per text have a confidence interval.
"""


def is_user_metric(metric: str) -> bool:
    """Check for the path of a user's function: "module:function"."""
    return ":" in metric


def score_names_of(metrics: Collection[str]) -> list[str]:
    """List the score names of Toque's metrics among `metrics`, e.g. three for "repetition"."""
    return [
        score_name
        for metric in groups_in(metrics)
        for score_name in _NAMES_OF.get(metric, (metric,))
    ]


@dataclass(frozen=True)
class Scores:
    """Scores of a set of texts, overall and by slice."""

    n_texts: int
    overall: Mapping[str, Estimate]
    slices: Mapping[str, Mapping[str, Mapping[str, Estimate]]]
    """Scores by slicing, label and name."""
    sizes: Mapping[str, Mapping[str, int]]
    """Number of texts by slicing and label."""
    failed: Mapping[str, str]
    """Error of each metric that raised one."""
    each: Mapping[str, PerText] = field(default_factory=dict)
    """Statistics per text, by score name."""
    keys: Sequence[str] = ()
    """Hash per text, see `key_of_text`."""

    @property
    def metrics(self) -> dict[str, float]:
        """Scores by name, without intervals."""
        return {name: e.value for name, e in self.overall.items()}

    def __str__(self) -> str:
        lines = [f"{self.n_texts} generated texts, with 95 % intervals:"]
        for name, e in self.overall.items():
            interval = f"   {e.low:.3f} to {e.high:.3f}" if e.low is not None else ""
            n_texts = f"   ({e.n} texts)" if e.n != self.n_texts else ""
            title = name.replace("_", " ")
            lines.append(f"  {title:26}{e.value:8.3f}{interval}{n_texts}")
        return "\n".join(lines)


@dataclass
class TextScores:
    """Accumulator of scores for generated texts."""

    groups: Sequence[str] = METRIC_GROUPS
    """Toque's metrics to compute."""
    user_metrics: Mapping[str, UserMetric] = field(default_factory=dict)
    """The user's metric functions, by import path."""
    classes: Sequence[str] = ()
    """Classes of the task, or () if its answers are free text."""
    reserved_names: Collection[str] = ()
    """Names that the user's scores cannot have."""

    @classmethod
    def from_names(
        cls,
        names: Sequence[str],
        foreign: ForeignCode,
        setting: str,
        classes: Sequence[str] = (),
        reserved_names: Collection[str] = (),
    ) -> Self:
        """Make an empty accumulator of the named metrics. Import the user's functions.

        Args:
            names: Names of Toque's metrics, and import paths of the user's functions.
            foreign: Untrusted code that must not be imported.
            setting: Setting with the names, for messages.
            classes: Classes of the task.
            reserved_names: Names that the user's scores cannot have.

        Raises:
            ConfigError: An import path is not a function.
        """
        purpose = "a function of the predictions and the references that returns {name: score}"
        user_metrics: dict[str, UserMetric] = {}
        for path in names:
            if not is_user_metric(path):
                continue
            function = import_user_code(foreign, path, setting=setting, kind=purpose)
            if not callable(function):
                raise ConfigError(
                    f"{path} in {setting} must be a function of predictions and references, not a "
                    f"{type(function).__name__}."
                )
            user_metrics[path] = function
        return cls(groups_in(names), user_metrics, classes, reserved_names)

    def __post_init__(self) -> None:
        self.n_texts = 0
        self._unscored: Counter[str] = Counter()
        """Number of texts without recipe scores, by error message."""
        self._keys: list[str] = []
        self._rows: dict[str, list[tuple[int, Floats]]] = defaultdict(list)
        """Statistics of consecutive parts of the texts, by score name. Each part has the index of
        its first text and a [texts, k] array.
        """
        self._labels: dict[str, list[str]] = defaultdict(list)
        """Label per text, by slicing."""
        self._texts: tuple[list[str], list[str]] = ([], [])
        """Predictions and references for the user's metrics."""
        orders = (1, 2) if "repetition" in self.groups else ()
        self._ngrams: dict[int, list[U64]] = {n: [] for n in orders}
        """Hashed n-grams of all texts, by n."""

    def add(self, samples: Iterable[Sample]) -> None:
        """Score these texts and add their statistics."""
        remaining = iter(samples)
        while part := list(islice(remaining, PART)):
            self._add_part(part)

    def _add_part(self, samples: Sequence[Sample]) -> None:
        """Add the statistics of at most `PART` texts."""
        first = self.n_texts
        self.n_texts += len(samples)
        self._keys += [key_of_text(s.prompt, s.reference or "") for s in samples]
        if "recipe" in self.groups:  # recipe scores come first in every table
            names = [name for sample in samples for name in sample.metrics]
            for name in dict.fromkeys(names):
                values = [sample.metrics.get(name, np.nan) for sample in samples]
                self._rows[name].append((first, np.array(values, float)[:, None]))
            self._unscored.update(sample.failed for sample in samples if sample.failed)

        for name, rows in self._score_texts(samples).items():
            self._rows[name].append((first, rows))
        for sample in samples:
            for slicing, label in sample.slices.items():
                self._labels[slicing].append(label)
            if self.user_metrics and sample.reference is not None:
                self._texts[0].append(sample.text)
                self._texts[1].append(sample.reference)

    def _score_texts(self, samples: Sequence[Sample]) -> dict[str, Floats]:
        """Compute the statistics of texts, [texts, k] per score.

        Scores that need a reference are NaN for texts without a reference.
        """
        texts = [sample.text for sample in samples]
        references = [sample.reference or "" for sample in samples]
        lacks_reference = np.array([sample.reference is None for sample in samples])
        columns: dict[str, Floats] = {}
        tokens = None
        if "bleu" in self.groups or self._ngrams:
            tokens = hash_words(texts)
        if not lacks_reference.all():
            columns = self._compare_texts(texts, references, tokens)
        for rows in columns.values():
            rows[lacks_reference] = np.nan

        if self._ngrams and tokens is not None:
            columns["repetition"] = repetition(tokens)[:, None]
            for n, parts in self._ngrams.items():
                parts.append(hash_ngrams(tokens, n)[0])
        if "valid_json" in self.groups:
            columns["valid_json"] = np.array([[valid_json(text)] for text in texts])
        if self.classes:
            is_no_class = [[text.strip() not in self.classes] for text in texts]
            columns[NO_CLASS] = np.array(is_no_class, float)
        return columns

    def _compare_texts(
        self,
        texts: Sequence[str],
        references: Sequence[str],
        tokens: HashedTokens | None,
    ) -> dict[str, Floats]:
        """Compute the scores that compare texts with references, [texts, k] each."""
        columns: dict[str, Floats] = {}
        if "rouge" in self.groups:
            scores = rouge_f1(texts, references)
            columns |= {name: scores[:, [i]] for i, name in enumerate(ROUGE_NAMES)}
        if "bleu" in self.groups and tokens is not None:
            columns["bleu"] = bleu_counts(tokens, hash_words(references))
        for name, metric in _BY_TEXT.items():
            if name in self.groups:
                pairs = zip(texts, references, strict=True)
                columns[name] = np.array([[metric(*pair)] for pair in pairs])
        if "macro_f1" in self.groups:
            columns["macro_f1"] = class_counts(texts, references, self.classes)
        return columns

    def result(self, *, resamples: int = 1000) -> Scores:
        """Compute the scores of all texts so far.

        A user's metric that raises an error is left out, and its error is in `Scores.failed`.
        """
        measures = {name: self._join(name, rows) for name, rows in self._rows.items()}
        # Distinct n-grams have no interval, because a resample has fewer of them.
        totals = {
            f"distinct_{n}": Estimate(share, None, None, self.n_texts)
            for n, parts in self._ngrams.items()
            if (share := distinct_share(parts)) is not None
        }
        failed = self._call_user_metrics(measures, totals)
        if self._unscored:
            failed["recipe"] = self._describe_unscored()

        rows = {slicing: _rows_by_label(tags) for slicing, tags in self._labels.items()}
        sizes = {
            slicing: {label: len(chosen) for label, chosen in by_label.items()}
            for slicing, by_label in rows.items()
        }
        return Scores(
            n_texts=self.n_texts,
            overall=estimate_scores(measures, resamples=resamples) | totals,
            slices=_score_slices(measures, rows, resamples=resamples),
            sizes=sizes,
            failed=failed,
            each=measures,
            keys=self._keys,
        )

    def _describe_unscored(self) -> str:
        """Describe the texts without recipe scores, with the reasons."""
        counts = self._unscored.most_common()
        reasons = "; ".join(f"{n} {reason}" for reason, n in counts)
        return f"left out {self._unscored.total()} of {self.n_texts} texts: {reasons}"

    def _join(self, name: str, parts: Sequence[tuple[int, Floats]]) -> PerText:
        """Join the parts of a score. The score does not apply to texts of a missing part."""
        rows = np.full((self.n_texts, parts[0][1].shape[1]), np.nan)
        for first, part in parts:
            rows[first : first + len(part)] = part
        # A user's score may have one of these names if Toque does not compute it.
        of_sums = {"bleu": bleu_of, "macro_f1": macro_f1_of}
        if name not in of_sums or name not in self.groups:
            return PerText.mean(rows[:, 0])
        applies = ~np.isnan(rows[:, 0])
        return PerText(np.nan_to_num(rows), of_sums[name], applies)

    def _call_user_metrics(
        self, measures: dict[str, PerText], totals: dict[str, Estimate]
    ) -> dict[str, str]:
        """Add the scores of the user's metrics. Return the error of each metric that raised one."""
        failed: dict[str, str] = {}
        if self.n_texts == 0:
            return failed
        for path, metric in self.user_metrics.items():
            try:
                self._add_user_scores(path, metric, measures, totals)
            except Exception as error:  # noqa: BLE001  # the user's code may raise any error
                message = f"{type(error).__name__}: {error}"
                failed[path] = message.splitlines()[0]
        return failed

    def _add_user_scores(
        self,
        path: str,
        metric: UserMetric,
        measures: dict[str, PerText],
        totals: dict[str, Estimate],
    ) -> None:
        """Call a user's metric. Add scores per text to `measures`, and other scores to `totals`.

        Raises:
            ValueError: A score has the wrong shape, a reserved name or no valid number.
        """
        result = metric(*map(list, self._texts))  # copies, which the metric may change
        if not isinstance(result, Mapping):
            result = {path.rpartition(":")[2]: result}
        scores = {name: np.asarray(value, float) for name, value in result.items()}
        n = len(self._texts[0])
        used_names = {*measures, *totals, *self.reserved_names}
        for name, values in scores.items():
            _check_user_score(name, values, n, is_used=name in used_names)
        for name, values in scores.items():
            # Texts without a reference have no score, so the scores do not match the texts.
            if values.shape == () or n != self.n_texts:
                totals[name] = Estimate(float(values.mean()), None, None, n)
            else:
                measures[name] = PerText.mean(values)


def _check_user_score(name: str, values: np.ndarray, n: int, *, is_used: bool) -> None:
    """Check the score of a user's metric for `n` texts.

    Raises:
        ValueError: It has the wrong shape, a used name or no valid number.
    """
    if values.shape not in {(), (n,)}:
        raise ValueError(
            f"{name} must be one number or {n} numbers, not an array of shape "
            f"{values.shape}"
        )
    if is_used:
        raise ValueError(f"the name {name} is taken; give the score another name")
    # NaN for a text means that the metric does not apply to it.
    if np.isinf(values).any() or np.isnan(values).all():
        raise ValueError(f"{name} is infinite, or NaN for every text")


def groups_in(names: Collection[str]) -> list[str]:
    """List Toque's metrics among `names` in a fixed order. "auto" means the default metrics."""
    defaults = METRIC_GROUPS if "auto" in names else ()
    requested = {*names, *defaults}
    return [name for name in (*ANY_TEXTS, *OF_CLASSES) if name in requested]


@dataclass(frozen=True)
class ScoresByTask:
    """Accumulators of scores: one for each task with separate metrics, and one for other texts."""

    parts: Mapping[str, TextScores]
    """Accumulator by task name. The name "" is for other texts."""

    @classmethod
    def from_settings(
        cls, evaluation: EvaluationConfig, data: DataConfig, foreign: ForeignCode
    ) -> Self:
        """Make empty accumulators of the configured metrics. Import the user's functions."""
        metrics = ("auto",) if evaluation.metrics == "auto" else evaluation.metrics
        task_names = {f"{task}_{score}" for task in data.tasks for score in TASK_SCORES}
        reserved_names = {*HELD_OUT, BITS, *COUNTS, *task_names}
        common = TextScores.from_names(
            metrics, foreign, "evaluation.metrics", reserved_names=reserved_names
        )
        parts = {"": common}
        table = task_table(data)
        for name in data.tasks:
            if names := metrics_of(table[name]):
                setting = f"data.tasks.{name}.metrics"
                classes = tuple(map(str.strip, table[name].classes))
                parts[name] = TextScores.from_names(
                    names, foreign, setting, classes, TASK_SCORES
                )
        return cls(parts)

    def add(self, samples: Sequence[Sample]) -> None:
        """Score these texts and add their statistics."""
        for name, part in self.parts.items():
            part.add(sample for sample in samples if sample.task == name)

    def result(self, *, resamples: int = 1000) -> Scores:
        """Compute the scores of all texts so far, as `TextScores.result` does.

        A task's scores are named TASK_SCORE.
        """
        results = {
            f"{task}_" if task else "": part.result(resamples=resamples)
            for task, part in self.parts.items()
            if part.n_texts or not task
        }
        total = sum(scores.n_texts for scores in results.values())
        overall: dict[str, Estimate] = {}
        failed: dict[str, str] = {}
        each: dict[str, PerText] = {}
        keys: list[str] = []
        for prefix, scores in results.items():
            for name, estimate in scores.overall.items():
                overall[f"{prefix}{name}"] = estimate
            for name, error in scores.failed.items():
                failed[f"{prefix}{name}"] = error
            for name, measure in scores.each.items():
                each[f"{prefix}{name}"] = measure.pad(len(keys), total)
            keys += scores.keys
        return replace(
            results[""],
            n_texts=total,
            overall=overall,
            failed=failed,
            each=each,
            keys=keys,
        )


def _score_slices(
    measures: Mapping[str, PerText],
    rows: Mapping[str, Mapping[str, np.ndarray]],
    *,
    resamples: int,
) -> dict[str, dict[str, dict[str, Estimate]]]:
    """Estimate the scores by slicing, label and name, from the rows by slicing and label."""
    return {
        slicing: {
            label: estimate_scores(measures, chosen, resamples=resamples)
            for label, chosen in by_label.items()
        }
        for slicing, by_label in rows.items()
    }


def _rows_by_label(labels: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the rows of the most frequent labels, sorted by label."""
    names, label, counts = np.unique(
        np.array(labels), return_inverse=True, return_counts=True
    )
    frequent = sorted(np.argsort(-counts, kind="stable")[:MAX_SLICES].tolist())
    return {str(names[i]): np.flatnonzero(label == i) for i in frequent}
