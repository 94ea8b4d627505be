"""Fast path for ingredient lines of the simplest form, without tokenising them.

"2 cups brown rice, rinsed and drained": a number, perhaps a unit, a name of unambiguous words, and
what follows commas; or a name alone. More than a third of a corpus's distinct lines are such. The
result equals that of `parser`, ten times faster; a test compares them, and doubtful lines are left
to the parser.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

from toque.cooking.ingredients.amounts import OPENERS
from toque.cooking.ingredients.segments import SPECIAL_WORDS, is_food_like, is_quality
from toque.cooking.ingredients.units import LATE_SPELLINGS, SPELLINGS
from toque.cooking.ingredients.vocabulary import ADVERBS, REMARKS, SEGMENT_PREPARED, UNSAID


class After(NamedTuple):
    """The text after a name, by its kind; "" for nothing."""

    preparation: str
    comment: str
    purpose: str
    optional: bool


_NOTHING: Final = After("", "", "", optional=False)

_WORDS: Final = "[A-Za-z]+(?: [A-Za-z]+)*"
_PLAIN: Final = re.compile(
    rf"((?:\d{{1,3}} )?\d/[2345689]|[1-9]\d{{0,3}}) ({_WORDS})((?:, {_WORDS})*)"
)
_NAME: Final = re.compile(_WORDS)
_CLOSER: Final = (
    SPECIAL_WORDS | LATE_SPELLINGS | OPENERS | UNSAID
    | {"of", "from", "dozen", "dozens", "degree", "degrees", "with", "part", "parts", "t"}
)  # fmt: skip
"""Words in a name that need the full parser."""
_JOINED: Final = frozenset({"or", "and"})


def plain_line(text: str) -> tuple[str, str | None, str, After] | None:
    """Number ("" for none), unit, name and what follows it; None if the line needs the full parser.

    >>> number, unit, name, after = plain_line("2 cups brown rice, rinsed and drained")
    >>> number, unit, name, after.preparation
    ('2', 'cup', 'brown rice', 'rinsed and drained')
    >>> plain_line("2-3 garlic cloves")
    >>> plain_line("brown rice")[:3]
    ('', None, 'brown rice')
    """
    if text[:1].isalpha():  # a name alone, as prompts list them
        if _NAME.fullmatch(text) is None:
            return None
        words = text.lower().split(" ")
        plain = _CLOSER.isdisjoint(words) and not is_quality(words[-1])
        return ("", None, text, _NOTHING) if plain else None
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    number, head, after = match.groups()
    first, _, rest = head.partition(" ")
    unit = SPELLINGS.get(first.lower())
    if unit is not None:
        if not rest or len(first) == 1:
            return None
        head = rest
    words = head.lower().split(" ")
    if not _CLOSER.isdisjoint(words) or is_quality(words[-1]):
        return None
    tails = _after(after) if after else _NOTHING
    return None if tails is None else (number, unit.name if unit else None, head, tails)


@lru_cache(maxsize=1 << 13)
def _after(after: str) -> After | None:
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
    sorted_parts: dict[str, list[str]] = {"preparation": [], "comment": [], "purpose": []}
    for text, low in zip(parts, words, strict=True):
        sorted_parts[_kind(low)].append(text)
    preparation, comment, purpose = map(", ".join, sorted_parts.values())
    said = comment.lower()
    return After(preparation, comment, purpose, "optional" in said or "if desired" in said)


def _kind(words: list[str]) -> str:
    if words[0] in {"for", "to"} and words[1:2] != ["taste"]:
        return "purpose"
    if words[0] in REMARKS or words[:2] == ["at", "least"]:
        return "comment"
    opening = words[:4]
    if not SEGMENT_PREPARED.isdisjoint(opening) or not ADVERBS.isdisjoint(opening):
        return "preparation"
    return "comment"
