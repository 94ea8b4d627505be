"""Intervals of scores and of differences: texts resampled, 95 %, percentiles (Efron 1979).

A score is a function of sums over texts (BLEU of ten sums), so a resample is a row of integer
weights, and all resamples of all scores are one matrix product. Replicate b depends only on the
seed and b. The sums are kept in a file, without the texts, to compare runs text by text.
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
FEWEST_TEXTS: Final = 10  # over fewer, which are drawn again and again, intervals are too short
_AT_ONCE: Final = 32  # replicates drawn together


@dataclass(frozen=True)
class PerText:
    """A metric's sufficient statistics of each text: numbers whose sums give the score."""

    values: Floats  # [texts, k]
    score: Callable[[Floats], Floats]  # sums [..., k] -> scores [...], NaN for sums of no text
    applies: NDArray[np.bool_]  # [texts]; where the metric does not apply, the row of values is 0

    @classmethod
    def mean(cls, values: Floats) -> PerText:
        """The mean of [texts] values; NaN marks texts to which the metric does not apply."""
        return cls.ratio(values, (~np.isnan(values)).astype(float))

    @classmethod
    def ratio(cls, above: Floats, below: Floats) -> PerText:
        """A sum over texts divided by another; a text with nothing below does not count."""
        applies = below > 0
        both = np.stack([np.where(applies, above, 0.0), np.where(applies, below, 0.0)], axis=1)

        def quotient(sums: Floats) -> Floats:
            found: Floats = np.full(sums.shape[:-1], np.nan)
            np.divide(sums[..., 0], sums[..., 1], out=found, where=sums[..., 1] > 0)
            return found

        return cls(both, quotient, applies)

    def among(self, before: int, total: int) -> PerText:
        """The same as the texts from `before` on, of `total`; it applies to none of the others."""
        here = slice(before, before + len(self.values))
        values, applies = np.zeros((total, self.values.shape[1])), np.zeros(total, bool)
        values[here], applies[here] = self.values, self.applies
        return PerText(values, self.score, applies)

    @property
    def known(self) -> NDArray[np.bool_]:
        """[texts] where the metric applies and is finite."""
        return self.applies & np.isfinite(self.values).all(axis=1)

    def at(self, rows: NDArray[np.int64]) -> PerText:
        """The statistics of some of the texts."""
        return PerText(self.values[rows], self.score, self.applies[rows])


@dataclass(frozen=True)
class Estimate:
    """A score with its interval."""

    value: float
    low: float | None  # None for fewer than two texts
    high: float | None
    n: int  # texts to which it applies


