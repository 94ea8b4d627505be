"""ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum (Lin 2004) of many pairs at once.

The numbers are those of rouge-score 0.1.2 with its default tokenizer: words are runs of a-z and
0-9 of the lower-cased text; for Lsum a sentence is a line, and tokens are not counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from toque.evaluation.text_metrics.lcs import (
    WORD,
    lcs_lengths,
    lcs_positions,
    long_lcs_positions,
    ranks,
)
from toque.evaluation.text_metrics.ngram_overlap import n_grams, shared_grams
from toque.evaluation.text_metrics.porter import stemmed
from toque.evaluation.text_metrics.token_hashes import I64, U64, Tokens, word_tokens

NAMES: Final = ("rouge1", "rouge2", "rougeL", "rougeLsum")
PLACE_BITS: Final = 21
"""Bits of a token's place among those of a chunk, for keys that are sorted."""
FEW: Final = 64
"""Problems for which a turn of numpy costs more than one by one; a guess from one machine."""
_ONE: Final = np.uint64(1)
_PLACE: Final = (1 << PLACE_BITS) - 1
Flags = NDArray[np.bool_]


def rouge(
    predictions: Sequence[str], references: Sequence[str], *, stem: bool = False
) -> dict[str, np.ndarray]:
    """Precision, recall and F1 of every pair.

    Args:
        predictions: texts to score, at most `overlap.MAX_PAIRS`.
        references: text i is what prediction i is compared with.
        stem: reduce words of more than three letters by Porter's rules first, as rouge-score's
            `use_stemmer=True`.

    Returns:
        For each of `NAMES` a float array [pairs, 3].

    >>> rouge(["the cat sat"], ["the cat ran"])["rouge2"].tolist()
    [[0.5, 0.5, 0.5]]
    """
    candidate, reference = word_tokens(predictions), word_tokens(references)
    if stem:
        candidate, reference = stemmed(candidate), stemmed(reference)
    sizes = (candidate.counts, reference.counts)
    bigrams = tuple(n_grams(n, 2) for n in sizes)
    shared = _Shared.of(candidate, reference)
    return {
        "rouge1": _scores(shared.n_unigrams, *sizes),
        "rouge2": _scores(shared_grams(candidate, reference, 2), *bigrams),
        "rougeL": _scores(_longest(shared), *sizes),
        "rougeLsum": _scores(_union(shared), *sizes),
    }


def _scores(hits: I64, n_candidate: I64, n_reference: I64) -> np.ndarray:
    precision = hits / np.maximum(n_candidate, 1)
    recall = hits / np.maximum(n_reference, 1)
    total = precision + recall
    f1 = np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0)
    return np.stack([precision, recall, f1], axis=1)


@dataclass(frozen=True)
class _Side:
    """The tokens of one side that occur on the other side of their pair too, in text order."""

    words: I64
    """Number of the word; equal words of one pair have equal numbers, of two pairs never."""
    pairs: I64
    sentences: I64
    places: I64
    """Position among all tokens of the side, shared or not."""
    goes_on: Flags
    """Whether any token, shared or not, follows in the sentence."""


@dataclass(frozen=True)
class _Shared:
    """What two sides of a chunk of pairs have in common."""

    candidate: _Side
    reference: _Side
    by_word: I64
    """Order of the reference's tokens by word; those of one word stay in text order."""
    pair_of: I64
    """[words] the pair a word belongs to."""
    n_unigrams: I64
    """[pairs] common words, counted as often as they stand on both sides."""

    @classmethod
    def of(cls, candidate: Tokens, reference: Tokens) -> _Shared:
        """Number the words of each pair, and keep those on both sides."""
        pairs = np.concatenate([candidate.texts, reference.texts])
        hashes = np.concatenate([candidate.hashes, reference.hashes])
        keys = (pairs.astype(np.uint64) << np.uint64(54)) | (hashes >> np.uint64(10))
        order = np.argsort(keys)
        new = _changes(keys[order])
        words = np.empty(len(keys), np.int64)
        words[order] = np.cumsum(new) - 1
        pair_of, n = pairs[order[new]], len(candidate.hashes)
        held = np.bincount(words[:n], minlength=len(pair_of))
        smaller = np.minimum(held, np.bincount(words[n:], minlength=len(pair_of)))
        kept = _side(reference, words[n:], smaller > 0)
        return cls(
            candidate=_side(candidate, words[:n], smaller > 0),
            reference=kept,
            by_word=_order(kept.words),
            pair_of=pair_of,
            n_unigrams=_sums(pair_of, smaller, len(candidate.counts)),
        )


def _side(tokens: Tokens, words: I64, on_both: Flags) -> _Side:
    kept = np.flatnonzero(on_both[words])
    goes_on = np.zeros(len(words), bool)
    goes_on[:-1] = tokens.sentences[1:] == tokens.sentences[:-1]
    return _Side(words[kept], tokens.texts[kept], tokens.sentences[kept], kept, goes_on[kept])


def _longest(shared: _Shared) -> I64:
    """[pairs] length of the longest common subsequence of the whole texts."""
    reference, candidate = ((s.words, s.pairs) for s in (shared.reference, shared.candidate))
    return lcs_lengths(reference, candidate, len(shared.n_unigrams))


def _union(shared: _Shared) -> I64:
    """[pairs] hits of ROUGE-Lsum.

    For each reference sentence the union of its longest common subsequences with every candidate
    sentence; of a token that is hit more often than the candidate holds it, the surplus is not
    counted.
    """
    candidate, reference = shared.candidate, shared.reference
    n_pairs, n_words = len(shared.n_unigrams), len(shared.pair_of)
    if not len(reference.words):
        return np.zeros(n_pairs, np.int64)
    on_path = _Problems.of(candidate, reference, shared.by_word, n_words).on_path()
    found = np.bincount(reference.words[on_path], minlength=n_words)
    held = np.bincount(candidate.words, minlength=n_words)
    return _sums(shared.pair_of, np.minimum(found, held), n_pairs)


