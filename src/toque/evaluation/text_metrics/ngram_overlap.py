"""N-gram counts of many texts at once: shared with a reference (clipped), distinct, and all.

Repetition within a text (rep-4) and variety of a set of texts (distinct-n) are made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from toque.evaluation.text_metrics.token_hashes import I64, U64, HashedTokens
from toque.keyed_random import mixed

MAX_PAIRS: Final = 1024
"""Pairs counted at once: ten bits of a sorting key."""
REPETITION_ORDER: Final = 4
_PAIR_SHIFT = np.uint64(54)
_ONE = np.uint64(1)
_BASE = np.uint64(0x9E3779B97F4A7C15)
_LAST = np.array([2**64 - 1], np.uint64)
"""A key larger than all others, so that looking one step further finds something else."""


def grams(tokens: HashedTokens, n: int) -> tuple[U64, I64]:
    """Hash of each run of `n` tokens within one text, and the number of that text."""
    last = max(0, len(tokens.hashes) - n + 1)
    hashes = tokens.hashes[:last].copy()
    for k in range(1, n):
        hashes *= _BASE
        hashes += tokens.hashes[k : k + last]
    within = tokens.texts[:last] == tokens.texts[n - 1 :]
    return mixed(hashes[within]), tokens.texts[:last][within]


def n_grams(counts: I64, n: int) -> I64:
    """Runs of `n` tokens in texts of `counts` tokens."""
    return np.maximum(counts - (n - 1), 0)


def repetition(words: HashedTokens) -> NDArray[np.float64]:
    """[texts] share of a text's runs of four words that stand in it earlier already.

    0 when every run is new; NaN for texts of fewer than four words. (rep-4 of Welleck et al.
    2020.) At most `MAX_PAIRS` texts.
    """
    runs = n_grams(words.counts, REPETITION_ORDER)
    text = (np.unique(_keys(words, REPETITION_ORDER)) >> _PAIR_SHIFT).astype(np.int64)
    repeated = runs - np.bincount(text, minlength=len(runs))
    share = np.full(len(runs), np.nan)
    np.divide(repeated, runs, out=share, where=runs > 0)
    return share


def distinct(parts: Sequence[U64]) -> float | None:
    """Distinct-n of a set of texts, from the hashes of their n-grams in parts (Li et al. 2016).

    The number of different n-grams of all texts together divided by the number of n-grams; None
    when there is no n-gram.
    """
    total = sum(map(len, parts))
    return len(np.unique(np.concatenate(parts))) / total if total else None


def shared_grams(a: HashedTokens, b: HashedTokens, n: int) -> I64:
    """[pairs] runs of `n` tokens that both texts have, counted as often as both have them.

    The numerator of BLEU's clipped precision (Papineni et al. 2002). At most `MAX_PAIRS` texts a
    side, text i against text i.
    """
    # One sort brings equal runs of one pair together: pair, hash, side in one integer. A run that
    # p times stands on one side and q times on the other is p even keys, then q odd ones, and
    # min(p, q) the number of steps one can go from between them both ways.
    keys = np.concatenate([_keys(a, n), _keys(b, n) | _ONE, _LAST])
    keys.sort()
    found = np.zeros(len(a.counts), np.int64)
    met = np.flatnonzero((keys[:-1] ^ keys[1:]) == _ONE)
    step = 0
    while len(met):
        pair = (keys[met] >> _PAIR_SHIFT).astype(np.int64)
        found += np.bincount(pair, minlength=len(found))
        step += 1
        met = met[keys[met - step] == keys[met]]
        met = met[keys[met + (1 + step)] == keys[met + 1]]
    return found


def _keys(tokens: HashedTokens, n: int) -> U64:
    """A key of each run: ten bits for the pair, 53 of the hash, and a zero for the side."""
    hashes, texts = grams(tokens, n)
    return (texts.astype(np.uint64) << _PAIR_SHIFT) | (hashes >> np.uint64(11) << _ONE)
