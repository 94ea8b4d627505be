"""Classification scores: accuracy, macro-F1, the confusion table, and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from toque.evaluation.answer_scores import f1_of, macro_f1_of

BINS: Final = 10  # bins of confidence that calibration is measured over
MOST_MISTAKES: Final = 3  # wrong answers named beside a class
_Row = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class ClassScores:
    """Answers counted against the true classes."""

    classes: tuple[str, ...]
    confusion: NDArray[np.int64]  # [classes, classes] counts: true class, then answer

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(np.trace(self.confusion) / self.confusion.sum())

    @property
    def majority(self) -> float:
        """Accuracy of always answering the most frequent class: the baseline."""
        return float(self.confusion.sum(axis=1).max() / self.confusion.sum())

    @property
    def f1(self) -> dict[str, float]:
        """F1 of each class; 0 for one that is neither true nor answered."""
        return dict(zip(self.classes, f1_of(self._sums).tolist(), strict=True))

    @property
    def macro_f1(self) -> float:
        """Mean F1 over the classes that are true of at least one example."""
        return float(macro_f1_of(self._sums))

    @property
    def _sums(self) -> NDArray[np.float64]:
        counts = self.confusion.sum(axis=1), self.confusion.sum(axis=0), np.diag(self.confusion)
        return np.concatenate(counts).astype(float)

    def lines(self) -> list[str]:
        """The confusion table for people, a line a class."""
        heads, rows = class_rows(self.classes, self.confusion.tolist())
        width = max(map(len, self.classes)) + 2
        return [
            f"{row[0]:<{width}}{row[1]:>7}{row[2]:>7}{row[3]:>9}   {row[4]}".rstrip()
            for row in (heads, *rows)
        ]


def class_rows(names: Sequence[str], confusion: Sequence[Sequence[int]]) -> tuple[_Row, list[_Row]]:
    """Heads and rows of a table: a true class, how many, how many right, F1, commonest mistakes.

    Classes that neither occur nor are answered are left out.

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
    """Count answers against true classes; surrounding blanks do not matter, nor does case.

    Case matters where it alone tells two classes apart.
    """
    if not truths or len(answers) != len(truths):
        raise ValueError(f"{len(answers)} answers to {len(truths)} questions; at least one each.")
    names = [name.strip() for name in classes]
    folded = len({name.casefold() for name in names}) == len(set(names))
    key = str.casefold if folded else str
    place = {key(name): i for i, name in enumerate(names)}
    unknown = {name for name in (*truths, *answers) if key(name.strip()) not in place}
    if unknown:
        raise ValueError(f"{min(unknown)!r} is not one of the classes {', '.join(classes)}.")
    confusion = np.zeros((len(classes), len(classes)), np.int64)
    for truth, answer in zip(truths, answers, strict=True):
        confusion[place[key(truth.strip())], place[key(answer.strip())]] += 1
    return ClassScores(tuple(classes), confusion)


def calibration_error(confidences: Sequence[float], right: Sequence[bool]) -> float:
    """Expected calibration error over bins of equal width (Naeini et al. 2015, Guo et al. 2017).

    ECE = sum over bins of (n_b / n) * |accuracy_b - confidence_b|; a bin is closed above, and the
    first holds 0 too. A confidence is the probability given to the answer, in [0, 1].
    """
    sure, hit = np.asarray(confidences, float), np.asarray(right, float)
    if not len(sure) or sure.shape != hit.shape:
        raise ValueError(f"{len(sure)} confidences for {len(hit)} answers; at least one each.")
    if not ((sure >= 0) & (sure <= 1)).all():  # NaN fails both
        raise ValueError("A confidence is outside 0 to 1.")
    which = np.clip(np.ceil(sure * BINS).astype(int) - 1, 0, BINS - 1)
    # A bin's n times the difference of its means is the difference of its sums.
    gaps = np.bincount(which, weights=hit) - np.bincount(which, weights=sure)
    return float(np.abs(gaps).sum() / len(sure))
