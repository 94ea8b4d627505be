"""How many tokens, or runs of tokens, two texts share: clipped counts for many pairs at once."""

from __future__ import annotations

import numpy as np

from toque.evaluation.text_metrics.token_hashes import I64, U64, Tokens, runs_from

MAX_PAIRS = 1024
"""Pairs counted at once: ten bits of a sorting key."""
_PAIR_SHIFT = np.uint64(54)
_ONE = np.uint64(1)
_LAST = np.array([2**64 - 1], np.uint64)
"""Behind all keys, so that looking one step further finds something else."""


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
    # One sort brings equal runs of one pair together: pair, hash, side in one integer. A run that
    # p times stands on one side and q times on the other is p even keys, then q odd ones, and
    # min(p, q) the number of steps one can go from between them both ways.
    keys = np.concatenate([_runs(a, n), _runs(b, n) | _ONE, _LAST])
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


def distinct_grams(tokens: Tokens, n: int) -> I64:
    """[texts] different runs of `n` tokens in each of at most `MAX_PAIRS` texts."""
    keys = np.unique(_runs(tokens, n))
    keys = keys[keys != _LAST]
    pair = (keys >> _PAIR_SHIFT).astype(np.int64)
    return np.bincount(pair, minlength=len(tokens.counts)).astype(np.int64)


def n_grams(counts: I64, n: int) -> I64:
    """Runs of `n` tokens in texts of `counts` tokens."""
    return np.maximum(counts - (n - 1), 0)


def _runs(tokens: Tokens, n: int) -> U64:
    """Keys of the runs from each token on; of those that leave their text, a key nobody shares."""
    last = max(0, len(tokens.hashes) - n + 1)
    keys = runs_from(tokens.hashes, n)
    keys >>= np.uint64(11)
    keys <<= _ONE
    keys |= tokens.texts[:last].astype(np.uint64) << _PAIR_SHIFT
    if n > 1:
        across = np.subtract.outer(np.cumsum(tokens.counts), np.arange(1, n)).ravel()
        keys[across[(across >= 0) & (across < last)]] = _LAST
    return keys
