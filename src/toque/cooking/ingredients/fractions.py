"""Fractions and numbers in recipe text: glyphs, ranges and number words."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Final

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
# "1-1/2 cups" is one and a half to every cook; "15 1/2" too. Other slashes part two measures.
NUMBER: Final = (
    r"\d+(?:\s+|-)\d{1,2}/(?:16|10|12|[2345689])(?!\d)|\d{1,2}/(?:16|10|12|[2345689])(?!\d)"
    r"|\d{1,3}(?:,\d{3})+(?!\d)|\d*[.]\d+|\d+(?:,\d{1,2})?(?!\d)|\d+"
)
_FRACTION = re.compile(r"(?:(\d+)(?:\s+|-))?(\d+)/(\d+)")

WORDS: Final[dict[str, float]] = {
    "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8,
    "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "half": 0.5, "quarter": 0.25, "couple": 2,
    "few": 3, "several": 3,
}  # fmt: skip
"""Number words; "few" and "several" count as three."""


def plain(text: str) -> str:
    """`text` with fraction glyphs, dashes and quotation marks in ASCII.

    >>> plain("1½–2 cups")
    '1 1/2-2 cups'
    """
    return text if text.isascii() else _SPECIAL.sub(lambda mark: _PLAIN[mark.group()], text)


@lru_cache(maxsize=4096)
def number(text: str) -> float:
    """The value of a text that matches `NUMBER`.

    >>> number("1 1/2"), number("1,000"), number("1,5"), number(".25")
    (1.5, 1000.0, 1.5, 0.25)
    """
    fraction = _FRACTION.fullmatch(text)
    if fraction:
        whole, top, bottom = fraction.groups()
        return int(whole or 0) + int(top) / int(bottom)
    head, comma, tail = text.partition(",")
    if comma and len(tail) != 3:
        return float(f"{head}.{tail}")
    return float(text.replace(",", ""))
