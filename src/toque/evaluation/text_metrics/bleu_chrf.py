"""BLEU (Papineni et al. 2002) and chrF (Popovic 2015) from sufficient statistics per text.

The numbers are sacrebleu 2.6's: BLEU as `nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp`, chrF as
`nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no`. Both are from 0 to 100 and belong to a set of
texts; they are not means over texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from toque.evaluation.text_metrics.ngram_overlap import n_grams, shared_grams
from toque.evaluation.text_metrics.token_hashes import HashedTokens, characters

BLEU_ORDER: Final = 4
CHRF_ORDER: Final = 6
CHRF_BETA: Final = 2.0


def bleu_counts(ours: HashedTokens, theirs: HashedTokens) -> NDArray[np.float64]:
    """[pairs, 10] words of the prediction and the reference, then matches and n-grams, n = 1 to 4.

    Args:
        ours: words of the predictions, at most `MAX_PAIRS`.
        theirs: words of the references, text i for prediction i.
    """
    orders = range(1, BLEU_ORDER + 1)
    matches = [shared_grams(ours, theirs, n) for n in orders]
    totals = [n_grams(ours.counts, n) for n in orders]
    return np.stack([ours.counts, theirs.counts, *matches, *totals], axis=1).astype(float)


def bleu_of(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """BLEU of summed counts, [..., 10] to [...].

    The geometric mean of the four precisions times exp(1 - reference / prediction) where the
    prediction is shorter; the k-th precision without a match counts as 1 / 2**k matches (NIST's
    smoothing, Chen and Cherry 2014, method 3).
    """
    ours, theirs = counts[..., 0], counts[..., 1]
    matches, totals = counts[..., 2 : 2 + BLEU_ORDER], counts[..., 2 + BLEU_ORDER :]
    missing = np.cumsum(matches == 0, axis=-1)
    smoothed = np.where(matches > 0, matches, 0.5**missing)
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.log(100.0 * smoothed / totals).mean(axis=-1)
        brevity = np.minimum(1.0, np.exp(1.0 - theirs / ours))
        score = brevity * np.exp(precision)
    scored = (matches.sum(axis=-1) > 0) & (totals.min(axis=-1) > 0)
    return np.where(scored, score, 0.0)


def chrf_counts(predictions: Sequence[str], references: Sequence[str]) -> NDArray[np.float64]:
    """Character n-grams of the prediction, of the reference, and of both, for n = 1 to 6.

    Returns:
        [pairs, 18]; white space is not counted, and the prediction's n-grams neither where the
        reference has none.
    """
    ours, theirs = characters(predictions), characters(references)
    columns = []
    for n in range(1, CHRF_ORDER + 1):
        in_reference = n_grams(theirs.counts, n)
        in_prediction = np.where(in_reference > 0, n_grams(ours.counts, n), 0)
        columns += [in_prediction, in_reference, shared_grams(ours, theirs, n)]
    return np.stack(columns, axis=1).astype(float)


def chrf_of(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """ChrF2 of summed counts, [..., 18] to [...].

    F-beta with beta 2 of the mean precision and the mean recall over the n that both sides have.
    """
    by_order = counts.reshape(*counts.shape[:-1], CHRF_ORDER, 3)
    ours, theirs, matches = by_order[..., 0], by_order[..., 1], by_order[..., 2]
    both = (ours > 0) & (theirs > 0)
    orders = np.maximum(both.sum(axis=-1), 1)
    precision = np.where(both, matches / np.maximum(ours, 1), 0.0).sum(axis=-1) / orders
    recall = np.where(both, matches / np.maximum(theirs, 1), 0.0).sum(axis=-1) / orders
    weighted = CHRF_BETA**2 * precision + recall
    score = (1 + CHRF_BETA**2) * precision * recall / np.where(weighted > 0, weighted, 1.0)
    return np.asarray(100.0 * score)
