"""Scores of short answers: exact match, token F1, valid JSON, and those of classes."""

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
    """1 for the reference, blanks at the ends aside; else 0."""
    return float(text.strip() == reference.strip())


def token_f1(text: str, reference: str) -> float:
    """F1 of the words of both; letter case and punctuation do not matter.

    F1 = 2 common / (words of one + words of the other), as SQuAD has it (Rajpurkar et al. 2016),
    whose scorer leaves out English articles, too. Words are `folded_words`, where "½" is "1/2".
    Two texts without words are compared by `exact_match`.

    >>> token_f1("In the pot.", "the POT"), token_f1("", "pot"), token_f1("红茶", "绿茶")
    (0.8, 0.0, 0.5)
    """
    mine, its = (
        Counter(folded_words(unicodedata.normalize("NFKC", one))) for one in (text, reference)
    )
    n = mine.total() + its.total()
    return 2 * (mine & its).total() / n if n else exact_match(text, reference)


def valid_json(text: str) -> float:
    """1 for a text that is one JSON value (RFC 8259: no NaN, no Infinity); else 0."""
    try:
        json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0


def _refused(name: str) -> object:
    raise ValueError(name)


def class_counts(texts: Sequence[str], references: Sequence[str], classes: Sequence[str]) -> Floats:
    """[texts, 3 classes] ones and zeros: the true class, the answered one, the right answer."""
    true, answered = (
        np.array([[one.strip() == name for name in classes] for one in some], float)
        for some in (references, texts)
    )
    return np.concatenate([true, answered, true * answered], axis=1)


def macro_f1_of(sums: Floats) -> Floats:
    """Mean F1 over the classes that are true of any text, from sums of `class_counts`; else NaN."""
    true = np.split(sums, 3, axis=-1)[0] > 0
    n = true.sum(axis=-1)
    total = np.where(true, f1_of(sums), 0.0).sum(axis=-1)
    return np.where(n > 0, total / np.maximum(n, 1), np.nan)


def f1_of(sums: Floats) -> Floats:
    """F1 of each class, 2 right / (true + answered); 0 for one neither true nor answered."""
    true, answered, right = np.split(sums, 3, axis=-1)
    f1: Floats = 2 * right / np.maximum(true + answered, 1)
    return f1
