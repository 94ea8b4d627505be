"""Differences of two models or settings, with intervals: over seeds or over the same texts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from toque.evaluation.bootstrap import RESAMPLES, SEED, PerText, interval_of


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


FEWEST_TEXTS: Final = 10
"""A bootstrap over fewer texts draws the same few again and again: its interval is too short."""


def over_texts(
    ours: PerText, theirs: PerText, *, resamples: int = RESAMPLES, seed: int = SEED
) -> Interval | None:
    """Score of `ours` minus that of `theirs`, both of the same texts in the same order.

    Each resample draws the same texts for both (the paired bootstrap; Koehn 2004), so what makes a
    text hard for both is in neither end of the interval. None where no text counts for both.

    >>> def mean(*values):
    ...     return PerText.mean(np.array(values, float))
    >>> over_texts(mean(2, 4, 6), mean(1, 3, 5))
    Interval(mean=1.0, low=None, high=None, pairs=3)
    """
    both = ours.applies & theirs.applies
    if not both.any():
        return None
    mine, other = (replace(one, values=one.values * both[:, None]) for one in (ours, theirs))
    k = mine.values.shape[1]
    joined = np.concatenate([mine.values, other.values], axis=1)[both]
    found = interval_of(
        joined, lambda sums: mine.score(sums[..., :k]) - other.score(sums[..., k:]),
        resamples=resamples, seed=seed,
    )  # fmt: skip
    few = found.n < FEWEST_TEXTS
    return Interval(found.value, *((None, None) if few else (found.low, found.high)), found.n)
