"""Classification scores: accuracy, macro-F1, the confusion matrix and the calibration error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from toque.evaluation.answer_scores import f1_of, macro_f1_of

BINS: Final = 10
"""Number of confidence bins for the calibration error."""
MAX_MISTAKES: Final = 3
"""Maximum number of wrong answers to list per class, the most frequent first."""
_Row = tuple[str, str, str, str, str]
"""Cells of a row in the table of classes."""


@dataclass(frozen=True)
class ClassScores:
    """Confusion matrix and the scores computed from it."""

    classes: tuple[str, ...]
    confusion: NDArray[np.int64]
    """[classes, classes] Number of examples by true class and answer."""

    @property
    def accuracy(self) -> float:
        """Fraction of correct answers."""
        return float(np.trace(self.confusion) / self.confusion.sum())

    @property
    def majority(self) -> float:
        """Baseline: the accuracy if every answer is the most frequent class."""
        return float(self.confusion.sum(axis=1).max() / self.confusion.sum())

    @property
    def f1(self) -> dict[str, float]:
        """F1 by class. A class without examples and answers has an F1 of 0."""
        return dict(zip(self.classes, f1_of(self._sums).tolist(), strict=True))

    @property
    def macro_f1(self) -> float:
        """Mean F1 over the classes with at least one example."""
        return float(macro_f1_of(self._sums))

    @property
    def _sums(self) -> NDArray[np.float64]:
        """Sums of `class_counts`: examples, answers and correct answers per class."""
        n_true = self.confusion.sum(axis=1)
        n_answered = self.confusion.sum(axis=0)
        n_correct = np.diag(self.confusion)
        return np.concatenate((n_true, n_answered, n_correct)).astype(float)

    def lines(self) -> list[str]:
        """Format a table with one line per class."""
        heads, rows = class_rows(self.classes, self.confusion.tolist())
        width = max(map(len, self.classes)) + 2
        return [
            f"{name:<{width}}{n_true:>7}{n_correct:>7}{f1:>9}   {mistakes}".rstrip()
            for name, n_true, n_correct, f1, mistakes in (heads, *rows)
        ]


def class_rows(
    names: Sequence[str], confusion: Sequence[Sequence[int]]
) -> tuple[_Row, list[_Row]]:
    """Make the column heads and rows of a table of classes.

    The columns are the true class, its examples, the correct answers, F1 and the most frequent
    mistakes. Classes without examples and answers are left out.

    >>> class_rows(["Thai", "Greek"], [[3, 1], [0, 2]])[1]
    [('Thai', '4', '3', '0.857', 'Greek 1'), ('Greek', '2', '2', '0.800', '')]
    """
    rows: list[_Row] = []
    for at, (name, counts) in enumerate(zip(names, confusion, strict=True)):
        n_true = sum(counts)
        n_answered = sum(row[at] for row in confusion)
        if not n_true and not n_answered:
            continue
        f1 = 2 * counts[at] / (n_true + n_answered)
        mistakes = ", ".join(_list_mistakes(names, counts, at))
        rows.append((name, f"{n_true:,}", f"{counts[at]:,}", f"{f1:.3f}", mistakes))
    return ("true class", "total", "right", "F1", "mistaken for"), rows


def _list_mistakes(names: Sequence[str], counts: Sequence[int], true: int) -> list[str]:
    """List the wrong answers for the class at index `true`, with their counts."""
    wrong = [i for i, n in enumerate(counts) if n and i != true]
    wrong.sort(key=lambda i: -counts[i])
    mistakes = [f"{names[i]} {counts[i]:,}" for i in wrong[:MAX_MISTAKES]]
    if n_others := sum(counts[i] for i in wrong[MAX_MISTAKES:]):
        mistakes.append(f"others {n_others:,}")
    return mistakes


def class_scores(
    answers: Sequence[str], truths: Sequence[str], classes: Sequence[str]
) -> ClassScores:
    """Count the answers by true class.

    Surrounding whitespace is ignored. Case is also ignored, unless two classes differ only in case.

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
    fold = str.casefold if ignores_case else str
    index = {fold(name): i for i, name in enumerate(names)}
    index_of = {name: index.get(fold(name.strip())) for name in (*truths, *answers)}
    unknown = [name for name, i in index_of.items() if i is None]
    if unknown:
        raise ValueError(
            f"{min(unknown)!r} is not one of the classes {', '.join(classes)}."
        )
    confusion = np.zeros((len(classes), len(classes)), np.int64)
    for truth, answer in zip(truths, answers, strict=True):
        confusion[index_of[truth], index_of[answer]] += 1
    return ClassScores(tuple(classes), confusion)


def calibration_error(confidences: Sequence[float], right: Sequence[bool]) -> float:
    """Compute the expected calibration error (Naeini et al. 2015, Guo et al. 2017).

    ECE = sum over bins b of (n_b / n) * |accuracy_b - confidence_b|. The bins have equal width and
    include their upper limit. A confidence is the probability of an answer, from 0 to 1.

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
        raise ValueError("Confidences must be between 0 and 1.")
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    # A bin's size times the difference of its means is the difference of its sums.
    gaps = np.bincount(bins, weights=is_right) - np.bincount(bins, weights=confidence)
    return float(np.abs(gaps).sum() / len(confidence))
