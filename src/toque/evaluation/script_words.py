"""Splitting of texts in any script into words, for scores that count words.

A word is a run of letters, marks and decimal digits. In a script without spaces between words, each
character with its marks is a word, as in sacrebleu's tokenizer "zh".
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_ORDINALS: Final = "ªº"
"""Unicode letters that English texts use as signs, as in "350 ºF"."""
_JOINERS: Final = "\u200c\u200d"
"""Characters that change the shape of letters within a word."""
_UNSPACED: Final = re.compile(
    "[\u0e00-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1b7f"  # Thai to Burmese, Khmer
    "\u3005-\u3007\u3021-\u3029\u3031-\u303c\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff"  # kana, Zhuyin
    "\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf\ua980-\ua9ff\uaa60-\uaadf\uf900-\ufaff\uff66-\uff9f"
    "\U0001aff0-\U0001b16f\U00020000-\U0003ffff]"
)
"""Blocks of scripts without spaces, such as Chinese, Japanese, Thai, Lao, Khmer and Burmese."""
_FULL_WIDTH: Final = re.compile("[\u3001-\u303f\uff00-\uffef]")


class _Kinds(dict[int, str]):
    """Kind of each code point, for `str.translate`.

    "c": a word by itself; "w": part of a word; "m": a mark; "p": full-width punctuation; " ":
    any other character.

    A code point is classified when it first occurs. A complete table would take 0.3 s to build.
    """

    def __missing__(self, code: int) -> str:
        self[code] = kind = _classify(chr(code))
        return kind


def _classify(char: str) -> str:
    """Return the kind of a character, see `_Kinds`."""
    category = unicodedata.category(char)
    is_variant = "\ufe00" <= char <= "\ufe0f"  # selects the shape of the previous emoji
    if char in _JOINERS or (category in ("Mn", "Mc") and not is_variant):
        return "m"
    if category == "Nl" and _UNSPACED.match(char):  # the Chinese zero
        return "c"
    if category == "Nd":
        return "w"
    if category[0] in "PS" and _FULL_WIDTH.match(char):
        return "p"
    if category[0] != "L" or char in _ORDINALS:
        return " "
    return "c" if _UNSPACED.match(char) else "w"


_KINDS: Final = _Kinds()
_WORD: Final = re.compile("cm*|w[wm]*")
_CHARACTER: Final = re.compile("cm*|p")
_ASCII_WORD: Final = re.compile("[a-z0-9]+")


def folded_words(text: str) -> list[str]:
    """Split a text into words. Fold the case, and compose the characters (NFC).

    >>> folded_words("2 Cups CAFÉ, हिन्दी 豆腐")
    ['2', 'cups', 'café', 'हिन्दी', '豆', '腐']
    """
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    # casefold turns the Turkish İ into an i with a dot above.
    folded = unicodedata.normalize("NFC", text).casefold().replace("i\u0307", "i")
    folded = unicodedata.normalize("NFC", folded)
    kinds = folded.translate(_KINDS)
    return [folded[m.start() : m.end()] for m in _WORD.finditer(kinds)]


def add_blanks(text: str) -> str:
    """Normalise a text to NFC and add spaces around characters of scripts written without spaces.

    Full-width punctuation is also surrounded by spaces.

    >>> add_blanks("豆腐 tofu").split()
    ['豆', '腐', 'tofu']
    """
    if text.isascii():
        return text
    text = unicodedata.normalize("NFC", text)
    parts: list[str] = []
    last = 0
    for match in _CHARACTER.finditer(text.translate(_KINDS)):
        start, end = match.span()
        parts += [text[last:start], " ", text[start:end], " "]
        last = end
    return "".join([*parts, text[last:]])
