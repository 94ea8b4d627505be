"""HashedTokens of many texts as 64-bit hashes: words of mteval-v13a for BLEU, characters for chrF.

Two different tokens of one pair of texts share a hash with a probability of about 1e-15.
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

from toque.keyed_random import mixed

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]


@dataclass(frozen=True)
class HashedTokens:
    """The tokens of some texts, one text after the other."""

    hashes: U64
    """[tokens]; equal tokens have equal hashes."""
    counts: I64
    """[texts] tokens of each text."""

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


def characters(texts: Sequence[str]) -> HashedTokens:
    """Every character that is not white space, as chrF counts them."""
    joined = ["".join(text.split()) for text in texts]
    code = np.frombuffer("".join(joined).encode("utf-32-le", "surrogatepass"), np.uint32)
    counts = np.array([len(text) for text in joined], np.int64)
    return HashedTokens(mixed(code.astype(np.uint64) + np.uint64(1)), counts)


def mteval_tokens(text: str) -> list[str]:
    """A text cut by the rules of mteval-v13a (NIST 2009).

    >>> mteval_tokens("1,000 eggs, 3...5 (large)")
    ['1,000', 'eggs', ',', '3', '.', '.', '.5', '(', 'large', ')']
    """
    line = text.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
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
