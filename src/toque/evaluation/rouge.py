"""ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004): F1 of each pair of texts.

The scores are bit for bit those of rouge-score 0.1.2, which the tests compare them with. Words are
runs of a-z and 0-9 of the lower-cased text, not stemmed. Longest common subsequences are computed
in the bits of one integer (Hyyrö 2004), a bit a word of the reference.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

NAMES: Final = ("rouge1", "rouge2", "rougeL")
_WORD: Final = re.compile("[a-z0-9]+")


def rouge_f1(predictions: Sequence[str], references: Sequence[str]) -> NDArray[np.float64]:
    """[pairs, 3] F1, a column for each of `NAMES`; text i is scored against reference i.

    >>> rouge_f1(["the cat sat"], ["the cat ran"])[0, 1].item()
    0.5
    """
    rows = [_scores(*pair) for pair in zip(predictions, references, strict=True)]
    return np.array(rows, float).reshape(-1, len(NAMES))


def _scores(prediction: str, reference: str) -> tuple[float, ...]:
    ours, theirs = _words(prediction), _words(reference)
    sizes = len(ours), len(theirs)
    bigrams = max(0, sizes[0] - 1), max(0, sizes[1] - 1)
    return (
        _f1(_shared(ours, theirs), *sizes),
        _f1(_shared(pairwise(ours), pairwise(theirs)), *bigrams),
        _f1(_subsequence_length(theirs, ours), *sizes),
    )


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _f1(hits: int, n_predicted: int, n_reference: int) -> float:
    if not hits:
        return 0.0
    precision, recall = hits / n_predicted, hits / n_reference
    return 2 * precision * recall / (precision + recall)


def _shared(ours: Iterable[object], theirs: Iterable[object]) -> int:
    """Number of ours among theirs, each counted as often as both sides have it."""
    return (Counter(ours) & Counter(theirs)).total()


def _subsequence_length(reference: Sequence[str], words: Iterable[str]) -> int:
    """Length of the longest common subsequence."""
    masks: dict[str, int] = {}  # the positions of each word, as bits
    for at, word in enumerate(reference):
        masks[word] = masks.get(word, 0) | 1 << at
    # A zero at bit i: the subsequence within reference[: i + 1] is longer than without word i.
    lengths = every = (1 << len(reference)) - 1
    for word in words:
        if mask := masks.get(word):
            matched = lengths & mask
            lengths = (lengths + matched | lengths - matched) & every
    return len(reference) - lengths.bit_count()
