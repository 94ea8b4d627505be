"""Classification scores: accuracy, macro-F1, the confusion table, and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from toque.evaluation.answer_scores import f1_of, macro_f1_of

BINS: Final = 10
"""Bins of confidence for the calibration error."""
MAX_MISTAKES: Final = 3
"""Wrong answers that are listed per class, the most frequent first."""
_Row = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class ClassScores:
    """Counts of answers per true class, and the scores that they give."""

    classes: tuple[str, ...]
    confusion: NDArray[np.int64]
    """[classes, classes] Number of examples by true class and answer."""

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(np.trace(self.confusion) / self.confusion.sum())

    @property
    def majority(self) -> float:
        """Accuracy of the most frequent class, the baseline."""
        return float(self.confusion.sum(axis=1).max() / self.confusion.sum())

    @property
    def f1(self) -> dict[str, float]:
        """F1 by class. It is 0 for a class without examples or answers."""
        return dict(zip(self.classes, f1_of(self._sums).tolist(), strict=True))

    @property
    def macro_f1(self) -> float:
        """Mean F1 over the classes with at least one example."""
        return float(macro_f1_of(self._sums))

    @property
    def _sums(self) -> NDArray[np.float64]:
        counts = (
            self.confusion.sum(axis=1),
            self.confusion.sum(axis=0),
            np.diag(self.confusion),
        )
        return np.concatenate(counts).astype(float)

    def lines(self) -> list[str]:
        """Format the confusion table, one line per class."""
        heads, rows = class_rows(self.classes, self.confusion.tolist())
        width = max(map(len, self.classes)) + 2
        return [
            f"{row[0]:<{width}}{row[1]:>7}{row[2]:>7}{row[3]:>9}   {row[4]}".rstrip()
            for row in (heads, *rows)
        ]


def class_rows(
    names: Sequence[str], confusion: Sequence[Sequence[int]]
) -> tuple[_Row, list[_Row]]:
    """Make the column heads and rows of a table of classes.

    The columns are the true class, its examples, the right answers, F1 and the most frequent
    mistakes. Classes without examples or answers are left out.

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
        mistakes = [f"{names[i]} {-n:,}" for n, i in wrong[:MAX_MISTAKES]]
        if n_other := -sum(n for n, _ in wrong[MAX_MISTAKES:]):
            mistakes.append(f"others {n_other:,}")
        f1 = 2 * counts[at] / (n_true + answered[at])
        rows.append(
            (
                names[at],
                f"{n_true:,}",
                f"{counts[at]:,}",
                f"{f1:.3f}",
                ", ".join(mistakes),
            )
        )
    return ("true class", "of it", "right", "F1", "taken for"), rows


def class_scores(
    answers: Sequence[str], truths: Sequence[str], classes: Sequence[str]
) -> ClassScores:
    """Count answers by true class. Surrounding whitespace and case are ignored.

    Case is not ignored if two classes differ only in case.

    Raises:
        ValueError: The lists differ in length or are empty, or a name is not a class.
    """
    if not truths or len(answers) != len(truths):
        raise ValueError(
            f"There are {len(answers)} answers for {len(truths)} examples; the numbers must be "
            "equal and above 0."
        )
    names = [name.strip() for name in classes]
    ignores_case = len({name.casefold() for name in names}) == len(set(names))
    key = str.casefold if ignores_case else str
    index = {key(name): i for i, name in enumerate(names)}
    unknown = {name for name in (*truths, *answers) if key(name.strip()) not in index}
    if unknown:
        raise ValueError(
            f"{min(unknown)!r} is not one of the classes {', '.join(classes)}."
        )
    confusion = np.zeros((len(classes), len(classes)), np.int64)
    for truth, answer in zip(truths, answers, strict=True):
        confusion[index[key(truth.strip())], index[key(answer.strip())]] += 1
    return ClassScores(tuple(classes), confusion)


def calibration_error(confidences: Sequence[float], right: Sequence[bool]) -> float:
    """Compute the expected calibration error (Naeini et al. 2015, Guo et al. 2017).

    ECE = sum over bins of (n_b / n) * |accuracy_b - confidence_b|. The bins have equal width and
    include their upper limit. A confidence is the probability of the answer, from 0 to 1.

    Raises:
        ValueError: The lists differ in length or are empty, or a confidence is out of range.
    """
    confidence = np.asarray(confidences, float)
    is_right = np.asarray(right, float)
    if not len(confidence) or confidence.shape != is_right.shape:
        raise ValueError(
            f"There are {len(confidence)} confidences for {len(is_right)} answers; the numbers "
            "must be equal and above 0."
        )
    if not ((confidence >= 0) & (confidence <= 1)).all():  # also refuses NaN
        raise ValueError("Confidences must be from 0 to 1.")
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    # A bin's size times the difference of its means is the difference of its sums.
    gaps = np.bincount(bins, weights=is_right) - np.bincount(bins, weights=confidence)
    return float(np.abs(gaps).sum() / len(confidence))
