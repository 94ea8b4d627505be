"""Tokeniser of ingredient lines: numbers, words and marks."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Final

# "1-1/2 cups" is one and a half to every cook; "15 1/2" too. Other slashes part two measures.
NUMBER: Final = (
    r"\d+(?:\s+|-)\d{1,2}/(?:16|10|12|[2345689])(?!\d)|\d{1,2}/(?:16|10|12|[2345689])(?!\d)"
    r"|\d{1,3}(?:,\d{3})+(?!\d)|\d*[.]\d+|\d+(?:,\d{1,2})?(?!\d)|\d+"
)

WORDS: Final[dict[str, float]] = {
    "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8,
    "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "half": 0.5, "quarter": 0.25, "couple": 2,
    "few": 3, "several": 3, "een": 1, "eine": 1, "una": 1, "halve": 0.5, "meia": 0.5, "mezza": 0.5,
}  # fmt: skip
"""Number words; "few" and "several" count as three; some of other languages."""

_TOKEN: Final = re.compile(rf"[^\W\d_]+(?:['-](?=[^\W\d_])[^\W\d_]+)*'?|{NUMBER}|\S")
_KINDS: Final = dict.fromkeys("abcdefghijklmnopqrstuvwxyz", "W") | dict.fromkeys("123456789", "N")
_BRANDS: Final[dict[str, frozenset[str]]] = {
    "big red": frozenset({"", "soda", "pop", "drink", "cola", "gum", "soft", ",", "("}),
    "big mac": frozenset({"sauce", "style"}),
}
"""Names that begin with a size, and what may follow them: not "big red onions"."""
_BRAND_OPENERS: Final = frozenset(name.partition(" ")[0] for name in _BRANDS)
CLOSING: Final = {"(": ")", "[": "]"}
"""Opening brackets and their closing ones."""


def _kind(word: str) -> str:
    """The kind of a token that its first character does not decide."""
    if word[0].isalpha() or word == "00":  # "00 flour"
        return "W"
    return "N" if word[-1].isdecimal() else "P"  # "²" is a digit but not a number


def _with_brands(words: list[str]) -> list[str]:
    """The words, a brand's first one capitalised and so no size.

    >>> _with_brands(["big", "red", "soda"]), _with_brands(["big", "red", "onion"])
    (['Big', 'red', 'soda'], ['big', 'red', 'onion'])
    """
    pairs = zip(words, [*words[1:], ""], [*words[2:], "", ""], strict=False)
    return [
        first.capitalize() if third in _BRANDS.get(f"{first} {second}", ()) else first
        for first, second, third in pairs
    ]


class Tokens:
    """A line's tokens and three ends: kind ("N" number, "W" word, "P" mark, "E" end) and place."""

    __slots__ = ("_closings", "_originals", "_starts", "kinds", "text", "words")

    def __init__(self, text: str) -> None:
        self.text = text
        originals: list[str] = _TOKEN.findall(text)
        words = [word.lower() for word in originals]
        self.kinds = [_KINDS.get(word[0]) or _kind(word) for word in words]
        if "T" in originals:  # a tablespoon; "t" is a teaspoon
            words = [old if old == "T" else new for old, new in zip(originals, words, strict=True)]
        if not _BRAND_OPENERS.isdisjoint(words):
            words = _with_brands(words)
        self.kinds += ("E", "E", "E")
        words += ("", "", "")
        self.words = words
        self._originals = originals
        self._starts: list[int] | None = None
        self._closings: dict[str, list[int]] = {}

    @property
    def starts(self) -> list[int]:
        """First character of each token in `text`."""
        if self._starts is None:
            at = 0
            self._starts = []
            for word in self._originals:
                at = self.text.index(word, at)
                self._starts.append(at)
                at += len(word)
        return self._starts

    def is_number(self, i: int) -> bool:
        """True if token `i` is a number, in digits or a word."""
        return self.kinds[i] == "N" or self.words[i] in WORDS

    def span(self, i: int, j: int) -> str:
        """The text of tokens i to j, as it was written."""
        if "P" not in self.kinds[i:j]:  # the usual case, without looking for places
            return " ".join(self._originals[i:j])
        starts = self.starts
        return self.text[starts[i] : starts[j - 1] + len(self._originals[j - 1])]

    def __len__(self) -> int:
        return len(self._originals)

    def closing(self, i: int, end: int) -> int:
        """Index of the mark that closes the bracket at `i`; `end` if there is none."""
        mark = CLOSING[self.words[i]]
        if mark not in self._closings:
            self._closings[mark] = [j for j, word in enumerate(self.words) if word == mark]
        places = self._closings[mark]
        at = bisect_right(places, i)
        return places[at] if at < len(places) and places[at] < end else end

    def stripped(self, i: int, j: int) -> str:
        """The text of tokens i to j without marks at its ends; "" when there are none."""
        return self.span(i, j).strip(" ,;:.-*") if i < j else ""

    def is_glued(self, i: int) -> bool:
        """True if no blank stands before token `i`."""
        if not 0 < i < len(self._originals):
            return False
        return self.starts[i] == self.starts[i - 1] + len(self._originals[i - 1])
