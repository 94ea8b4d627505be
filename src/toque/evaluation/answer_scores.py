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
    """Return 1 if the text equals the reference, except for surrounding whitespace. Otherwise 0."""
    return float(text.strip() == reference.strip())


def token_f1(text: str, reference: str) -> float:
    """Compute the F1 of the words of text and reference, without case and punctuation.

    F1 = 2 common / (words of text + words of reference), as in SQuAD (Rajpurkar et al. 2016). The
    scorer of SQuAD also removes English articles. Words are `folded_words`, after "½" becomes
    "1/2". Two texts without words are compared by `exact_match`.

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
    """Return 1 if a text is a JSON value (RFC 8259: no NaN, no Infinity). Otherwise 0."""
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
    """Mark the true class, the answered class and right answers by 1. Shape: [texts, 3 classes]."""
    true = np.array(
        [[text.strip() == name for name in classes] for text in references], float
    )
    answered = np.array(
        [[text.strip() == name for name in classes] for text in texts], float
    )
    return np.concatenate([true, answered, true * answered], axis=1)


def macro_f1_of(sums: Floats) -> Floats:
    """Compute the mean F1 over the classes that occur, from sums of `class_counts`.

    It is NaN if no class occurs.
    """
    true = np.split(sums, 3, axis=-1)[0] > 0
    n = true.sum(axis=-1)
    total = np.where(true, f1_of(sums), 0.0).sum(axis=-1)
    return np.where(n > 0, total / np.maximum(n, 1), np.nan)


def f1_of(sums: Floats) -> Floats:
    """Compute F1 per class: 2 right / (true + answered), or 0 for an unused class."""
    true, answered, right = np.split(sums, 3, axis=-1)
    f1: Floats = 2 * right / np.maximum(true + answered, 1)
    return f1