@dataclass(frozen=True)
class Interval:
    """The mean of paired differences with its 95 % interval."""

    mean: float
    low: float | None  # None with too few pairs: fewer than two runs, or than `FEWEST_TEXTS` texts
    high: float | None
    pairs: int

    @property
    def decided(self) -> bool:
        """True if the interval leaves zero out."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def estimates(
    measures: Mapping[str, PerText],
    rows: NDArray[np.int64] | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> dict[str, Estimate]:
    """Scores over some texts (None: all) that apply to any, with the interval of the resamples."""
    of_these = measures if rows is None else {n: m.at(rows) for n, m in measures.items()}
    some = {name: m for name, m in of_these.items() if m.applies.any()}
    if not some:
        return {}
    stacked = np.concatenate([m.values for m in some.values()], axis=1)
    totals, n_texts, replicates = stacked.sum(axis=0), len(stacked), list[Floats]()
    for start in range(0, resamples if n_texts > 1 else 0, _AT_ONCE):
        chosen = [draws(n_texts, k, seed=seed) for k in range(start, resamples)[:_AT_ONCE]]
        times = np.stack([np.bincount(c, minlength=n_texts) for c in chosen]).astype(float)
        replicates.append(times @ stacked)
    every = np.concatenate(replicates) if replicates else None
    found, at = {}, 0
    for name, measure in some.items():
        part = slice(at, at + measure.values.shape[1])
        at, n = part.stop, int(measure.applies.sum())
        low, high = None, None
        if every is not None and n > 1:
            scores = measure.score(every[:, part])
            if len(known := scores[~np.isnan(scores)]):
                tail = (1.0 - COVERAGE) / 2.0
                low, high = np.quantile(known, [tail, 1.0 - tail]).tolist()
        found[name] = Estimate(float(measure.score(totals[part])), low, high, n)
    return found


def draws(n: int, replicate: int, *, seed: int = SEED) -> NDArray[np.int64]:
    """[n] the texts of one resample, drawn with replacement."""
    bits = np.random.Philox(key=[seed, replicate])  # counter-based: no state runs on
    return np.random.Generator(bits).integers(0, n, size=n, dtype=np.int64)


def paired(with_it: Sequence[float | None], without: Sequence[float | None]) -> Interval | None:
    """Mean and interval of the differences of runs with the same seed; None without a whole pair.

    Student's t over the differences (Student 1908), exact for normal ones.

    >>> paired([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    Interval(mean=2.0, low=-0.484..., high=4.484..., pairs=3)
    """
    pairs = [
        a - b for a, b in zip(with_it, without, strict=True) if a is not None and b is not None
    ]
    if not pairs:
        return None
    mean = statistics.fmean(pairs)
    if len(pairs) < 2:
        return Interval(mean, None, None, 1)
    half = t_quantile(len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return Interval(mean, mean - half, mean + half, len(pairs))


def t_quantile(freedom: int) -> float:
    """The 97.5 % point of Student's t with `freedom` degrees of freedom."""
    # Above ten to 1e-3: Fisher and Cornish's expansion about the normal point (Hill 1970, eq. 3).
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
    """Score of `ours` minus that of `theirs`, both of the same texts in the same order.

    Each resample draws the same texts for both (the paired bootstrap; Koehn 2004), so what makes a
    text hard for both is in neither end of the interval. None where no text counts for both.
    """
    both, k = ours.applies & theirs.applies, ours.values.shape[1]
    if not both.any():
        return None
    joined = np.concatenate([ours.values, theirs.values], axis=1)[both]

    def difference(sums: Floats) -> Floats:
        return ours.score(sums[..., :k]) - theirs.score(sums[..., k:])

    found = estimates({"difference": PerText(joined, difference, both[both])})["difference"]
    bounds = (found.low, found.high) if found.n >= FEWEST_TEXTS else (None, None)
    return Interval(found.value, *bounds, found.n)


FILE: Final = "scores_by_text.json"  # name of the file in a run's folder, beside evaluation.json
_FORM: Final = 1
_DIGITS: Final = 6
_BLEU_SUMS: Final = 10  # of each text
_GONE: Final = "chrf"  # of earlier runs, 18 sums a text; a user's own of the name has two


def key_of_text(prompt: str, reference: str) -> str:
    """A short name of a prompt with its reference; the same in every run."""
    text = f"{prompt}\0{reference}".encode("utf-8", "replace")
    return hashlib.sha256(text).hexdigest()[:16]


@dataclass(frozen=True)
class TextTable:
    """Measures of some texts, a row a text."""

    keys: Sequence[str]
    measures: Mapping[str, PerText]

    def in_order(self, keys: Sequence[str]) -> TextTable:
        """The same for these of its texts, in this order."""
        at = {key: row for row, key in enumerate(self.keys)}
        rows = np.array([at[key] for key in keys], dtype=np.int64)
        return TextTable(keys, {name: m.at(rows) for name, m in self.measures.items()})

    def record(self) -> dict[str, Any]:
        """The table as JSON; null where a measure does not apply or is no finite number."""
        return {
            "keys": list(self.keys),
            "measures": {
                name: [
                    [round(value, _DIGITS) for value in row] if known else None
                    for row, known in zip(m.values.tolist(), m.known.tolist(), strict=True)
                ]
                for name, m in self.measures.items()
            },
        }


def losses_table(
    keys: Sequence[str], nats: Floats, tokens: Floats, size: Floats, weight: Floats | float = 1.0
) -> TextTable:
    """Held-out loss of examples by their nats, tokens and weight; bits a byte by bytes of text.

    `size` holds the bytes of each target, 0 where it is no whole text.
    """
    measures = {"loss": PerText.ratio(weight * nats, weight * tokens)}
    if len(keys) and size.all():
        measures["bits_per_byte"] = PerText.ratio(nats / math.log(2), size)
    return TextTable(keys, measures)


def to_json(*, examples: TextTable, texts: TextTable, step: int | None) -> str:
    """The content of `FILE`."""
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
    """The content of a run's file."""

    examples: TextTable
    texts: TextTable
    step: int | None


def from_json(data: bytes) -> ByText:
    """The tables of a file, which may come from anyone: ValueError where it is damaged."""
    found = decode_json(data, _File)
    if found.form != _FORM:
        raise ValueError(f"its form is {found.form}, and this version reads {_FORM}")
    return ByText(_table(found.examples), _table(found.texts), found.step)


def _table(found: _Table) -> TextTable:
    wrong = [name for name, rows in found.measures.items() if len(rows) != len(found.keys)]
    if wrong:
        raise ValueError(f"{wrong[0]} is not of {len(found.keys)} texts")
    kept = {
        name: rows
        for name, rows in found.measures.items()
        if name != _GONE or all(row is None or len(row) == 2 for row in rows)
    }
    return TextTable(found.keys, {name: _measure(name, rows) for name, rows in kept.items()})


def _measure(name: str, rows: Sequence[Sequence[float] | None]) -> PerText:
    width = next((len(row) for row in rows if row is not None), 2)
    filled = [[0.0] * width if row is None else row for row in rows]
    if any(len(row) != width for row in filled):
        raise ValueError(f"the rows of {name} are not of one length")
    values = np.array(filled, float).reshape(len(rows), width)
    if not np.isfinite(values).all():
        raise ValueError(f"{name} holds a number that is not finite")
    applies = np.array([row is not None for row in rows], dtype=bool)
    if name.endswith("bleu") and width == _BLEU_SUMS:
        return PerText(values, bleu_of, applies)
    if name.endswith("macro_f1") and width and width % 3 == 0:
        return PerText(values, macro_f1_of, applies)
    if width != 2:
        raise ValueError(f"{name} has {width} numbers a text")
    ratio = PerText.ratio(values[:, 0], values[:, 1])
    return PerText(ratio.values, ratio.score, ratio.applies & applies)
