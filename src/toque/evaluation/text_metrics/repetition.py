"""Repetition within a text (rep-4) and variety of a set of texts (distinct-n)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from toque.evaluation.text_metrics.ngram_overlap import distinct_grams, n_grams
from toque.evaluation.text_metrics.token_hashes import U64, Tokens

REPETITION_ORDER = 4


def repetition(words: Tokens) -> NDArray[np.float64]:
    """[texts] share of a text's runs of four words that have stood in it before.

    0 when every run is new; NaN for texts of fewer than four words. (rep-4 of Welleck et al.
    2020.)
    """
    runs = n_grams(words.counts, REPETITION_ORDER)
    distinct = distinct_grams(words, REPETITION_ORDER)
    share = np.full(len(runs), np.nan)
    np.divide(runs - distinct, runs, out=share, where=runs > 0)
    return share


def distinct(parts: Sequence[U64]) -> float | None:
    """Distinct-n of a set of texts, from the hashes of their n-grams in parts (Li et al. 2016).

    The number of different n-grams of all texts together divided by the number of n-grams; None
    when there is no n-gram.
    """
    total = sum(map(len, parts))
    return len(np.unique(np.concatenate(parts))) / total if total else None
