"""ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum (Lin 2004): F1 of each pair of texts.

The scores are bit for bit those of rouge-score 0.1.2, which the tests compare them with. Words are
runs of a-z and 0-9 of the lower-cased text, not stemmed; for Lsum a sentence is a line. Longest
common subsequences are computed in the bits of one integer (Hyyrö 2004), a bit a word of the
reference: 0.4 ms for two recipes, where a table of lengths takes 10.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

NAMES: Final = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_WORD: Final = re.compile("[a-z0-9]+")


def rouge_f1(predictions: Sequence[str], references: Sequence[str]) -> NDArray[np.float64]:
    """[pairs, 4] F1, a column for each of `NAMES`; text i is scored against reference i.

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
        _f1(_summary_hits(reference.split("\n"), prediction.split("\n"), ours), *sizes),
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


def _masks(words: Sequence[str]) -> dict[str, int]:
    """The positions of each word, as bits."""
    masks: dict[str, int] = {}
    for at, word in enumerate(words):
        masks[word] = masks.get(word, 0) | 1 << at
    return masks


def _subsequence_length(reference: Sequence[str], words: Iterable[str]) -> int:
    """Length of the longest common subsequence."""
    masks, every = _masks(reference), (1 << len(reference)) - 1
    # A zero at bit i: the subsequence within reference[: i + 1] is longer than without word i.
    lengths = every
    for word in words:
        if mask := masks.get(word):
            matched = lengths & mask
            lengths = (lengths + matched | lengths - matched) & every
    return len(reference) - lengths.bit_count()


def _summary_hits(reference: Iterable[str], prediction: Iterable[str], words: list[str]) -> int:
    """Words of all reference sentences on a common subsequence with any predicted sentence.

    A word found more often than the prediction's `words` hold it counts as often as they do.
    """
    sentences = [found for line in prediction if (found := _words(line))]
    hit: Counter[str] = Counter()
    for sentence in map(_words, reference):
        masks, union = _masks(sentence), 0
        for predicted in sentences:
            union |= _on_subsequence(len(sentence), masks, predicted)
        hit.update(word for at, word in enumerate(sentence) if union >> at & 1)
    return (hit & Counter(words)).total()


def _on_subsequence(n_words: int, masks: dict[str, int], predicted: Sequence[str]) -> int:
    """The positions, as bits, of the longest common subsequence that rouge-score finds.

    It walks back through the table of lengths: it takes a match, else goes to the word before in
    the prediction if the subsequence would become shorter without the reference's, else to the
    word before in the reference. All steps through the reference beside one predicted word are one
    search for the highest bit; so are those beside a run of words that the reference lacks.
    """
    every = (1 << n_words) - 1
    lengths = every
    columns: list[tuple[int, int]] = []
    for word in predicted:
        if mask := masks.get(word):
            matched = lengths & mask
            lengths = (lengths + matched | lengths - matched) & every
            columns.append((mask, lengths))
        elif columns and columns[-1][0]:
            columns.append((0, lengths))
    found, end = 0, n_words
    for mask, lengths in reversed(columns):
        end = ((mask | ~lengths) & ((1 << end) - 1)).bit_length()
        last = 1 << end >> 1
        if mask & last:
            found |= last
            end -= 1
    return found
