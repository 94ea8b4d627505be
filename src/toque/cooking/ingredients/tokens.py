"""Tokens of an ingredient line: numbers, words and marks, with their values.

Every function takes linear time. A line grows by a constant factor at most.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from functools import lru_cache

from toque.cooking.ingredients.number_words import WORDS, digits_for_words
from toque.cooking.ingredients.vocabulary import SPELLINGS

# Cooks read "1-1/2 cups" and "15 1/2" as mixed numbers. Other slashes separate two measures.
_BELOW = (
    r"/(?:(?:16|10|12|[2-9])(?!\d)|(?:11|15|20|24|32|48|64)(?= ?(?:cup|tea|table|tsp|tbsp|tbs))"
    r"|100(?= ?(?:oz|ounces?)\b))"
)
NUMBER = (
    rf"\d+(?:\s+|-)\d{{1,2}}{_BELOW}|\d{{1,2}}{_BELOW}"
    r"|\d{1,3}(?:,\d{3})+(?!\d)|\d*[.]\d+|\d+(?:,\d{1,2})?(?!\d)|\d+"
)

# "1st" and "2nd-cut" are never amounts.
_ORDINAL = r"\d+(?:st|nd|rd|th|ST|ND|RD|TH)\b(?:-[^\W\d_]+)*"
_TOKEN = re.compile(
    rf"[^\W\d_]+(?:['-](?=[^\W\d_])[^\W\d_]+)*'?|{_ORDINAL}|{NUMBER}|\S"
)
# The last character decides the kind of a token: "1st" is a word.
_KINDS = dict.fromkeys("abcdefghijklmnopqrstuvwxyz", "W") | dict.fromkeys(
    "123456789", "N"
)
CLOSING = {"(": ")", "[": "]"}  # opening brackets and their closing brackets


def _kind(word: str) -> str:
    """Return the kind of a token with an unusual last character."""
    if word[0].isalpha() or word == "00":  # "00 flour"
        return "W"
    return "N" if word[-1].isdecimal() else "P"  # "²" is a digit but not a number


class Tokens:
    """Tokens of a line, followed by three end tokens.

    The kinds are "N" (number), "W" (word), "P" (mark) and "E" (end).
    """

    __slots__ = ("_closings", "_originals", "_starts", "kinds", "text", "words")

    def __init__(self, text: str) -> None:
        self.text = text
        matches = list(_TOKEN.finditer(text))
        originals = [token[0] for token in matches]
        self._starts = [token.start() for token in matches]
        words = [word.lower() for word in originals]
        self.kinds = [_KINDS.get(word[-1]) or _kind(word) for word in words]
        if "T" in originals:  # "T" is a tablespoon, "t" a teaspoon
            words = [
                old if old == "T" else new
                for old, new in zip(originals, words, strict=True)
            ]
        self.kinds += ("E", "E", "E")
        words += ("", "", "")
        self.words = words
        self._originals = originals
        self._closings: dict[str, list[int]] = {}

    def is_number(self, i: int) -> bool:
        """Check whether token `i` is a number, in digits or as a word."""
        return self.kinds[i] == "N" or self.words[i] in WORDS

    def span(self, i: int, j: int) -> str:
        """Return the original text of tokens[i:j]."""
        if "P" not in self.kinds[i:j]:  # the usual case, which needs no positions
            return " ".join(self._originals[i:j])
        end = self._starts[j - 1] + len(self._originals[j - 1])
        return self.text[self._starts[i] : end]

    def __len__(self) -> int:
        return len(self._originals)

    def closing(self, i: int, end: int) -> int:
        """Return the index of the mark that closes the bracket at `i`, or `end` without a mark."""
        mark = CLOSING[self.words[i]]
        if mark not in self._closings:
            self._closings[mark] = [
                j for j, word in enumerate(self.words) if word == mark
            ]
        positions = self._closings[mark]
        at = bisect_right(positions, i)
        if at == len(positions):
            return end
        return min(positions[at], end)

    def stripped(self, i: int, j: int) -> str:
        """Return the text of tokens[i:j] without marks at its ends."""
        return self.span(i, j).strip(" ,;:.-*") if i < j else ""

    def is_glued(self, i: int) -> bool:
        """Check whether token `i` follows the previous token without a space."""
        if not 0 < i < len(self._originals):
            return False
        return self._starts[i] == self._starts[i - 1] + len(self._originals[i - 1])


Range = tuple[float, float]

_TO = frozenset({"to", "or", "-", "à", "bis", "tot"})
_AFTER_A = frozenset({"few", "couple", "half", "quarter"})
_LITTLE = frozenset({"little", "good", "bit"})
_DOZEN = 12.0
_MARKS = {
    "⁄": "/", "∕": "/", "’": "'", "‘": "'", "´": "'", "”": '"', "“": '"', "″": '"', "×": "x",
} | dict.fromkeys("‐‑‒–—−", "-") | {chr(0xFF0F + n): chr(0x2F + n) for n in range(11)}  # fmt: skip
# The space separates the parts of "1½".
_GLYPHS = {
    glyph: " " + unicodedata.normalize("NFKC", glyph).replace("⁄", "/")
    for glyph in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
_PLAIN = _MARKS | _GLYPHS
# "¹/₂", "1¹⁄₂", "⅟2": a fraction with small digits, or with one character for its numerator.
_SMALL_FRACTION = re.compile(
    r"(⅟|[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,3}[/⁄∕])([₀-₉0-9]{1,3})|([0-9]{1,3}[/⁄∕])([₀-₉]{1,3})"
)
# "11⁄2": a mixed number with a fraction slash that lost its space.
_LOST_BLANK = re.compile(r"(?<![\d.,/⁄])([1-9])([1-9]⁄[2-9])(?!\d)")
_SPECIAL = re.compile(f"[{''.join(_PLAIN)}]")
_FRACTION = re.compile(r"(?:(\d+)(?:\s+|-))?(\d+)/(\d+)")
# Maximum number. It is exact as a float, and larger than any real amount.
_MAX_NUMBER = 1e15
# Larger numbers. Python rejects integers of more than 4,300 digits.
_OVER = re.compile(r"\d{16}")


def replace_glyphs(text: str) -> str:
    """Replace glyphs, dashes and quotation marks with ASCII: "1½–2 cups" becomes "1 1/2-2 cups"."""
    if text.isascii():
        return text
    text = _LOST_BLANK.sub(r"\1 \2", text)
    text = _SMALL_FRACTION.sub(_in_plain_digits, text)
    return _SPECIAL.sub(lambda mark: _PLAIN[mark.group()], text)


def _in_plain_digits(fraction: re.Match[str]) -> str:
    """Return a fraction in ASCII, with a space before it if its numerator is small."""
    blank = "" if fraction[3] else " "
    return blank + unicodedata.normalize("NFKC", fraction[0]).replace("⁄", "/")


@lru_cache(maxsize=4096)
def number(text: str) -> float:
    """Return the value of a text that matches `NUMBER`.

    >>> number("1 1/2"), number("1,000"), number("1,5"), number(".25"), number("1,000,000")
    (1.5, 1000.0, 1.5, 0.25, 1000000.0)
    """
    if _OVER.match(text):
        return _MAX_NUMBER
    fraction = _FRACTION.fullmatch(text)
    if fraction:
        integer, top, bottom = fraction.groups()
        return int(integer or 0) + int(top) / int(bottom)
    head, comma, tail = text.partition(",")
    if comma and len(tail) < 3:
        return float(f"{head}.{tail}")
    return min(float(text.replace(",", "")), _MAX_NUMBER)


def read_number(tokens: Tokens, i: int, end: int) -> tuple[Range, int] | None:
    """Read the number or range at token `i`. Return it and the next index, or None."""
    if tokens.kinds[i] == "N":
        return _read_digits(tokens, i, end)
    if tokens.words[i] in {"a", "an"}:
        return _read_article(tokens, i, end)
    return _read_number_words(tokens, i)


def _read_digits(tokens: Tokens, i: int, end: int) -> tuple[Range, int]:
    """Read a number or range in digits, perhaps of dozens."""
    (low, high), i = _read_range(tokens, i, end)
    if tokens.words[i] == "dozen":  # "2 dozen eggs", "1 to 2 dozen"
        return (low * _DOZEN, high * _DOZEN), i + 1
    return (low, high), i


def _read_range(tokens: Tokens, i: int, end: int) -> tuple[Range, int]:
    """Read a number in digits, and the second number of "2 to 3" or "1 and 1/2"."""
    kinds, words = tokens.kinds, tokens.words
    low = number(words[i])
    i += 1
    j = i
    while words[j] in _TO:
        j += 1
    if i < j < end and kinds[j] == "N":
        high = number(words[j])
        if high > low:  # "2 to 3", "12- to 16-pound", but not "2 - 1"
            return (low, high), j + 1
    if words[i] == "and" and kinds[i + 1] == "N" and "/" in words[i + 1]:
        part = number(words[i + 1])
        if part < 1.0 and low == int(low):  # "1 and 1/2"
            return (low + part, low + part), i + 2
    return (low, low), i


def _read_article(tokens: Tokens, i: int, end: int) -> tuple[Range, int] | None:
    """Read "a pinch", "a 5-pound goose", "a few" or "a dozen". "a little oil" has no number."""
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


def _read_number_words(tokens: Tokens, i: int) -> tuple[Range, int] | None:
    """Read "two", "half a", "two dozen" or "two to three"."""
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


_BRACKET = re.compile(r"([()\[\]])")
_PARTING = frozenset({"(", "; "})
_OPENING = frozenset(CLOSING)
_CLOSERS = frozenset(CLOSING.values())
# A commercial can size ("No. 303", "#10"), never an amount.
_NUMBERED = re.compile(
    r"(?<![\w(#])(?:no\. ?|# ?)(\d{1,4}(?: ?1/2)?)(?![\w/.,%])", re.IGNORECASE
)
# A grade of sugar by fineness, usually 10x.
_TEN_X = re.compile(
    r"\b(?:10|6|4) ?-?x,? (?:(?:powdered|confectioners?'?s?|icing) )?sugar\b",
    re.IGNORECASE,
)
# A length and its direction: "1-inch-thick", 8"
_THICK = re.compile(
    r"(?<=\d)(?:-(inch|in|cm|mm)[ -](?:thick|long|wide|diameter|square|round)\b"
    r"|\"(?:(?=[\s,)])|-(?:thick|long|wide|diameter)\b))"
)

_SPOON = (
    r"\b(?:c(?:uill?(?:[eè]res?)?)?|colh(?:er(?:es)?)?)\.?(?: ?[aà]\b| ?de\b)? ?\(?"
)
_FOREIGN = [
    (marks, re.compile(pattern, re.IGNORECASE), replacement)
    for marks, pattern, replacement in (
        (("soupe", "sopa"), rf"{_SPOON}(?:soupe|sopa)\b\)?(?: de\b)?", "tbsp"),
        (
            ("café", "chá"),
            rf"{_SPOON}(?:chá|(?<=[àae] |.\()café)\b\)?(?: de\b)?",
            "tsp",
        ),
        (("c.s", ".à.s", "ст."), r"\bc\.(?:à\.)?s\b\.?(?: de\b)?|ст\. ?л\.", "tbsp"),
        (("c.c", ".à.c", "ч."), r"\bc\.(?:à\.)?c\b\.?(?: de\b)?|ч\. ?л\.", "tsp"),
        (
            ("(s)", "(n)", "q.b", "q. b"),
            r"(?<=[^\W\d_])\([sn]\)|(?:\+ )?\bq\. ?b\b\.?",
            "",
        ),
        (("个", "根", "勺", "适量"), r"\A(?:适量|[一两三四五六半]+[个根勺]半?)\s", ""),
        (("count ",), r"\A(\d+) ?count (?=[^\W\d_])", r"\1 "),  # "2count eggs"
        ((" 1/", " 3/"), r"(?<=\A\d) (?:e|i|y|og|und|et|&|\+) (?=\d/)", " "),
        (("/",), r"(?<=\d)(?<=/\d|\d\d)(?:nds?|rds?|ths?)\b", ""),  # "2/3rds cup"
        ((" / ",), r"(?<=\d) / (?=(?:[2-9]|10|12|16)(?![\d.,]))", "/"),  # "3 / 8 cup"
        ((" | ",), r" \| [^|]{1,30}? de\b", " de"),  # both numbers: "lata | latas de"
        ((" *",), r" \*+ ?(?:in|or|see|if|use|you|can|optional)\b.*\Z", ""),
        ((" - ",), r"(?<=\d) - (?=[^\W\d_]{3})|(?<=\)) - (?=[^\W\d_])", " "),
        (('"-',), r'(?<=\d)"-(?=\d)', "-"),
        (
            ("jus d", "saft v", "zumo de", "suco de", "succo di"),
            r"\A(?:le |il |o )?(?:jus|saft|zumo|suco|succo) (?:de?|von|di)[ '](?=\d)",
            "",
        ),
        (("n/a ", "none "), r"(?<![^ ])(?:N/A|None) (?=[^\W\d_])", ""),
        (
            ("as you like ", "as needed ", "to your taste "),
            r"\A(?:as you like|as needed|to your taste) (?=[^\W\d_(])",
            "",
        ),
        (
            (" d'",),
            rf"\A(\d[\d /.,]{{0,9}}(?:{'|'.join(sorted(SPELLINGS))})) d'",
            r"\1 de ",
        ),
    )
]
"""Replacements for words around a food in databases and other languages. A line without one of the
marks needs no search."""


def rewrite_line(text: str) -> str:
    """Return a line in ASCII punctuation, with ambiguous parts rewritten."""
    text = digits_for_words(text)
    lower = text.lower()
    if "x" in lower and "sugar" in lower:
        text = _TEN_X.sub("confectioners' sugar", text)
    if "no." in lower or "#" in lower:
        text = _NUMBERED.sub(r"(No. \1)", text)
    if "-" in lower or '"' in lower:
        text = _THICK.sub(lambda length: f"-{length[1] or 'inch'}", text)
    for marks, pattern, replacement in _FOREIGN:
        # Faster than `any`, because a generator costs more than the checks.
        for mark in marks:
            if mark in lower:
                text = pattern.sub(replacement, text).strip()
                break
    if not (_OPENING.isdisjoint(text) and _CLOSERS.isdisjoint(text)):
        text = _flatten_brackets(text)
    return text


def _flatten_brackets(text: str) -> str:
    """Flatten brackets to one level, so that later steps need no recursion. Drop stray brackets."""
    depth = 0
    parts: list[str] = []
    for part in filter(None, _BRACKET.split(text)):
        if part in _OPENING:
            if not (parts and parts[-1] in _PARTING):
                parts.append("(" if depth == 0 else "; ")
            depth += 1
        elif part in _CLOSERS:
            depth -= 1
            parts.append(")" if depth == 0 else "")
            depth = max(depth, 0)
        else:
            parts.append(part)
    return " ".join("".join(parts).split())
