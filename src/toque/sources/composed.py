"""Unicode composition (NFC) in linear time.

`unicodedata.normalize` sorts a run of combining marks by insertion, which takes quadratic time when
their classes alternate: 256,000 marks took 19.5 s. Here a long run is put in its canonical order
first (UAX #15; a stable sort by class), so that nothing is left to sort and nothing is lost.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import groupby
from typing import Final

_RUN: Final = re.compile(r"[^\w\s\x00-\u02ff]{31,}")
"""More than the thirty marks of UAX #15's stream-safe text; no mark is a letter or a blank."""


def composed(text: str) -> str:
    r"""The text in NFC.

    >>> composed("cafe\u0301"), composed("\u0301\u0323" * 99) == "\u0323" * 99 + "\u0301" * 99
    ('café', True)
    """
    return unicodedata.normalize("NFC", _RUN.sub(_in_order, text))


def _in_order(run: re.Match[str]) -> str:
    """A run with its marks in canonical order; some characters are made of several marks."""
    parts = (part for character in run.group() for part in unicodedata.normalize("NFD", character))
    groups = groupby(parts, key=lambda part: unicodedata.combining(part) > 0)
    return "".join(
        "".join(sorted(group, key=unicodedata.combining) if are_marks else group)
        for are_marks, group in groups
    )
