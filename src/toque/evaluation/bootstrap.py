"""Bootstrap confidence intervals of scores: texts resampled, 95 %, percentiles (Efron 1979).

A score is a function of sums over texts (a mean is a sum divided by a count; BLEU is a function of
ten sums), so a resample is a row of integer weights, and all resamples of all scores are one
matrix product. Replicate b depends only on the seed and b.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES: Final = 1000
COVERAGE: Final = 0.95
SEED: Final = 17
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


def interval_of(
    values: Floats,
    score: Callable[[Floats], Floats],
    *,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Estimate:
    """The score of [texts, k] `values` with its interval, every text counted."""
    n, totals = len(values), values.sum(axis=0)
    low, high = None, None
    if resamples and n > 1:
        sums = np.concatenate([w @ values for w in _weights(n, resamples, seed)])
        low, high = _bounds(score(sums))
    return Estimate(float(score(totals)), low, high, n)


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
