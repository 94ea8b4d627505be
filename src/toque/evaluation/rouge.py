"""ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004): F1 of each pair of texts.

For ASCII words, the scores are bitwise identical to the scores of rouge-score 0.1.2, which reads
only a-z and 0-9. This module scores `folded_words` of any script, without stemming. Two texts
without words, such as emoji, score 1 if they are equal.

The longest common subsequence is computed in the bits of an integer (Hyyrö 2004), with one bit per
word of the reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from toque.evaluation.script_words import folded_words

NAMES: Final = ("rouge1", "rouge2", "rougeL")


def rouge_f1(
    predictions: Sequence[str], references: Sequence[str]
) -> NDArray[np.float64]:
    """Score prediction i against reference i. The result is [pairs, 3], a column per `NAMES`.

    >>> rouge_f1(["the cat sat"], ["the cat ran"])[0, 1].item()
    0.5
    """
    pairs = zip(predictions, references, strict=True)
    scores = [_score_pair(prediction, reference) for prediction, reference in pairs]
    return np.array(scores, float).reshape(-1, len(NAMES))


def _score_pair(prediction: str, reference: str) -> tuple[float, float, float]:
    """Compute the scores of a pair of texts, in order of `NAMES`."""
    ours = folded_words(prediction)
    theirs = folded_words(reference)
    if not ours and not theirs and not prediction.isascii():  # such as emoji
        is_equal = float(prediction.strip() == reference.strip())
        return is_equal, is_equal, is_equal
    n_words = len(ours), len(theirs)
    n_bigrams = max(0, len(ours) - 1), max(0, len(theirs) - 1)
    return (
        _f1(_count_shared(ours, theirs), *n_words),
        _f1(_count_shared(pairwise(ours), pairwise(theirs)), *n_bigrams),
        _f1(_subsequence_length(theirs, ours), *n_words),
    )


def _f1(hits: int, n_predicted: int, n_reference: int) -> float:
    """Compute the F1 of `hits` shared items among predicted and reference items."""
    if not hits:
        return 0.0
    precision, recall = hits / n_predicted, hits / n_reference
    return 2 * precision * recall / (precision + recall)


def _count_shared(ours: Iterable[object], theirs: Iterable[object]) -> int:
    """Count the shared items. An item counts as often as it occurs in both."""
    return (Counter(ours) & Counter(theirs)).total()


def _subsequence_length(reference: Sequence[str], words: Iterable[str]) -> int:
    """Compute the length of the longest common subsequence."""
    masks: dict[str, int] = {}  # bits of the positions of each word
    for i, word in enumerate(reference):
        masks[word] = masks.get(word, 0) | 1 << i
    # Bit i is zero if word i makes the subsequence within reference[: i + 1] longer.
    all_bits = (1 << len(reference)) - 1
    bits = all_bits
    for word in words:
        if mask := masks.get(word):
            matched = bits & mask
            bits = (bits + matched | bits - matched) & all_bits
    return len(reference) - bits.bit_count()
