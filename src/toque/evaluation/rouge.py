"""ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004): F1 of each pair of texts.

For ASCII words, the scores equal rouge-score 0.1.2 bit for bit. rouge-score reads only a-z
and 0-9. The words of this module are `folded_words` of any script, not stemmed. Two texts without
words, such as emoji, score 1 if they are equal.

The longest common subsequence is computed in the bits of an integer (Hyyrö 2004), one bit per word
of the reference.
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
    """Score text i against reference i. The result is [pairs, 3], a column for each of `NAMES`.

    >>> rouge_f1(["the cat sat"], ["the cat ran"])[0, 1].item()
    0.5
    """
    rows = [_scores(*pair) for pair in zip(predictions, references, strict=True)]
    return np.array(rows, float).reshape(-1, len(NAMES))


def _scores(prediction: str, reference: str) -> tuple[float, ...]:
    ours, theirs = folded_words(prediction), folded_words(reference)
    if not ours and not theirs and not prediction.isascii():  # such as emoji
        return (float(prediction.strip() == reference.strip()),) * len(NAMES)
    sizes = len(ours), len(theirs)
    bigrams = max(0, sizes[0] - 1), max(0, sizes[1] - 1)
    return (
        _f1(_shared(ours, theirs), *sizes),
        _f1(_shared(pairwise(ours), pairwise(theirs)), *bigrams),
        _f1(_subsequence_length(theirs, ours), *sizes),
    )


def _f1(hits: int, n_predicted: int, n_reference: int) -> float:
    if not hits:
        return 0.0
    precision, recall = hits / n_predicted, hits / n_reference
    return 2 * precision * recall / (precision + recall)


def _shared(ours: Iterable[object], theirs: Iterable[object]) -> int:
    """Count the common items, including repeated ones."""
    return (Counter(ours) & Counter(theirs)).total()


def _subsequence_length(reference: Sequence[str], words: Iterable[str]) -> int:
    """Compute the length of the longest common subsequence."""
    masks: dict[str, int] = {}  # positions of each word, as bits
    for at, word in enumerate(reference):
        masks[word] = masks.get(word, 0) | 1 << at
    # Bit i is zero if word i makes the subsequence within reference[: i + 1] longer.
    lengths = every = (1 << len(reference)) - 1
    for word in words:
        if mask := masks.get(word):
            matched = lengths & mask
            lengths = (lengths + matched | lengths - matched) & every
    return len(reference) - lengths.bit_count()
