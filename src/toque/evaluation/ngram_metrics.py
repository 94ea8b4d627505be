"""BLEU (Papineni et al. 2002), repetition and variety, of many texts at once.

BLEU comes from sufficient statistics per text and is sacrebleu 2.6's, as
`nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp`. It is from 0 to 100 and belongs to a set of texts;
it is no mean over texts.

Tokens are 64-bit hashes of words as mteval-v13a cuts them. Characters of scripts without blanks are
words, as in sacrebleu's tokenizer "zh", and texts are compared in Unicode's composed form. Two
different tokens of a pair of texts share a hash with a probability of about 1e-15.
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
MAX_PAIRS: Final = 1024  # pairs counted at once: ten bits of a sorting key
REPETITION_ORDER: Final = 4
_PAIR_SHIFT = np.uint64(54)
_ONE = np.uint64(1)
_BASE = np.uint64(0x9E3779B97F4A7C15)
_LAST = np.array([2**64 - 1], np.uint64)  # larger than all keys: something else comes after them


@dataclass(frozen=True)
class HashedTokens:
    """The tokens of some texts, one text after the other; of at most `MAX_PAIRS` where paired."""

    hashes: U64  # [tokens]; equal tokens have equal hashes
    counts: I64  # [texts] tokens of each text

    @cached_property
    def texts(self) -> I64:
        """[tokens] which text a token belongs to."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


def words(texts: Sequence[str]) -> HashedTokens:
    """The tokens of mteval-v13a, which sacrebleu calls "13a"; case is kept."""
    tokens = [mteval_tokens(text) for text in texts]
    hashes = {
        token: xxhash.xxh3_64_intdigest(token.encode("utf-8", "surrogatepass"))
        for token in {token for line in tokens for token in line}
    }
    counts = np.array([len(line) for line in tokens], np.int64)
    found = np.fromiter((hashes[token] for line in tokens for token in line), np.uint64)
    return HashedTokens(found, counts)


def mteval_tokens(text: str) -> list[str]:
    """A text cut by the rules of mteval-v13a (NIST 2009), after `with_blanks`.

    >>> mteval_tokens("1,000 eggs, 3...5 (large)")
    ['1,000', 'eggs', ',', '3', '.', '.', '.5', '(', 'large', ')']
    """
    line = with_blanks(text).rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    if "&" in line:
        for escaped, mark in _ESCAPES:
            line = line.replace(escaped, mark)
    if _MARKS_BEFORE_DIGIT.search(line) is None:
        return _TOKEN.findall(line)
    # Of marks in a row before a digit, each rule skips what it has just matched: one by one.
    line = f" {line} "
    for pattern, replacement in _RULES:
        line = pattern.sub(replacement, line)
    return line.split()


_ALONE: Final = re.escape("".join(c for c in string.punctuation if c not in "',-."))
"""Marks that are tokens of their own wherever they stand."""
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


def grams(tokens: HashedTokens, n: int) -> tuple[U64, I64]:
    """Hash of each run of `n` tokens within one text, and the number of that text."""
    last = max(0, len(tokens.hashes) - n + 1)
    hashes = tokens.hashes[:last].copy()
    for k in range(1, n):
        hashes *= _BASE
        hashes += tokens.hashes[k : k + last]
    within = tokens.texts[:last] == tokens.texts[n - 1 :]
    return mixed(hashes[within]), tokens.texts[:last][within]


def n_grams(counts: I64, n: int) -> I64:
    """Runs of `n` tokens in texts of `counts` tokens."""
    return np.maximum(counts - (n - 1), 0)


def repetition(words: HashedTokens) -> NDArray[np.float64]:
    """[texts] rep-4 (Welleck et al. 2020): the share of runs of four words that came before."""
    runs = n_grams(words.counts, REPETITION_ORDER)
    text = (np.unique(_keys(words, REPETITION_ORDER)) >> _PAIR_SHIFT).astype(np.int64)
    repeated = runs - np.bincount(text, minlength=len(runs))
    share = np.full(len(runs), np.nan)
    np.divide(repeated, runs, out=share, where=runs > 0)
    return share


def distinct(parts: Sequence[U64]) -> float | None:
    """Distinct-n (Li et al. 2016): different n-grams of all texts by n-grams; None without any."""
    total = sum(map(len, parts))
    return len(np.unique(np.concatenate(parts))) / total if total else None


def shared_grams(a: HashedTokens, b: HashedTokens, n: int) -> I64:
    """[pairs] runs of `n` tokens that both texts have, counted as often as both have them.

    The numerator of BLEU's clipped precision (Papineni et al. 2002). At most `MAX_PAIRS` texts a
    side, text i against text i.
    """
    # One sort brings equal runs of one pair together: pair, hash, side in one integer. A run that
    # p times stands on one side and q times on the other is p even keys, then q odd ones, and
    # min(p, q) the number of steps one can go from between them both ways.
    keys = np.concatenate([_keys(a, n), _keys(b, n) | _ONE, _LAST])
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


def _keys(tokens: HashedTokens, n: int) -> U64:
    """A key of each run: ten bits for the pair, 53 of the hash, and a zero for the side."""
    hashes, texts = grams(tokens, n)
    return (texts.astype(np.uint64) << _PAIR_SHIFT) | (hashes >> np.uint64(11) << _ONE)


def bleu_counts(ours: HashedTokens, theirs: HashedTokens) -> NDArray[np.float64]:
    """[pairs, 10] words of prediction and reference, then matches and n-grams, n = 1 to 4."""
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