@dataclass(frozen=True)
class _Problems:
    """A reference sentence against a candidate sentence, for all that share a word.

    An entry is a distinct word of a reference sentence; a meeting a candidate's token with an
    entry of its word. Meetings stand by reference sentence, then in the candidate's order.
    """

    sentences: I64
    """[reference tokens] dense numbers of their sentences."""
    positions: I64
    """[reference tokens] within their sentences."""
    occurrences: I64
    """Reference tokens, entry after entry."""
    firsts: I64
    """[entries] where an entry's occurrences begin."""
    entries: I64
    """[meetings]"""
    lengths: I64
    """[problems] meetings of each."""
    owners: I64
    """[problems] their reference sentence."""
    skipped: Flags
    """[meetings] whether tokens without one stand between it and the next, or the end."""

    @classmethod
    def of(cls, candidate: _Side, reference: _Side, by_word: I64, n_words: int) -> _Problems:
        """Join both sides on the words."""
        words, dense = reference.words[by_word], np.cumsum(_changes(reference.sentences)) - 1
        sentences = dense[by_word]
        firsts = np.flatnonzero(_changes(words) | _changes(sentences))
        words, sentences = words[firsts], sentences[firsts]
        count = np.bincount(words, minlength=n_words)
        repeats = count[candidate.words]
        token = np.repeat(np.arange(len(repeats)), repeats)
        offset = (np.cumsum(count) - count)[candidate.words] - (np.cumsum(repeats) - repeats)
        entry = np.arange(len(token)) + np.repeat(offset, repeats)
        keys = (sentences[entry] << 2 * PLACE_BITS) | (token << PLACE_BITS) | entry
        keys.sort()
        entry, token = keys & _PLACE, (keys >> PLACE_BITS) & _PLACE
        sentence, place = sentences[entry], candidate.places[token]
        starts = np.flatnonzero(_changes(sentence) | _changes(candidate.sentences[token]))
        lengths = np.diff(starts, append=len(entry))
        skipped = np.ones(len(entry), bool)
        skipped[:-1] = place[1:] != place[:-1] + 1
        last = starts + lengths - 1
        skipped[last] = candidate.goes_on[token[last]]
        places = ranks(dense)
        return cls(dense, places, by_word, firsts, entry, lengths, sentence[starts], skipped)

    def on_path(self) -> Flags:
        """[reference tokens] whether one is on a common subsequence with any candidate sentence."""
        n_sentences = int(self.sentences[-1]) + 1
        size = np.bincount(self.sentences, minlength=n_sentences)
        longest = np.sort(self.lengths)[-FEW:][0]
        alone = (size[self.owners] > WORD) | (self.lengths > longest)
        union = np.zeros(n_sentences, np.uint64)
        np.bitwise_or.at(union, *self._together(np.flatnonzero(~alone)))
        wide = self._one_by_one(np.flatnonzero(alone))
        for sentence in [s for s in wide if size[s] <= WORD]:
            union[sentence] |= np.uint64(wide.pop(sentence))
        place = np.minimum(self.positions, WORD).astype(np.uint64)
        reached: Flags = (union[self.sentences] >> place) & _ONE != 0
        for sentence, found in wide.items():
            first, n = int(np.searchsorted(self.sentences, sentence)), int(size[sentence])
            reached[first : first + n] = [found >> i & 1 for i in range(n)]
        return reached

    def _together(self, problems: I64) -> tuple[I64, U64]:
        """Reference sentences and their positions as bits, one of each a problem."""
        positions = np.minimum(self.positions[self.occurrences], WORD).astype(np.uint64)
        masks = np.bitwise_or.reduceat(_ONE << positions, self.firsts)
        problems = problems[_order(self.lengths[problems])[::-1]]
        starts = np.cumsum(self.lengths) - self.lengths
        found = lcs_positions(
            masks, self.entries, starts[problems], self.lengths[problems], self.skipped
        )
        return self.owners[problems], found

    def _one_by_one(self, problems: I64) -> dict[int, int]:
        """Positions by reference sentence, as Python's integers."""
        ends, starts = np.append(self.firsts[1:], len(self.occurrences)), np.cumsum(self.lengths)
        starts -= self.lengths
        masks: dict[int, int] = {}
        union: dict[int, int] = {}
        for problem in problems.tolist():
            start = int(starts[problem])
            meetings = slice(start, start + int(self.lengths[problem]))
            entries = self.entries[meetings].tolist()
            for entry in entries:
                if entry not in masks:
                    tokens = self.occurrences[self.firsts[entry] : ends[entry]]
                    masks[entry] = sum(1 << p for p in self.positions[tokens].tolist())
            matches = [masks[entry] for entry in entries]
            found = long_lcs_positions(matches, self.skipped[meetings].tolist())
            owner = int(self.owners[problem])
            union[owner] = union.get(owner, 0) | found
        return union


def _changes(groups: np.ndarray) -> Flags:
    """Whether each element differs from the one before it; the first does."""
    new = np.ones(len(groups), bool)
    new[1:] = groups[1:] != groups[:-1]
    return new


def _order(values: I64) -> I64:
    """What sorts `values`, equal ones in their order; one plain sort is faster than argsort."""
    keys = (values << PLACE_BITS) | np.arange(len(values))
    keys.sort()
    return keys & _PLACE


def _sums(groups: I64, values: I64, n: int) -> I64:
    return np.bincount(groups, weights=values, minlength=n).astype(np.int64)
