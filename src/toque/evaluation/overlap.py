"""How many tokens, or runs of tokens, two texts share: clipped counts for many pairs at once."""

from __future__ import annotations

import numpy as np

from toque.evaluation.tokens import I64, U64, Tokens, grams

MAX_PAIRS = 1024
"""Pairs counted at once: ten bits of a sorting key."""
_PAIR_SHIFT = np.uint64(54)
_ONE = np.uint64(1)


def shared_grams(a: Tokens, b: Tokens, n: int) -> I64:
    """Per pair, the sum over distinct runs of `n` tokens of the smaller of the two counts.

    The numerator of ROUGE-N (Lin 2004) and of BLEU's clipped precision (Papineni et al. 2002).

    Args:
        a: one side, at most `MAX_PAIRS` texts.
        b: the other, text i against text i.
        n: tokens in a run.

    Returns:
        [pairs]
    """
    # One sort brings equal runs of one pair together: pair, hash, side in one integer.
    keys = np.concatenate([_keys(a, n), _keys(b, n) | _ONE])
    keys.sort()
    groups = keys >> _ONE
    first = np.ones(len(groups), bool)
    first[1:] = groups[1:] != groups[:-1]
    starts = np.flatnonzero(first)
    if not len(starts):
        return np.zeros(len(a.counts), np.int64)
    in_b = np.add.reduceat((keys & _ONE).astype(np.int64), starts)
    total = np.diff(starts, append=len(keys))
    smaller = np.minimum(in_b, total - in_b)
    pair = (keys[starts] >> _PAIR_SHIFT).astype(np.int64)
    return np.bincount(pair, weights=smaller, minlength=len(a.counts)).astype(np.int64)


def distinct_grams(tokens: Tokens, n: int) -> I64:
    """[texts] different runs of `n` tokens in each of at most `MAX_PAIRS` texts."""
    keys = np.unique(_keys(tokens, n))
    pair = (keys >> _PAIR_SHIFT).astype(np.int64)
    return np.bincount(pair, minlength=len(tokens.counts)).astype(np.int64)


def n_grams(counts: I64, n: int) -> I64:
    """Runs of `n` tokens in texts of `counts` tokens."""
    return np.maximum(counts - (n - 1), 0)


def _keys(tokens: Tokens, n: int) -> U64:
    hashes, texts = grams(tokens.hashes, tokens.texts, n)
    return (texts.astype(np.uint64) << _PAIR_SHIFT) | ((hashes >> np.uint64(11)) << _ONE)
