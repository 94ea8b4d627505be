"""Fast path for ingredient lines of the simplest form, without tokenising them.

"2 cups brown rice, rinsed and drained": a number, perhaps a unit, a name of unambiguous words, and
what follows commas; or a name alone. More than a third of a corpus's distinct lines are such. The
result equals that of `parser`, ten times faster; a test compares them, and doubtful lines are left
to the parser.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from toque.cooking.ingredients.amounts import OPENERS, Amount, IngredientLine
from toque.cooking.ingredients.numbers import number
from toque.cooking.ingredients.segments import (
    NO_REMARKS,
    SPECIAL_WORDS,
    Remarks,
    is_food_like,
    is_quality,
    remark_kind,
    remarks,
)
from toque.cooking.ingredients.units import LATE_SPELLINGS, SPELLINGS
from toque.cooking.ingredients.vocabulary import UNSAID

_WORDS: Final = "[A-Za-z]+(?: [A-Za-z]+)*"
_PLAIN: Final = re.compile(
    rf"((?:\d{{1,3}} )?\d/[2345689]|[1-9]\d{{0,3}}) ({_WORDS})((?:, {_WORDS})*)"
)
_NAME: Final = re.compile(_WORDS)
_CLOSER: Final = (
    SPECIAL_WORDS | LATE_SPELLINGS | OPENERS | UNSAID
    | {"of", "de", "di", "du", "del", "da", "from", "dozen", "dozens", "degree", "degrees", "with",
       "part", "parts", "t", "none"}
)  # fmt: skip
"""Words in a name that need the full parser."""
_JOINED: Final = frozenset({"or", "and"})


def plain_line(text: str) -> IngredientLine | None:
    """A line in ASCII with single blanks; None if it needs the full parser.

    >>> line = plain_line("2 cups brown rice, rinsed and drained")
    >>> line.quantity, line.unit, line.name, line.preparation
    ((2.0, 2.0), 'cup', 'brown rice', 'rinsed and drained')
    >>> plain_line("2-3 garlic cloves")
    >>> plain_line("brown rice")[:4]
    (None, None, '', 'brown rice')
    """
    if text[:1].isalpha():  # a name alone, as prompts list them
        if _NAME.fullmatch(text) is None:
            return None
        digits, unit, name, after = "", None, text, ""
    else:
        match = _PLAIN.fullmatch(text)
        if match is None:
            return None
        digits, name, after = match.groups()
        first, _, rest = name.partition(" ")
        unit = SPELLINGS.get(first.lower())
        if unit is not None:
            if not rest or len(first) == 1:
                return None
            name = rest
    words = name.lower().split(" ")
    if not _CLOSER.isdisjoint(words) or is_quality(words[-1]):
        return None
    remarks = _remarks(after) if after else NO_REMARKS
    if remarks is None:
        return None
    if not digits:
        return IngredientLine(None, None, "", name, *remarks, ())
    value = number(digits)
    amount = Amount((value, value), unit.name if unit else None)
    return IngredientLine(amount.quantity, amount.unit, "", name, *remarks, (amount,))


@lru_cache(maxsize=1 << 13)
def _remarks(after: str) -> Remarks | None:
    """The text after the commas, classified; None if a part is ambiguous."""
    parts = after[2:].split(", ")
    words = [part.lower().split(" ") for part in parts]
    if any(part[0] in OPENERS or part[0] in _JOINED for part in words):
        return None
    for part in words:
        if not is_food_like(part):
            break
        if not _JOINED.isdisjoint(part):
            return None  # "water, broth or stock" is one name
    return remarks([(remark_kind(low), text) for text, low in zip(parts, words, strict=True)])
