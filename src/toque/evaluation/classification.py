"""Classification scores: accuracy, macro-F1, the confusion table, and calibration.

An answer outside the classes is a mistake of its own kind: it lowers accuracy and recall, and has
a column in the confusion table, `OTHER`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

BINS: Final = 10
"""Bins of confidence that calibration is measured over."""
WIDEST: Final = 100
"""Columns of a terminal that a confusion table may take; a wider one is told in a line a class."""
MOST_MISTAKES: Final = 3
"""Wrong answers named in such a line."""
_Row = tuple[str, str, str, str, str]
OTHER: Final = "(other)"
"""The column of answers that name no class."""


@dataclass(frozen=True)
class ClassScores:
    """Answers counted against the true classes."""

    classes: tuple[str, ...]
    confusion: NDArray[np.int64]
    """[classes, classes + 1] counts: true class, then answer; the last column is `OTHER`."""

    @property
    def n(self) -> int:
        """Answers."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(np.trace(self.confusion)) / self.n

    @property
    def majority(self) -> float:
        """Accuracy of always answering the most frequent class: the baseline."""
        return float(self.confusion.sum(axis=1).max()) / self.n

    @property
    def f1(self) -> dict[str, float]:
        """F1 of each class; 0 for one that is neither true nor answered."""
        right = np.diag(self.confusion).astype(float)
        true, answered = self.confusion.sum(axis=1), self.confusion[:, :-1].sum(axis=0)
        both = np.maximum(true + answered, 1)  # F1 = 2 TP / (true + answered)
        return dict(zip(self.classes, (2 * right / both).tolist(), strict=True))

    @property
    def macro_f1(self) -> float:
        """Mean F1 over the classes that are true of at least one example."""
        present = self.confusion.sum(axis=1) > 0
        return float(np.array(list(self.f1.values()))[present].mean())

    def table(self) -> str:
        """The confusion table as text: a row per true class, a column per answer.

        If it would be wider than `WIDEST`, a line per class instead, with its commonest mistakes.
        """
        names = [*self.classes, OTHER] if self.confusion[:, -1].any() else list(self.classes)
        width = max(len(name) for name in names) + 2
        if width * (len(names) + 1) + 4 > WIDEST:
            heads, rows = class_rows([*self.classes, OTHER], self.confusion.tolist())
            return "\n".join(
                f"{row[0]:<{width}}{row[1]:>7}{row[2]:>7}{row[3]:>9}   {row[4]}".rstrip()
                for row in (heads, *rows)
            )
        lines = ["true \\ answer".ljust(width + 4) + "".join(f"{n:>{width}}" for n in names)]
        for name, row in zip(self.classes, self.confusion.tolist(), strict=True):
            cells = "".join(f"{count:>{width}}" for count in row[: len(names)])
            lines.append(name.ljust(width + 4) + cells)
        return "\n".join(lines)


def class_rows(names: Sequence[str], confusion: Sequence[Sequence[int]]) -> tuple[_Row, list[_Row]]:
    """A confusion table in a row per true class: how many, how many right, F1, commonest mistakes.

    Args:
        names: of the answers, one a column.
        confusion: counts, a row per true class in the order of `names`, a column per answer.

    Returns:
        The heads and the rows; classes that neither occur nor are answered are left out.

    >>> class_rows(["Thai", "Greek"], [[3, 1], [0, 2]])[1]
    [('Thai', '4', '3', '0.857', 'Greek 1'), ('Greek', '2', '2', '0.800', '')]
    """
    answered = [sum(row[at] for row in confusion) for at in range(len(names))]
    rows: list[_Row] = []
    for at, counts in enumerate(confusion):
        n_true = sum(counts)
        if not n_true + answered[at]:
            continue
        wrong = sorted(((-n, i) for i, n in enumerate(counts) if n and i != at))
        told = ", ".join(f"{names[i]} {-n:,}" for n, i in wrong[:MOST_MISTAKES])
        more = -sum(n for n, _ in wrong[MOST_MISTAKES:])
        f1 = 2 * counts[at] / (n_true + answered[at])
        told += f", others {more:,}" if more else ""
        rows.append((names[at], f"{n_true:,}", f"{counts[at]:,}", f"{f1:.3f}", told))
    return ("true class", "of it", "right", "F1", "taken for"), rows


def class_scores(
    answers: Sequence[str], truths: Sequence[str], classes: Sequence[str]
) -> ClassScores:
    """Count answers against true classes; case and surrounding blanks do not matter.

    Raises:
        ValueError: no example, two lists of different lengths, or a truth that is not a class.

    >>> class_scores(["easy", "hard "], ["Easy", "medium"], ["easy", "medium", "hard"]).accuracy
    0.5
    """
    if not truths or len(answers) != len(truths):
        raise ValueError(f"{len(answers)} answers to {len(truths)} questions; at least one each.")
    place = {name.strip().casefold(): i for i, name in enumerate(classes)}
    unknown = sorted({truth for truth in truths if truth.strip().casefold() not in place})
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not one of the classes {', '.join(classes)}.")
    true = [place[truth.strip().casefold()] for truth in truths]
    answered = [place.get(answer.strip().casefold(), len(classes)) for answer in answers]
    confusion = np.zeros((len(classes), len(classes) + 1), np.int64)
    np.add.at(confusion, (true, answered), 1)
    return ClassScores(tuple(classes), confusion)


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
