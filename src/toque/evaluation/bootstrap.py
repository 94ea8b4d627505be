"""Intervals of scores and of differences: texts resampled, 95 %, percentiles (Efron 1979).

A score is a function of sums over texts (a mean is a sum divided by a count; BLEU is a function of
ten sums), so a resample is a row of integer weights, and all resamples of all scores are one
matrix product. Replicate b depends only on the seed and b.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES: Final = 1000
COVERAGE: Final = 0.95
SEED: Final = 17
FEWEST_TEXTS: Final = 10
"""A bootstrap over fewer texts draws the same few again and again: its interval is too short."""
_AT_ONCE: Final = 32
"""Replicates drawn together."""


@dataclass(frozen=True)
class PerText:
    """A metric's sufficient statistics of each text: numbers whose sums give the score."""

    values: Floats
    """[texts, k]"""
    score: Callable[[Floats], Floats]
    """Sums [..., k] -> scores [...]; NaN where the sums hold no text."""
    applies: NDArray[np.bool_]
    """[texts] whether the metric applies to a text; where not, its row of `values` is 0."""

    @classmethod
    def mean(cls, values: Floats) -> PerText:
        """The mean of [texts] values; NaN marks texts to which the metric does not apply."""
        applies = ~np.isnan(values)
        both = np.stack([np.where(applies, values, 0.0), applies.astype(float)], axis=1)
        return cls(both, _ratio, applies)

    @classmethod
    def ratio(cls, above: Floats, below: Floats) -> PerText:
        """A sum over texts divided by another; a text with nothing below does not count."""
        applies = below > 0
        both = np.stack([np.where(applies, above, 0.0), np.where(applies, below, 0.0)], axis=1)
        return cls(both, _ratio, applies)

    def at(self, rows: NDArray[np.int64]) -> PerText:
        """The statistics of some of the texts."""
        return PerText(self.values[rows], self.score, self.applies[rows])


@dataclass(frozen=True)
class Estimate:
    """A score with its interval."""

    value: float
    low: float | None
    """None for fewer than two texts."""
    high: float | None
    n: int
    """Texts to which it applies."""


@dataclass(frozen=True)
class Interval:
    """The mean of paired differences with its 95 % interval."""

    mean: float
    low: float | None
    """None with too few pairs: fewer than two runs, or than `FEWEST_TEXTS` texts."""
    high: float | None
    pairs: int

    @property
    def decided(self) -> bool:
        """True if the interval leaves zero out."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def _ratio(sums: Floats) -> Floats:
    count = sums[..., 1]
    found: Floats = np.full(count.shape, np.nan)
    np.divide(sums[..., 0], count, out=found, where=count > 0)
    return found


def estimates(
    measures: Mapping[str, PerText],
    rows: NDArray[np.int64] | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> dict[str, Estimate]:
    """Scores over some texts, with the interval that holds 95 % of the resamples.

    Args:
        measures: by name, all of the same texts.
        rows: indices of the texts; None for all.
        resamples: replicates; 0 leaves the intervals out.
        seed: of the draws.

    Returns:
        in the order of `measures`, those that apply to at least one text.
    """
    of_these = measures if rows is None else {n: m.at(rows) for n, m in measures.items()}
    some = {name: m for name, m in of_these.items() if m.applies.any()}
    if not some:
        return {}
    stacked = np.concatenate([m.values for m in some.values()], axis=1)
    totals = stacked.sum(axis=0)
    replicates = (
        np.concatenate([w @ stacked for w in _weights(len(stacked), resamples, seed)])
        if resamples and len(stacked) > 1
        else None
    )
    found, at = {}, 0
    for name, measure in some.items():
        part = slice(at, at + measure.values.shape[1])
        at, n = part.stop, int(measure.applies.sum())
        low, high = None, None
        if replicates is not None and n > 1:
            low, high = _bounds(measure.score(replicates[:, part]))
        found[name] = Estimate(float(measure.score(totals[part])), low, high, n)
    return found


def draws(n: int, replicate: int, *, seed: int = SEED) -> NDArray[np.int64]:
    """[n] the texts of one resample, drawn with replacement."""
    bits = np.random.Philox(key=[seed, replicate])  # counter-based: no state runs on
    return np.random.Generator(bits).integers(0, n, size=n, dtype=np.int64)


def _weights(n: int, resamples: int, seed: int) -> Iterator[Floats]:
    """Times that each text is drawn, [replicates, n] at a time."""
    for start in range(0, resamples, _AT_ONCE):
        count = min(_AT_ONCE, resamples - start)
        chosen = [draws(n, start + k, seed=seed) for k in range(count)]
        yield np.stack([np.bincount(c, minlength=n) for c in chosen]).astype(float)


def _bounds(scores: Floats) -> tuple[float, float] | tuple[None, None]:
    known = scores[~np.isnan(scores)]
    if not len(known):
        return None, None
    tail = (1.0 - COVERAGE) / 2.0
    low, high = np.quantile(known, [tail, 1.0 - tail])
    return float(low), float(high)


def paired(with_it: Sequence[float | None], without: Sequence[float | None]) -> Interval | None:
    """Mean and interval of the differences of runs with the same seed; None without a whole pair.

    Student's t over the differences (Student 1908): exact for normal ones, and with five seeds
    wider than a bootstrap, which cannot see beyond the values it has.

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
    """The 97.5 % point of Student's t with `freedom` degrees of freedom.

    >>> t_quantile(4), round(t_quantile(60), 2)
    (2.776, 2.0)
    """
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

    >>> def mean(*values):
    ...     return PerText.mean(np.array(values, float))
    >>> over_texts(mean(2, 4, 6), mean(1, 3, 5))
    Interval(mean=1.0, low=None, high=None, pairs=3)
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
