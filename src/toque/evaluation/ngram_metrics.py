"""BLEU (Papineni et al. 2002), repetition and distinct n-grams for many texts.

BLEU is computed from sufficient statistics per text. It equals sacrebleu 2.6's BLEU with
`nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp`. It ranges from 0 to 100 and is a score of a set of
texts, not a mean over texts.

Tokens are 64-bit hashes of the words of mteval-v13a. In scripts without spaces, each character is a
word, as in sacrebleu's tokenizer "zh". Texts are compared in Unicode's composed form (NFC). In a
pair of texts, the probability that two different tokens have the same hash is about 1e-15.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from toque.evaluation.script_words import add_blanks
from toque.keyed_random import mixed

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
BLEU_ORDER: Final = 4
MAX_PAIRS: Final = 1024
"""Maximum number of text pairs per call. The index of a pair takes ten bits of a sorting key."""
REPETITION_ORDER: Final = 4
_PAIR_SHIFT = np.uint64(54)
_ONE = np.uint64(1)
_BASE = np.uint64(0x9E3779B97F4A7C15)
"""Base of the polynomial hash of an n-gram, an odd number with random bits."""
_LAST = np.array([2**64 - 1], np.uint64)
"""End marker, larger than all keys."""


@dataclass(frozen=True)
class HashedTokens:
    """Hashed tokens of several texts, concatenated."""

    hashes: U64
    """[tokens] Equal tokens have equal hashes."""
    counts: I64
    """[texts] Number of tokens per text."""

    @cached_property
    def texts(self) -> I64:
        """[tokens] Index of the text of each token."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


def hash_words(texts: Sequence[str]) -> HashedTokens:
    """Split texts into words by the case-sensitive rules of mteval-v13a, and hash the words."""
    words_by_text = [mteval_words(text) for text in texts]
    words = [word for text in words_by_text for word in text]
    hash_of = {
        word: xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"))
        for word in set(words)
    }
    counts = np.array([len(text) for text in words_by_text], np.int64)
    hashes = np.fromiter((hash_of[word] for word in words), np.uint64)
    return HashedTokens(hashes, counts)


def mteval_words(text: str) -> list[str]:
    """Split a text by the rules of mteval-v13a (NIST 2009), sacrebleu's tokenizer "13a".

    Scripts without blanks are first split by `add_blanks`.

    >>> mteval_words("1,000 eggs, 3...5 (large)")
    ['1,000', 'eggs', ',', '3', '.', '.', '.5', '(', 'large', ')']
    """
    line = add_blanks(text).rstrip()
    line = line.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    if "&" in line:
        for escaped, mark in _ESCAPES:
            line = line.replace(escaped, mark)
    if _MARKS_BEFORE_DIGIT.search(line) is None:
        return _TOKEN.findall(line)
    # mteval's rules differ from _TOKEN for several marks before a digit, because a rule does not
    # match a mark twice. Apply the rules one by one.
    line = f" {line} "
    for pattern, replacement in _RULES:
        line = pattern.sub(replacement, line)
    return line.split()


