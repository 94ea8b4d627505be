"""Confidence intervals of scores and differences by the percentile bootstrap (Efron 1979).

A score is a function of sums over texts, e.g. BLEU of ten sums. Therefore a resample is a row of
integer weights, and one matmul computes all resamples of all scores. Replicate b depends
only on the seed and b. A file stores the sums per text, without the texts, so that runs can be
compared text by text.
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
"""Minimum texts for the interval of a difference. With fewer, bootstrap intervals are too short."""
_REPLICATES_PER_STEP: Final = 32


@dataclass(frozen=True)
class PerText:
    """Sufficient statistics of a metric per text. The score is a function of their sums."""

    values: Floats
    """[texts, k] Statistics per text. They are 0 if the metric does not apply to the text."""
    score: Callable[[Floats], Floats]
    """Function from sums [..., k] to scores [...], with NaN for the sums of no text."""
    applies: NDArray[np.bool_]
    """[texts] Whether the metric applies to the text."""

    @classmethod
    def mean(cls, values: Floats) -> PerText:
        """Describe a mean of [texts] values. NaN marks texts to which the metric does not apply."""
        return cls.ratio(values, (~np.isnan(values)).astype(float))

    @classmethod
    def ratio(cls, above: Floats, below: Floats) -> PerText:
        """Describe the ratio of two sums over texts. Texts with a denominator of 0 are left out."""
        applies = below > 0
        both = np.stack(
            [np.where(applies, above, 0.0), np.where(applies, below, 0.0)], axis=1
        )

        def quotient(sums: Floats) -> Floats:
            ratio: Floats = np.full(sums.shape[:-1], np.nan)
            np.divide(sums[..., 0], sums[..., 1], out=ratio, where=sums[..., 1] > 0)
            return ratio

        return cls(both, quotient, applies)

    def among(self, start: int, total: int) -> PerText:
        """Insert the texts at row `start` of a table of `total` texts."""
        rows = slice(start, start + len(self.values))
        values = np.zeros((total, self.values.shape[1]))
        applies = np.zeros(total, bool)
        values[rows] = self.values
        applies[rows] = self.applies
        return PerText(values, self.score, applies)

    @property
    def is_finite(self) -> NDArray[np.bool_]:
        """[texts] Whether the metric applies to the text and is finite."""
        return self.applies & np.isfinite(self.values).all(axis=1)

    def at(self, rows: NDArray[np.int64]) -> PerText:
        """Select the statistics of some texts."""
        return PerText(self.values[rows], self.score, self.applies[rows])


@dataclass(frozen=True)
class Estimate:
    """A score with its interval."""

    value: float
    low: float | None
    """None with fewer than two texts."""
    high: float | None
    n: int
    """Number of texts to which the metric applies."""


@dataclass(frozen=True)
class Interval:
    """The mean of paired differences with its 95 % interval."""

    mean: float
    low: float | None
    """None with fewer than two runs or `MIN_TEXTS` texts."""
    high: float | None
    pairs: int

    @property
    def decided(self) -> bool:
        """True if the interval excludes zero."""
        return (
            self.low is not None
            and self.high is not None
            and (self.low > 0 or self.high < 0)
        )


def estimates(
    measures: Mapping[str, PerText],
    rows: NDArray[np.int64] | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> dict[str, Estimate]:
    """Compute the scores over some texts, by default all, with bootstrap intervals.

    Metrics that do not apply to any text are left out.
    """
    if rows is not None:
        measures = {name: measure.at(rows) for name, measure in measures.items()}
    measures = {
        name: measure for name, measure in measures.items() if measure.applies.any()
    }
    if not measures:
        return {}

    statistics_of_all = np.concatenate([m.values for m in measures.values()], axis=1)
    totals = statistics_of_all.sum(axis=0)
    resampled = _resample_sums(statistics_of_all, resamples, seed)
    scores: dict[str, Estimate] = {}
    first = 0
    for name, measure in measures.items():
        columns = slice(first, first + measure.values.shape[1])
        first = columns.stop
        n = int(measure.applies.sum())
        low, high = None, None
        if len(resampled) and n > 1:
            low, high = _percentiles(measure.score(resampled[:, columns]))
        scores[name] = Estimate(float(measure.score(totals[columns])), low, high, n)
    return scores


def _resample_sums(values: Floats, resamples: int, seed: int) -> Floats:
    """Sum the statistics [texts, k] of each resample. The result is [resamples, k]."""
    n_texts = len(values)
    sums = [np.empty((0, values.shape[1]))]
    for start in range(0, resamples if n_texts > 1 else 0, _REPLICATES_PER_STEP):
        replicates = range(start, resamples)[:_REPLICATES_PER_STEP]
        chosen = [draws(n_texts, replicate, seed=seed) for replicate in replicates]
        counts = np.stack([np.bincount(texts, minlength=n_texts) for texts in chosen])
        sums.append(counts.astype(float) @ values)
    return np.concatenate(sums)


def _percentiles(scores: Floats) -> tuple[float | None, float | None]:
    """Return the ends of the interval of resampled scores. NaN is ignored."""
    valid = scores[~np.isnan(scores)]
    if not len(valid):
        return None, None
    tail = (1.0 - COVERAGE) / 2.0
    low, high = np.quantile(valid, [tail, 1.0 - tail]).tolist()
    return low, high


def draws(n: int, replicate: int, *, seed: int = SEED) -> NDArray[np.int64]:
    """Sample the [n] texts of one resample with replacement."""
    bits = np.random.Philox(key=[seed, replicate])  # counter-based, without state
    return np.random.Generator(bits).integers(0, n, size=n, dtype=np.int64)


def paired(
    with_it: Sequence[float | None], without: Sequence[float | None]
) -> Interval | None:
    """Compute the mean difference of runs with the same seed. Return None without a complete pair.

    The interval is Student's t over the differences (Student 1908), exact for normal differences.

    >>> paired([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    Interval(mean=2.0, low=-0.484..., high=4.484..., pairs=3)
    """
    pairs = [
        a - b
        for a, b in zip(with_it, without, strict=True)
        if a is not None and b is not None
    ]
    if not pairs:
        return None
    mean = statistics.fmean(pairs)
    if len(pairs) < 2:
        return Interval(mean, None, None, 1)
    half = t_quantile(len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return Interval(mean, mean - half, mean + half, len(pairs))


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % point of Student's t with `freedom` degrees of freedom."""
    # Above ten: the expansion of Fisher and Cornish (Hill 1970, eq. 3), with an error below 1e-3.
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = 1.959964
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


_T: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def over_texts(ours: PerText, theirs: PerText) -> Interval | None:
    """Subtract the score of `theirs` from `ours`, over the same texts in the same order.

    Each resample has the same texts for both runs (paired bootstrap; Koehn 2004), so texts that are
    hard for both do not widen the interval. Return None if the metric
    applies to none of the texts in both runs.
    """
    both = ours.applies & theirs.applies
    k = ours.values.shape[1]
    if not both.any():
        return None
    values = np.concatenate([ours.values, theirs.values], axis=1)[both]

    def difference(sums: Floats) -> Floats:
        return ours.score(sums[..., :k]) - theirs.score(sums[..., k:])

    estimate = estimates({"difference": PerText(values, difference, both[both])})[
        "difference"
    ]
    bounds = (estimate.low, estimate.high) if estimate.n >= MIN_TEXTS else (None, None)
    return Interval(estimate.value, *bounds, estimate.n)


FILE: Final = "scores_by_text.json"
"""Name of the file in the folder of a run, next to evaluation.json."""
_FORM: Final = 1
_DIGITS: Final = 6
_BLEU_SUMS: Final = 10


def key_of_text(prompt: str, reference: str) -> str:
    """Return a short hash of a prompt and its reference, equal in all runs."""
    text = f"{prompt}\0{reference}".encode("utf-8", "replace")
    return hashlib.sha256(text).hexdigest()[:16]


@dataclass(frozen=True)
class TextTable:
    """Statistics of several texts, one row per text."""

    keys: Sequence[str]
    """Hash per text, see `key_of_text`."""
    measures: Mapping[str, PerText]

    def in_order(self, keys: Sequence[str]) -> TextTable:
        """Select the texts with these keys, in this order."""
        row_of = {key: row for row, key in enumerate(self.keys)}
        rows = np.array([row_of[key] for key in keys], dtype=np.int64)
        return TextTable(keys, {name: m.at(rows) for name, m in self.measures.items()})

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

    `size` has the bytes per target, or 0 if the target is not a complete text.
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
    """The content of `FILE` of a run."""

    examples: TextTable
    texts: TextTable
    step: int | None


def from_json(data: bytes) -> ByText:
    """Read the tables of an untrusted file.

    Raises:
        ValueError: The file is damaged.
    """
    file = decode_json(data, _File)
    if file.form != _FORM:
        raise ValueError(f"form must be {_FORM}, not {file.form}")
    return ByText(_text_table(file.examples), _text_table(file.texts), file.step)


def _text_table(table: _Table) -> TextTable:
    measures: dict[str, PerText] = {}
    for name, rows in table.measures.items():
        if len(rows) != len(table.keys):
            raise ValueError(f"{name} has {len(rows)} rows for {len(table.keys)} texts")
        measures[name] = _measure(name, rows)
    return TextTable(table.keys, measures)


def _measure(name: str, rows: Sequence[Sequence[float] | None]) -> PerText:
    width = next((len(row) for row in rows if row is not None), 2)
    filled = [[0.0] * width if row is None else row for row in rows]
    if any(len(row) != width for row in filled):
        raise ValueError(f"the rows of {name} differ in length")
    values = np.array(filled, float).reshape(len(rows), width)
    if not np.isfinite(values).all():
        raise ValueError(f"{name} has a number that is not finite")
    applies = np.array([row is not None for row in rows], dtype=bool)
    if name.endswith("bleu") and width == _BLEU_SUMS:
        return PerText(values, bleu_of, applies)
    if name.endswith("macro_f1") and width and width % 3 == 0:
        return PerText(values, macro_f1_of, applies)
    if width != 2:
        raise ValueError(f"{name} has {width} numbers per text")
    ratio = PerText.ratio(values[:, 0], values[:, 1])
    return PerText(ratio.values, ratio.score, ratio.applies & applies)
