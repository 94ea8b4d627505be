"""Confidence intervals of scores and differences by the percentile bootstrap (Efron 1979).

A score is a function of sums over texts, e.g. BLEU is a function of ten sums. Therefore a resample
is a row of integer weights, and one matmul computes all resamples of all scores. Resample b depends
only on b. A file stores the statistics of each text without its content, so that runs
can be compared text by text.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from toque.evaluation.answer_scores import macro_f1_of
from toque.evaluation.ngram_metrics import bleu_of
from toque.storage.json_files import decode_json

Floats = NDArray[np.float64]

RESAMPLES: Final = 1000
COVERAGE: Final = 0.95
SEED: Final = 17
MIN_TEXTS: Final = 10
"""Minimum number of texts for the interval of a difference. With fewer texts, bootstrap intervals
are too short.
"""
_RESAMPLES_PER_STEP: Final = 32


@dataclass(frozen=True)
class PerText:
    """Sufficient statistics of a metric per text. The score is a function of their sums."""

    values: Floats
    """[texts, k] Statistics of each text, 0 if the metric does not apply to the text."""
    score: Callable[[Floats], Floats]
    """Function from sums [..., k] to scores [...], with NaN for the sums of no text."""
    applies: NDArray[np.bool_]
    """[texts] True if the metric applies to the text."""

    @classmethod
    def mean(cls, values: Floats) -> PerText:
        """Make a metric that is a mean of [texts] values. NaN marks a text without a value."""
        return cls.ratio(values, (~np.isnan(values)).astype(float))

    @classmethod
    def ratio(cls, numerators: Floats, denominators: Floats) -> PerText:
        """Make a metric that is a ratio of sums. It does not apply if a denominator is 0."""
        applies = denominators > 0
        terms = np.stack([numerators, denominators], axis=1)
        values = np.where(applies[:, None], terms, 0.0)

        def quotient(sums: Floats) -> Floats:
            ratio: Floats = np.full(sums.shape[:-1], np.nan)
            np.divide(sums[..., 0], sums[..., 1], out=ratio, where=sums[..., 1] > 0)
            return ratio

        return cls(values, quotient, applies)

    def score_of(self, is_selected: NDArray[np.bool_]) -> float:
        """Return the score over the selected texts, [texts]."""
        totals = (self.values * is_selected[:, None]).sum(axis=0)
        return float(self.score(totals))

    def pad(self, start: int, total: int) -> PerText:
        """Place these texts at row `start` of `total` texts. The metric applies only to them."""
        rows = slice(start, start + len(self.values))
        values = np.zeros((total, self.values.shape[1]))
        applies = np.zeros(total, bool)
        values[rows] = self.values
        applies[rows] = self.applies
        return PerText(values, self.score, applies)

    @property
    def is_finite(self) -> NDArray[np.bool_]:
        """[texts] True if the metric applies to the text and is finite."""
        return self.applies & np.isfinite(self.values).all(axis=1)

    def select(self, rows: NDArray[np.int64]) -> PerText:
        """Return the statistics of some texts."""
        return PerText(self.values[rows], self.score, self.applies[rows])


@dataclass(frozen=True)
class Estimate:
    """Score and its confidence interval."""

    value: float
    low: float | None
    """Lower bound of the interval. None with fewer than two texts."""
    high: float | None
    n: int
    """Number of texts to which the metric applies."""


@dataclass(frozen=True)
class Interval:
    """Mean of paired differences and its 95 % confidence interval."""

    mean: float
    low: float | None
    """Lower bound of the interval. None with fewer than two runs or `MIN_TEXTS` texts."""
    high: float | None
    pairs: int

    @property
    def decided(self) -> bool:
        """True if the interval excludes zero."""
        if self.low is None or self.high is None:
            return False
        return self.low > 0 or self.high < 0


def estimate_scores(
    metrics: Mapping[str, PerText],
    rows: NDArray[np.int64] | None = None,
    *,
    resamples: int = RESAMPLES,
) -> dict[str, Estimate]:
    """Compute the scores over some texts, by default all, with bootstrap intervals.

    Metrics that do not apply to any of the texts are left out.
    """
    if rows is not None:
        metrics = {name: metric.select(rows) for name, metric in metrics.items()}
    metrics = {name: metric for name, metric in metrics.items() if metric.applies.any()}
    if not metrics:
        return {}

    # The statistics of all metrics are the columns of one matrix.
    matrix = np.concatenate([metric.values for metric in metrics.values()], axis=1)
    totals = matrix.sum(axis=0)
    resampled = _resample_sums(matrix, resamples)
    scores: dict[str, Estimate] = {}
    first = 0
    for name, metric in metrics.items():
        columns = slice(first, first + metric.values.shape[1])
        first = columns.stop
        n = int(metric.applies.sum())
        low, high = None, None
        if len(resampled) and n > 1:
            low, high = _percentiles(metric.score(resampled[:, columns]))
        scores[name] = Estimate(float(metric.score(totals[columns])), low, high, n)
    return scores


def _resample_sums(values: Floats, resamples: int) -> Floats:
    """Sum the [texts, k] statistics over each resample. Return [resamples, k] sums.

    A single text has no resamples.
    """
    n_texts = len(values)
    sums = [np.empty((0, values.shape[1]))]
    for start in range(0, resamples if n_texts > 1 else 0, _RESAMPLES_PER_STEP):
        step = range(start, resamples)[:_RESAMPLES_PER_STEP]
        samples = [sample_texts(n_texts, number) for number in step]
        counts = np.stack([np.bincount(texts, minlength=n_texts) for texts in samples])
        sums.append(counts.astype(float) @ values)
    return np.concatenate(sums)


def _percentiles(scores: Floats) -> tuple[float | None, float | None]:
    """Return the ends of the confidence interval from resampled scores. NaN is ignored."""
    valid = scores[~np.isnan(scores)]
    if not len(valid):
        return None, None
    tail = (1.0 - COVERAGE) / 2.0
    low, high = np.quantile(valid, [tail, 1.0 - tail]).tolist()
    return low, high


def sample_texts(n: int, number: int) -> NDArray[np.int64]:
    """Sample the [n] texts of resample `number`, with replacement."""
    # A counter-based generator has no state, so every resample can be computed alone.
    bits = np.random.Philox(key=[SEED, number])
    return np.random.Generator(bits).integers(0, n, size=n, dtype=np.int64)


def paired_difference(
    with_it: Sequence[float | None], without: Sequence[float | None]
) -> Interval | None:
    """Compute the mean difference between paired runs. Return None without a complete pair.

    The interval is Student's t over the differences (Student 1908), exact for normal differences.

    >>> paired_difference([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    Interval(mean=2.0, low=-0.484..., high=4.484..., pairs=3)
    """
    pairs = zip(with_it, without, strict=True)
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    n = len(differences)
    if n == 0:
        return None
    mean = statistics.fmean(differences)
    if n == 1:
        return Interval(mean, None, None, 1)
    half = t_quantile(n - 1) * statistics.stdev(differences) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t with `freedom` degrees of freedom."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    # The Cornish-Fisher expansion (Hill 1970, eq. 3), with an error below 1e-3.
    z = _Z
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


_Z: Final = 1.959964
"""97.5 % quantile of the normal distribution."""
_T: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t with 1 to 10 degrees of freedom."""


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share of `n` independent cases (Wilson 1927).

    Unlike a bootstrap interval, it has a width if the share is 0 or 1.

    >>> tuple(round(end, 3) for end in wilson_interval(0.8, 50))
    (0.67, 0.888)
    """
    ratio = _Z**2 / n
    centre = share + ratio / 2
    half = _Z * math.sqrt(share * (1.0 - share) / n + ratio / (4 * n))
    return max(0.0, (centre - half) / (1 + ratio)), min(
        1.0, (centre + half) / (1 + ratio)
    )


def subtract_scores(ours: PerText, theirs: PerText) -> Interval | None:
    """Subtract the score of `theirs` from `ours`, over the same texts in the same order.

    Each resample has the same texts for both runs (paired bootstrap; Koehn 2004), so texts that are
    hard for both do not widen the interval. Return None if the metric does not apply to any text in
    both runs.
    """
    both = ours.applies & theirs.applies
    k = ours.values.shape[1]
    if not both.any():
        return None
    values = np.concatenate([ours.values, theirs.values], axis=1)[both]

    def difference(sums: Floats) -> Floats:
        return ours.score(sums[..., :k]) - theirs.score(sums[..., k:])

    metric = PerText(values, difference, both[both])
    estimate = estimate_scores({"difference": metric})["difference"]
    bounds = (estimate.low, estimate.high) if estimate.n >= MIN_TEXTS else (None, None)
    return Interval(estimate.value, *bounds, estimate.n)


FILE: Final = "scores_by_text.json"
"""Name of the file in the folder of a run, next to evaluation.json."""
_FORM: Final = 1
"""Version of the file's format."""
_DIGITS: Final = 6
"""Decimal places of the statistics."""
_BLEU_SUMS: Final = 10
"""Statistics of BLEU per text, see `bleu_counts`."""


def key_of_text(prompt: str, reference: str) -> str:
    """Return a short hash of a prompt and its reference, the same in all runs."""
    text = f"{prompt}\0{reference}".encode("utf-8", "replace")
    return hashlib.sha256(text).hexdigest()[:16]


@dataclass(frozen=True)
class TextTable:
    """Statistics of several texts, one row per text."""

    keys: Sequence[str]
    """Hash per text, see `key_of_text`."""
    measures: Mapping[str, PerText]
    """Metrics by name."""

    def select(self, keys: Sequence[str]) -> TextTable:
        """Return the texts with these keys, in this order."""
        row_of = {key: row for row, key in enumerate(self.keys)}
        rows = np.array([row_of[key] for key in keys], dtype=np.int64)
        metrics = {name: metric.select(rows) for name, metric in self.measures.items()}
        return TextTable(keys, metrics)

    def record(self) -> dict[str, Any]:
        """Return the table as JSON values, with null for statistics that do not apply."""
        measures: dict[str, list[list[float] | None]] = {}
        for name, measure in self.measures.items():
            rows = zip(measure.values.tolist(), measure.is_finite.tolist(), strict=True)
            measures[name] = [
                [round(value, _DIGITS) for value in row] if is_finite else None
                for row, is_finite in rows
            ]
        return {"keys": list(self.keys), "measures": measures}


def losses_table(
    keys: Sequence[str],
    nats: Floats,
    tokens: Floats,
    size: Floats,
    weight: Floats | float = 1.0,
) -> TextTable:
    """Make a table of the loss and the bits per byte of held-out examples.

    Args:
        keys: Hash per example, see `key_of_text`.
        nats: Sum of the losses of each target.
        tokens: Number of tokens per target.
        size: Number of bytes per target, or 0 if the target is not a complete text.
        weight: Weight of each example in the loss.
    """
    measures = {"loss": PerText.ratio(weight * nats, weight * tokens)}
    if len(keys) and size.all():
        measures["bits_per_byte"] = PerText.ratio(nats / math.log(2), size)
    return TextTable(keys, measures)


def to_json(*, examples: TextTable, texts: TextTable, step: int | None) -> str:
    """Return the content of `FILE`."""
    tables = {"examples": examples.record(), "texts": texts.record()}
    return json.dumps({"form": _FORM, "step": step, **tables}, allow_nan=False)


class _Table(msgspec.Struct):
    keys: list[str]
    measures: dict[str, list[list[float] | None]]


class _File(msgspec.Struct):
    form: int
    examples: _Table
    texts: _Table
    step: int | None = None


@dataclass(frozen=True)
class ByText:
    """Content of a run's `FILE`."""

    examples: TextTable
    texts: TextTable
    step: int | None


def from_json(data: bytes) -> ByText:
    """Decode the content of `FILE`, which is untrusted.

    Raises:
        ValueError: The content is damaged.
    """
    file = decode_json(data, _File)
    if file.form != _FORM:
        raise ValueError(f"form must be {_FORM}, not {file.form}")
    return ByText(_text_table(file.examples), _text_table(file.texts), file.step)


def _text_table(table: _Table) -> TextTable:
    """Check and convert a decoded table."""
    measures: dict[str, PerText] = {}
    for name, rows in table.measures.items():
        if len(rows) != len(table.keys):
            raise ValueError(f"{name} has {len(rows)} rows for {len(table.keys)} texts")
        measures[name] = _per_text(name, rows)
    return TextTable(table.keys, measures)


def _per_text(name: str, rows: Sequence[Sequence[float] | None]) -> PerText:
    """Check the decoded statistics of a metric. None marks texts to which it does not apply."""
    applies = np.array([row is not None for row in rows], dtype=bool)
    present = [row for row in rows if row is not None]
    width = len(present[0]) if present else 2
    if any(len(row) != width for row in present):
        raise ValueError(f"the rows of {name} differ in length")
    values = np.zeros((len(rows), width))
    values[applies] = np.array(present, float).reshape(len(present), width)
    if not np.isfinite(values).all():
        raise ValueError(f"{name} has a number that is not finite")

    # The end of the name determines the function that computes the score from the sums.
    if name.endswith("bleu") and width == _BLEU_SUMS:
        return PerText(values, bleu_of, applies)
    if name.endswith("macro_f1") and width and width % 3 == 0:
        return PerText(values, macro_f1_of, applies)
    if width != 2:
        raise ValueError(f"{name} has {width} numbers per text")
    ratio = PerText.ratio(values[:, 0], values[:, 1])
    return PerText(ratio.values, ratio.score, ratio.applies & applies)