_ALONE: Final = re.escape("".join(c for c in string.punctuation if c not in "',-."))
"""Punctuation marks that are always separate words."""
_TOKEN: Final = re.compile(
    rf"[{_ALONE}]|(?<![0-9])[.,]|[.,](?![0-9])|(?<=[0-9])-"
    rf"|(?:[^\s{_ALONE}.,\-]+|(?<=[0-9])[.,](?=[0-9])|(?<![0-9])-)+"
)
"""`_RULES` as a single pattern, which is faster."""
_MARKS_BEFORE_DIGIT: Final = re.compile(r"[.,][.,][0-9]")
_ESCAPES: Final = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))
_RULES: Final = (
    (re.compile(rf"([{_ALONE}])"), r" \1 "),
    (re.compile(r"([^0-9])([\.,])"), r"\1 \2 "),
    (re.compile(r"([\.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)


def hash_ngrams(tokens: HashedTokens, n: int) -> tuple[U64, I64]:
    """Hash each n-gram within a text. Also return the index of its text."""
    last = max(0, len(tokens.hashes) - n + 1)
    hashes = tokens.hashes[:last].copy()
    for k in range(1, n):
        hashes *= _BASE
        hashes += tokens.hashes[k : k + last]
    is_within = tokens.texts[:last] == tokens.texts[n - 1 :]
    return mixed(hashes[is_within]), tokens.texts[:last][is_within]


def count_ngrams(counts: I64, n: int) -> I64:
    """Compute the number of n-grams in texts of `counts` tokens."""
    return np.maximum(counts - (n - 1), 0)


def repetition(words: HashedTokens) -> NDArray[np.float64]:
    """Compute rep-4 (Welleck et al. 2020): the fraction of a text's 4-grams that are repeated.

    The result is [texts], with NaN for texts of fewer than four words.
    """
    n_total = count_ngrams(words.counts, REPETITION_ORDER)
    different = np.unique(_sorting_keys(words, REPETITION_ORDER))
    text = (different >> _PAIR_SHIFT).astype(np.int64)
    n_repeated = n_total - np.bincount(text, minlength=len(n_total))
    share = np.full(len(n_total), np.nan)
    np.divide(n_repeated, n_total, out=share, where=n_total > 0)
    return share


def distinct_share(parts: Sequence[U64]) -> float | None:
    """Compute distinct-n (Li et al. 2016): the fraction of distinct n-grams among hashed n-grams.

    Return None without n-grams.
    """
    n_total = sum(map(len, parts))
    if n_total == 0:
        return None
    return len(np.unique(np.concatenate(parts))) / n_total


def count_shared_ngrams(a: HashedTokens, b: HashedTokens, n: int) -> I64:
    """Count the n-grams that text i of `a` shares with text i of `b`. The result is [pairs].

    The count of an n-gram is the smaller of its counts in both texts. Their sum is the numerator of
    BLEU's clipped precision (Papineni et al. 2002). There are at most `MAX_PAIRS` pairs.
    """
    # A key consists of pair, hash and side, so sorting groups equal n-grams of a pair. An n-gram
    # that occurs p times in `a` and q times in `b` becomes p even keys, followed by q odd keys.
    # From the boundary between them, min(p, q) steps in both directions meet equal keys.
    keys = np.concatenate([_sorting_keys(a, n), _sorting_keys(b, n) | _ONE, _LAST])
    keys.sort()
    counts = np.zeros(len(a.counts), np.int64)
    boundaries = np.flatnonzero((keys[:-1] ^ keys[1:]) == _ONE)
    step = 0
    while len(boundaries):
        pair = (keys[boundaries] >> _PAIR_SHIFT).astype(np.int64)
        counts += np.bincount(pair, minlength=len(counts))
        step += 1
        boundaries = boundaries[keys[boundaries - step] == keys[boundaries]]
        boundaries = boundaries[keys[boundaries + (1 + step)] == keys[boundaries + 1]]
    return counts


def _sorting_keys(tokens: HashedTokens, n: int) -> U64:
    """Return one key per n-gram: ten bits for the pair, 53 bits of the hash, and 0 for the side."""
    hashes, texts = hash_ngrams(tokens, n)
    return (texts.astype(np.uint64) << _PAIR_SHIFT) | (hashes >> np.uint64(11) << _ONE)


def bleu_counts(ours: HashedTokens, theirs: HashedTokens) -> NDArray[np.float64]:
    """Compute BLEU's counts for each pair of prediction and reference, [pairs, 10].

    The columns are the words of the prediction, the words of the reference, the shared n-grams for
    n = 1 to 4, and the n-grams of the prediction for n = 1 to 4.
    """
    orders = range(1, BLEU_ORDER + 1)
    matches = [count_shared_ngrams(ours, theirs, n) for n in orders]
    totals = [count_ngrams(ours.counts, n) for n in orders]
    columns = np.stack([ours.counts, theirs.counts, *matches, *totals], axis=1)
    return columns.astype(float)


def bleu_of(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute BLEU from sums of `bleu_counts`, [..., 10]. The result is [...].

    BLEU is the geometric mean of the four precisions. If the prediction is shorter than the
    reference, it is multiplied by exp(1 - reference / prediction). The k-th precision without a
    match counts as 1 / 2**k matches (NIST smoothing; Chen and Cherry 2014, method 3).
    """
    n_words, n_reference_words = counts[..., 0], counts[..., 1]
    matches, totals = counts[..., 2 : 2 + BLEU_ORDER], counts[..., 2 + BLEU_ORDER :]
    missing = np.cumsum(matches == 0, axis=-1)
    smoothed = np.where(matches > 0, matches, 0.5**missing)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_precision = np.log(100.0 * smoothed / totals).mean(axis=-1)
        brevity = np.minimum(1.0, np.exp(1.0 - n_reference_words / n_words))
        score = brevity * np.exp(log_precision)
    has_matches = (matches.sum(axis=-1) > 0) & (totals.min(axis=-1) > 0)
    return np.where(has_matches, score, 0.0)
