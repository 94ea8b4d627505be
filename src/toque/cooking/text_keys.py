"""Word splitting and normalisation keys of recipe texts; fast for ASCII and common signs."""

from __future__ import annotations

import re
import string
from typing import Final

_LETTERS: Final = bytes(
    ord(chr(code).lower()) if chr(code) in string.ascii_letters else 32 for code in range(256)
)
"""Bytes of ASCII: letters in lower case, everything else a blank."""
_ASCII_LETTERS: Final = _LETTERS[:128] + bytes(range(128, 256))
"""The same, with all others as they are."""
_ASCII: Final = bytes(range(128))
_LOWER: Final = bytes(code + 32 if 65 <= code <= 90 else code for code in range(256))
_NOT_LETTERS: Final = bytes(
    code for code in range(128) if chr(code) not in string.ascii_letters and code != 10
)
_NOT_ALPHANUMERIC: Final = bytes(
    code for code in range(128) if chr(code) not in string.ascii_letters + string.digits
)
# Signs that stand between words in recipes, so that what is left of most texts is ASCII.
_SIGN_CHARACTERS: Final = "°½¼¾⅓⅔⅛⅜⅝⅞⅙⅚⅕⅖⅗⅘–—‑’‘“”®™©…×•·⁄\u00a0´″"
_SIGNS: Final = re.compile(f"[{_SIGN_CHARACTERS}]")
_SIGNS_ALONE: Final = frozenset(_SIGN_CHARACTERS)
_WORD: Final = re.compile(r"[^\W\d_]+")
_DROPPED: Final = re.compile("[°–—‑’‘“”®™©…×•·⁄\u00a0´″]")
_UNUSUAL: Final = re.compile("[^\x00-\x7f½¼¾⅓⅔⅛⅜⅝⅞⅙⅚⅕⅖⅗⅘]")
_FOREIGN: Final = re.compile(r"[^\x00-\x7f]+")


def words_of(text: str) -> list[str]:
    """The words of a text in lower case: runs of letters. A fraction such as "½" is no word.

    >>> words_of("Don't add 1½ cups crème fraîche!")
    ['don', 't', 'add', 'cups', 'crème', 'fraîche']
    """
    data = text.encode("utf-8", "replace")
    foreign = set() if text.isascii() else set(data.translate(None, _ASCII).decode())
    if foreign <= _SIGNS_ALONE:
        return data.translate(_LETTERS).decode().split()
    if not "".join(foreign - _SIGNS_ALONE).isalpha():
        return _WORD.findall(_SIGNS.sub(" ", text).lower())
    for sign in foreign & _SIGNS_ALONE:
        text = text.replace(sign, " ")
    return text.lower().encode().translate(_ASCII_LETTERS).decode().split()


def bare_lines(text: str) -> list[str] | None:
    r"""The letters of each line of a text, in lower case; None if it contains other scripts.

    Lines with the same words have the same letters: if these differ, so do the words.

    >>> bare_lines("Mix well.\nMix, well!"), bare_lines("crème")
    (['mixwell', 'mixwell'], None)
    """
    if not text.isascii():
        text = _SIGNS.sub("", text)
        if not text.isascii():
            return None
    return text.encode().translate(_LOWER, _NOT_LETTERS).decode().split("\n")


def normalised(text: str) -> bytes:
    """Key of a text for finding duplicates: its letters and digits, case-folded, in UTF-8.

    >>> normalised("1½ Cups -- Crème!").decode()
    '1½cupscrème'
    """
    if text.isascii():
        return text.encode().translate(_LOWER, _NOT_ALPHANUMERIC)
    text = _DROPPED.sub("", text)
    if _UNUSUAL.search(text) is None:  # fractions stay as they are in any case
        return text.encode().translate(_LOWER, _NOT_ALPHANUMERIC)
    folded = _FOREIGN.sub(_alphanumeric, text.casefold())
    return folded.encode().translate(None, _NOT_ALPHANUMERIC)


def _alphanumeric(run: re.Match[str]) -> str:
    return "".join(filter(str.isalnum, run.group()))
