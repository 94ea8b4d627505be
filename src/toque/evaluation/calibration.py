"""Calibration: expected calibration error and its bins (Guo et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BINS = 10


@dataclass(frozen=True)
class Bin:
    """Answers of about the same confidence; its means are None for an empty bin."""

    low: float
    high: float
    n: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Calibration:
    """Expected calibration error and the bins it comes from."""

    ece: float
    bins: tuple[Bin, ...]


def calibration(
    confidences: Sequence[float], right: Sequence[bool], *, bins: int = BINS
) -> Calibration:
    """Expected calibration error over bins of equal width (Naeini et al. 2015, Guo et al. 2017).

    ECE = sum over bins of (n_b / n) * |accuracy_b - confidence_b|.

    Args:
        confidences: probability given to the answer, each in [0, 1].
        right: whether the answer was right.
        bins: of (0, 1], closed above; the first holds 0 too.

    Raises:
        ValueError: nothing to score, lists of two lengths, or a confidence outside 0 to 1.

    >>> round(calibration([0.95, 0.95, 0.55, 0.55], [True, True, True, False]).ece, 3)
    0.05
    """
    sure, hit = np.asarray(confidences, float), np.asarray(right, float)
    if not len(sure) or sure.shape != hit.shape or bins < 1:
        raise ValueError(f"{len(sure)} confidences for {len(hit)} answers; at least one each.")
    if not ((sure >= 0) & (sure <= 1)).all():  # NaN fails both
        raise ValueError("A confidence is outside 0 to 1.")
    which = np.clip(np.ceil(sure * bins).astype(int) - 1, 0, bins - 1)
    found, error = [], 0.0
    for i in range(bins):
        inside = which == i
        n, low, high = int(inside.sum()), i / bins, (i + 1) / bins
        if not n:
            found.append(Bin(low, high, 0, None, None))
            continue
        confidence, accuracy = float(sure[inside].mean()), float(hit[inside].mean())
        found.append(Bin(low, high, n, confidence, accuracy))
        error += n / len(sure) * abs(accuracy - confidence)
    return Calibration(error, tuple(found))
