"""Scores of short answers: exact match, token F1, valid JSON, and F1 of classes."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from toque.evaluation.script_words import folded_words

Floats = NDArray[np.float64]


def exact_match(text: str, reference: str) -> float:
    """Return 1 if text and reference are equal, except for surrounding whitespace, otherwise 0."""
    return float(text.strip() == reference.strip())


def token_f1(text: str, reference: str) -> float:
    """Compute the F1 of the words of text and reference, without case and punctuation.

    F1 = 2 common / (words of text + words of reference), as in SQuAD (Rajpurkar et al. 2016). The
    scorer of SQuAD also removes English articles. Words are `folded_words` of the NFKC form, which
    turns "½" into "1/2". Two texts without words are compared by `exact_match`.

    >>> token_f1("In the pot.", "the POT"), token_f1("", "pot"), token_f1("红茶", "绿茶")
    (0.8, 0.0, 0.5)
    """
    words = Counter(folded_words(unicodedata.normalize("NFKC", text)))
    expected = Counter(folded_words(unicodedata.normalize("NFKC", reference)))
    n = words.total() + expected.total()
    if n == 0:
        return exact_match(text, reference)
    return 2 * (words & expected).total() / n


def valid_json(text: str) -> float:
    """Return 1 if a text is a JSON value (RFC 8259: no NaN, no Infinity), otherwise 0."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0


def _refuse(name: str) -> object:
    raise ValueError(name)


def class_counts(
    texts: Sequence[str], references: Sequence[str], classes: Sequence[str]
) -> Floats:
    """Encode true class, answered class and right answer by 0 and 1, [texts, 3 * classes]."""
    true = _one_hot(references, classes)
    answered = _one_hot(texts, classes)
    return np.concatenate([true, answered, true * answered], axis=1)


def _one_hot(texts: Sequence[str], classes: Sequence[str]) -> Floats:
    """Mark the class of each text by 1, [texts, classes]. A text that is not a class has only 0."""
    return np.array(
        [[text.strip() == name for name in classes] for text in texts], float
    )


def macro_f1_of(sums: Floats) -> Floats:
    """Compute the mean F1 over the classes that occur, from sums of `class_counts`.

    The result is NaN if no class occurs.
    """
    occurs = np.split(sums, 3, axis=-1)[0] > 0
    n_classes = occurs.sum(axis=-1)
    total = np.where(occurs, f1_of(sums), 0.0).sum(axis=-1)
    return np.where(n_classes > 0, total / np.maximum(n_classes, 1), np.nan)


def f1_of(sums: Floats) -> Floats:
    """Compute F1 per class from sums of `class_counts`: 2 right / (true + answered).

    F1 is 0 for a class without examples and answers.
    """
    true, answered, right = np.split(sums, 3, axis=-1)
    f1: Floats = 2 * right / np.maximum(true + answered, 1)
    return f1
