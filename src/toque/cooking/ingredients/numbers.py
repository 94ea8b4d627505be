"""Numbers of an ingredient line: fractions, glyphs, ranges, mixed numbers and words."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Final

from toque.cooking.ingredients.tokens import WORDS, Tokens
from toque.cooking.ingredients.units import SPELLINGS

Range = tuple[float, float]

_TO: Final = frozenset({"to", "or", "-", "à", "bis", "tot"})
_AFTER_A: Final = frozenset({"few", "couple", "half", "quarter"})
_LITTLE: Final = frozenset({"little", "good", "bit"})
_DOZEN: Final = 12.0
_MARKS = {
    "⁄": "/", "∕": "/", "’": "'", "‘": "'", "´": "'", "”": '"', "“": '"', "″": '"', "×": "x",
} | dict.fromkeys("‐‑‒–—−", "-")  # fmt: skip
# The space keeps the parts of "1½" apart.
_GLYPHS = {
    glyph: " " + unicodedata.normalize("NFKC", glyph).replace("⁄", "/")
    for glyph in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
_PLAIN = _MARKS | _GLYPHS
_SPECIAL = re.compile(f"[{''.join(_PLAIN)}]")
_FRACTION = re.compile(r"(?:(\d+)(?:\s+|-))?(\d+)/(\d+)")
_MOST: Final = 1e15
"""Largest number read: exact in a float, and far beyond any kitchen."""
_OVER: Final = re.compile(r"\d{16}")
"""Digits of a larger one; over 4,300 Python refuses to make an integer of them."""


def plain(text: str) -> str:
    """`text` with fraction glyphs, dashes and quotation marks in ASCII.

    >>> plain("1½–2 cups")
    '1 1/2-2 cups'
    """
    return text if text.isascii() else _SPECIAL.sub(lambda mark: _PLAIN[mark.group()], text)


@lru_cache(maxsize=4096)
def number(text: str) -> float:
    """The value of a text that matches `NUMBER`.

    >>> number("1 1/2"), number("1,000"), number("1,5"), number(".25"), number("1,000,000")
    (1.5, 1000.0, 1.5, 0.25, 1000000.0)
    """
    if _OVER.match(text):
        return _MOST
    fraction = _FRACTION.fullmatch(text)
    if fraction:
        whole, top, bottom = fraction.groups()
        return int(whole or 0) + int(top) / int(bottom)
    head, comma, tail = text.partition(",")
    if comma and len(tail) < 3:
        return float(f"{head}.{tail}")
    return min(float(text.replace(",", "")), _MOST)


def read_number(tokens: Tokens, i: int, end: int) -> tuple[Range, int] | None:
    """The number or range at token `i` and the place after it; None when there is none."""
    if tokens.kinds[i] == "N":
        return _digits(tokens, i, end)
    if tokens.words[i] in {"a", "an"}:
        return _article(tokens, i, end)
    return _number_words(tokens, i)


def _digits(tokens: Tokens, i: int, end: int) -> tuple[Range, int]:
    kinds, words = tokens.kinds, tokens.words
    low = number(words[i])
    i += 1
    j = i
    while words[j] in _TO:
        j += 1
    if i < j < end and kinds[j] == "N":
        high = number(words[j])
        if high > low:  # "2 to 3", "12- to 16-pound"; "2 - 1" is no range
            return (low, high), j + 1
    if words[i] == "and" and kinds[i + 1] == "N" and "/" in words[i + 1]:
        part = number(words[i + 1])
        if part < 1.0 and low == int(low):  # "1 and 1/2"
            return (low + part, low + part), i + 2
    return (low, low), i


def _article(tokens: Tokens, i: int, end: int) -> tuple[Range, int] | None:
    """Read "a pinch", "a 5-pound goose", "a few", "a dozen"; "a little oil" says no number."""
    words = tokens.words
    i += 1
    following = words[i]
    if following == "dozen":
        return (_DOZEN, _DOZEN), i + 1
    if tokens.kinds[i] == "N" or following in _AFTER_A:
        return read_number(tokens, i, end)
    if following in _LITTLE and words[i + 1] not in SPELLINGS:
        return None
    return (1.0, 1.0), i


def _number_words(tokens: Tokens, i: int) -> tuple[Range, int] | None:
    words = tokens.words
    if words[i] == "half" and words[i + 1] in {"and", "&", "-"}:
        return None  # "half & half"
    value: float | None = None
    while words[i] in WORDS:
        value = WORDS[words[i]] * (1 if value is None else value)
        i += 1
    if value is None:
        return None
    if words[i] in {"a", "an"} and value < 1.0:
        i += 1  # "half a lemon"
    if words[i] == "dozen":
        return (value * _DOZEN, value * _DOZEN), i + 1
    if words[i] in _TO and words[i + 1] in WORDS:
        return (value, WORDS[words[i + 1]]), i + 2
    if words[i] == "of" and value in {2.0, 0.5}:
        i += 1  # "a couple of eggs"
    return (value, value), i
