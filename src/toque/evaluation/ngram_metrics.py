"""BLEU (Papineni et al. 2002), repetition and variety of many texts.

BLEU is computed from sufficient statistics per text. It equals sacrebleu 2.6's BLEU with
`nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp`. It ranges from 0 to 100 and describes a set of
texts. It is not a mean over texts.

Tokens are 64-bit hashes of the words of mteval-v13a. In scripts without blanks, each character is a
word, as in sacrebleu's tokenizer "zh". Texts are compared in Unicode's composed form. Two different
tokens of a pair of texts share a hash with a probability of about 1e-15.
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

from toque.evaluation.script_words import with_blanks
from toque.keyed_random import mixed

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
BLEU_ORDER: Final = 4
MAX_PAIRS: Final = 1024
"""Pairs of texts per call. The number of a pair takes ten bits of a sorting key."""
REPETITION_ORDER: Final = 4
_PAIR_SHIFT = np.uint64(54)
_ONE = np.uint64(1)
_BASE = np.uint64(0x9E3779B97F4A7C15)
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
        """[tokens] Number of the text of each token."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


def words(texts: Sequence[str]) -> HashedTokens:
    """Cut texts by the rules of mteval-v13a, which sacrebleu calls "13a". Keep the case."""
    tokens = [mteval_tokens(text) for text in texts]
    vocabulary = {token for line in tokens for token in line}
    hash_of = {
        token: xxhash.xxh3_64_intdigest(token.encode("utf-8", "surrogatepass"))
        for token in vocabulary
    }
    counts = np.array([len(line) for line in tokens], np.int64)
    hashes = np.fromiter(
        (hash_of[token] for line in tokens for token in line), np.uint64
    )
    return HashedTokens(hashes, counts)


def mteval_tokens(text: str) -> list[str]:
    """Cut a text by the rules of mteval-v13a (NIST 2009), after `with_blanks`.

    >>> mteval_tokens("1,000 eggs, 3...5 (large)")
    ['1,000', 'eggs', ',', '3', '.', '.', '.5', '(', 'large', ')']
    """
    line = (
        with_blanks(text)
        .rstrip()
        .replace("<skipped>", "")
        .replace("-\n", "")
        .replace("\n", " ")
    )
    if "&" in line:
        for escaped, mark in _ESCAPES:
            line = line.replace(escaped, mark)
    if _MARKS_BEFORE_DIGIT.search(line) is None:
        return _TOKEN.findall(line)
    # Each rule skips a mark that it has just matched, so several marks before a digit need the
    # rules one by one.
    line = f" {line} "
    for pattern, replacement in _RULES:
        line = pattern.sub(replacement, line)
    return line.split()


_ALONE: Final = re.escape("".join(c for c in string.punctuation if c not in "',-."))
"""Marks that are always separate tokens."""
_TOKEN: Final = re.compile(
    rf"[{_ALONE}]|(?<![0-9])[.,]|[.,](?![0-9])|(?<=[0-9])-"
    rf"|(?:[^\s{_ALONE}.,\-]+|(?<=[0-9])[.,](?=[0-9])|(?<![0-9])-)+"
)
_MARKS_BEFORE_DIGIT: Final = re.compile(r"[.,][.,][0-9]")
_ESCAPES: Final = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))
_RULES: Final = (
    (re.compile(rf"([{_ALONE}])"), r" \1 "),
    (re.compile(r"([^0-9])([\.,])"), r"\1 \2 "),
    (re.compile(r"([\.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)


def hash_ngrams(tokens: HashedTokens, n: int) -> tuple[U64, I64]:
    """Hash each n-gram within a text. Also return the number of its text."""
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
    """Compute rep-4 (Welleck et al. 2020): the share of 4-grams that are repeated in a text.

    The result is [texts], with NaN for texts of fewer than four words.
    """
    n_total = count_ngrams(words.counts, REPETITION_ORDER)
    text = (np.unique(_sorting_keys(words, REPETITION_ORDER)) >> _PAIR_SHIFT).astype(
        np.int64
    )
    n_repeated = n_total - np.bincount(text, minlength=len(n_total))
    share = np.full(len(n_total), np.nan)
    np.divide(n_repeated, n_total, out=share, where=n_total > 0)
    return share


def distinct(parts: Sequence[U64]) -> float | None:
    """Compute distinct-n (Li et al. 2016) of hashed n-grams: the share of different ones.

    Return None without n-grams.
    """
    n_total = sum(map(len, parts))
    return len(np.unique(np.concatenate(parts))) / n_total if n_total else None


def count_shared_ngrams(a: HashedTokens, b: HashedTokens, n: int) -> I64:
    """Count the n-grams that text i of `a` shares with text i of `b`. The result is [pairs].

    The count of an n-gram is the smaller of its counts in both texts. Their sum is the numerator of
    BLEU's clipped precision (Papineni et al. 2002). There are at most `MAX_PAIRS` pairs.
    """
    # A key is pair, hash and side in one integer, so sorting groups equal n-grams of a pair. An
    # n-gram that occurs p times in `a` and q times in `b` is p even keys, followed by q odd keys.
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
    """Return a key per n-gram: ten bits of the pair, 53 bits of the hash, and 0 for the side."""
    hashes, texts = hash_ngrams(tokens, n)
    return (texts.astype(np.uint64) << _PAIR_SHIFT) | (hashes >> np.uint64(11) << _ONE)


def bleu_counts(ours: HashedTokens, theirs: HashedTokens) -> NDArray[np.float64]:
    """Count the words of prediction and reference, then matches and n-grams for n = 1 to 4.

    The result is [pairs, 10].
    """
    orders = range(1, BLEU_ORDER + 1)
    matches = [count_shared_ngrams(ours, theirs, n) for n in orders]
    totals = [count_ngrams(ours.counts, n) for n in orders]
    return np.stack([ours.counts, theirs.counts, *matches, *totals], axis=1).astype(
        float
    )


def bleu_of(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute BLEU from summed counts. The shape [..., 10] becomes [...].

    BLEU is the geometric mean of the four precisions. If the prediction is shorter than the
    reference, it is multiplied by exp(1 - reference / prediction). The k-th precision without a
    match counts as 1 / 2**k matches (NIST smoothing; Chen and Cherry 2014, method 3).
    """
    ours, theirs = counts[..., 0], counts[..., 1]
    matches, totals = counts[..., 2 : 2 + BLEU_ORDER], counts[..., 2 + BLEU_ORDER :]
    missing = np.cumsum(matches == 0, axis=-1)
    smoothed = np.where(matches > 0, matches, 0.5**missing)
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.log(100.0 * smoothed / totals).mean(axis=-1)
        brevity = np.minimum(1.0, np.exp(1.0 - theirs / ours))
        score = brevity * np.exp(precision)
    has_matches = (matches.sum(axis=-1) > 0) & (totals.min(axis=-1) > 0)
    return np.where(has_matches, score, 0.0)
