"""Many texts cut into tokens at once: 64-bit hashes instead of strings.

Two different tokens of up to eight bytes never share a hash; of longer ones two in a pair of
texts share one with a probability of about 1e-15.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from toque.keyed_random import mixed

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_BASE: Final = 0x9E3779B97F4A7C15
_NEWLINE: Final = 10


@dataclass(frozen=True)
class Tokens:
    """The tokens of some texts, side by side in the texts' order."""

    hashes: U64
    """[tokens]; equal tokens have equal hashes."""
    counts: I64
    """[texts] tokens of each text."""
    sentences: I64
    """[tokens] running number of the line a token stands on; unique over all texts."""
    spans: tuple[I64, I64]
    """[tokens] first byte and the byte after the last, in `data`."""
    data: bytes
    """What was cut, as UTF-8."""

    @cached_property
    def texts(self) -> I64:
        """[tokens] which text a token belongs to."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


def word_tokens(texts: Sequence[str]) -> Tokens:
    """Runs of a-z and 0-9 after lower-casing: the tokens of rouge-score, without stemming."""
    joined = "\n".join(texts)
    for letter in _LOWERED_TO_ASCII:
        joined = joined.replace(letter, letter.lower())
    data = joined.encode("utf-8", "replace").lower()  # of bytes: ASCII only, and ten times faster
    raw = np.frombuffer(data, np.uint8)
    inside = np.zeros(len(raw) + 2, bool)
    inside[1:-1] = np.frombuffer(data.translate(_WORD_BYTES), bool)
    starts = np.flatnonzero(inside[1:-1] & ~inside[:-2])
    ends = np.flatnonzero(inside[1:-1] & ~inside[2:]) + 1
    lines = np.flatnonzero(raw == _NEWLINE)
    breaks = [text.count("\n") + 1 for text in texts]
    sentences = np.searchsorted(lines, starts)
    return _tokens(data, starts, ends, sentences, np.cumsum(breaks))


def mteval_tokens(texts: Sequence[str]) -> Tokens:
    """The tokens of mteval-v13a, which sacrebleu calls "13a"; case is kept.

    The four rules of the script look at a character and its neighbours, so they are applied to all
    characters at once. Only marks in a row before a digit ("3...5") depend on where a rule matched
    before; texts that hold some are cut by the rules as they were written.
    """
    lines = [_unescaped(text) for text in texts]
    joined = "\n".join(lines)
    odd: set[int] = set()
    if _MARKS_BEFORE_DIGIT.search(joined) is not None:
        odd = {i for i, line in enumerate(lines) if _MARKS_BEFORE_DIGIT.search(line) is not None}
        joined = "\n".join(cut_by_rules(s) if i in odd else s for i, s in enumerate(lines))
    if not joined.isascii():
        for space in _OTHER_SPACES:
            joined = joined.replace(space, " ")
    data = joined.encode("utf-8", "replace")
    padded = np.frombuffer(b"\n" + data + b"\n", np.uint8)
    kinds = np.frombuffer(data.translate(_KINDS), np.uint8)
    digit = padded - 48 < 10  # uint8 arithmetic wraps, so only 0 to 9 are left
    before, here, after = digit[:-2], kinds, digit[2:]
    alone = here == _ALONE
    alone |= (here == _MARK) & ~(before & after)
    alone |= (padded[1:-1] == ord("-")) & before
    ends_of_lines = np.flatnonzero(padded[1:-1] == _NEWLINE)
    for i in odd:
        start = int(ends_of_lines[i - 1]) + 1 if i else 0
        alone[start : int(ends_of_lines[i]) if i < len(ends_of_lines) else None] = False
    solid = np.zeros(len(padded), bool)
    solid[1:-1] = here != _SPACE
    edge = np.zeros(len(padded), bool)
    edge[1:-1] = alone
    starts = np.flatnonzero(solid[1:-1] & (~solid[:-2] | edge[:-2] | alone))
    ends = np.flatnonzero(solid[1:-1] & (~solid[2:] | edge[2:] | alone)) + 1
    sentences = np.searchsorted(ends_of_lines, starts)
    return _tokens(data, starts, ends, sentences, np.arange(1, len(texts) + 1))


def characters(texts: Sequence[str]) -> Tokens:
    """Every character that is no white space, as chrF counts them."""
    joined = ["".join(text.split()) for text in texts]
    code = np.frombuffer("".join(joined).encode("utf-32-le", "replace"), np.uint32)
    counts = np.array([len(text) for text in joined], np.int64)
    none = np.empty(0, np.int64)
    return Tokens(mixed(code.astype(np.uint64) + np.uint64(1)), counts, none, (none, none), b"")


def grams(hashes: U64, texts: I64, n: int) -> tuple[U64, I64]:
    """Hashes of all runs of `n` tokens that lie within one text, and which text that is."""
    if n == 1:
        return hashes, texts
    joined = runs_from(hashes, n)
    whole = texts[: len(joined)] == texts[n - 1 :]
    return mixed(joined[whole]), texts[: len(joined)][whole]


def runs_from(hashes: U64, n: int) -> U64:
    """Hashes of the `n` tokens from each on, across texts; only the high bits are well mixed."""
    last = max(0, len(hashes) - n + 1)
    joined = hashes[:last].copy()
    for k in range(1, n):
        joined *= np.uint64(_BASE)
        joined += hashes[k : k + last]
    return joined


def cut_by_rules(line: str) -> str:
    """A line cut by mteval-v13a's own rules (NIST 2009), its tokens joined by one space.

    >>> cut_by_rules("1,000 eggs, 3...5 (large)")
    '1,000 eggs , 3 . . .5 ( large )'
    """
    line = f" {line} "
    for pattern, replacement in _RULES:
        line = pattern.sub(replacement, line)
    return " ".join(line.split())


def _unescaped(text: str) -> str:
    line = text.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    if "&" in line:
        for escaped, mark in _ESCAPES:
            line = line.replace(escaped, mark)
    return line


def _tokens(data: bytes, starts: I64, ends: I64, sentences: I64, last_lines: I64) -> Tokens:
    """Hash the tokens; `last_lines`[i] is the number of lines up to the end of text i."""
    hashes = _hashes(data, starts, ends)
    up_to = np.searchsorted(sentences, last_lines)
    counts = np.diff(up_to, prepend=0).astype(np.int64)
    return Tokens(hashes, counts, sentences.astype(np.int64), (starts, ends), data)


def _hashes(data: bytes, starts: I64, ends: I64) -> U64:
    """Tokens read eight bytes at a time, each time mixed with what came before."""
    window = np.ndarray(len(data) + 1, "<u8", data + bytes(8), strides=(1,))
    lengths = ends - starts
    hashes = mixed(window[starts] & _FIRST_BYTES[np.minimum(lengths, 8)])
    rest, at = np.flatnonzero(lengths > 8), 8
    while len(rest):
        left = np.minimum(lengths[rest] - at, 8)
        hashes[rest] = mixed((window[starts[rest] + at] & _FIRST_BYTES[left]) + hashes[rest])
        at += 8
        rest = rest[lengths[rest] > at]
    return hashes


_SPACE, _MARK, _ALONE, _PLAIN = 0, 1, 2, 3


def _kinds() -> bytes:
    """What mteval-v13a's rules take each byte for."""
    kinds = np.full(256, _PLAIN, np.uint8)
    for first, last in ("{~", "[`", " &", "(+", ":@", "//"):
        kinds[ord(first) : ord(last) + 1] = _ALONE
    kinds[[ord("."), ord(",")]] = _MARK
    kinds[[*range(9, 14), *range(28, 33)]] = _SPACE  # the ASCII white space of str.split
    return kinds.tobytes()


_KINDS: Final = _kinds()
_LOWERED_TO_ASCII: Final = ("\u0130", "\u212a")
"""The only other characters whose lower case holds a letter a to z."""
_WORD_BYTES: Final = bytes(b in b"abcdefghijklmnopqrstuvwxyz0123456789" for b in range(256))
_FIRST_BYTES: Final = np.array([2 ** (8 * n) - 1 for n in range(9)], np.uint64)
_OTHER_SPACES: Final = [chr(c) for c in range(128, 0x3001) if chr(c).isspace()]
_MARKS_BEFORE_DIGIT: Final = re.compile(r"\.[.,][0-9]|,[.,][0-9]")
_ESCAPES: Final = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))
_RULES: Final = (
    (re.compile(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])"), r" \1 "),
    (re.compile(r"([^0-9])([\.,])"), r"\1 \2 "),
    (re.compile(r"([\.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)
