"""Recipe's form as patterns, for constrained decoding: two headed lists, asked ingredients first.

The requested ingredients come first, each once, in the order and amounts that the model likes; what
else it wants to use follows. So nothing is left out and nothing asked for is listed twice.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Final

from toque.cooking.ingredients.names import forms, stem
from toque.cooking.ingredients.number_words import WORDS
from toque.cooking.ingredients.vocabulary import (
    ADVERBS,
    LATE_SPELLINGS,
    PREPARED,
    SEGMENT_PREPARED,
    SIZES,
    SPELLINGS,
)

MOST_MORE: Final = 5  # most ingredients that were not requested; a guess
MOST_STEPS: Final = 30  # most steps, a guess: long recipes have twenty


def _any_of(words: frozenset[str]) -> str:
    """A group of the words, the longest first."""
    return f"(?:{'|'.join(re.escape(w) for w in sorted(words, key=lambda w: (-len(w), w)))})"


_FRACTIONS: Final = "½¼¾⅓⅔⅛⅜⅝⅞"
_DIGITS: Final = rf"[0-9{_FRACTIONS}]{{1,5}}(?:[./,-][0-9]{{1,3}})?"
_COUNT: Final = rf"(?:{_DIGITS}(?: (?:to |or |x )?{_DIGITS})?|{_any_of(frozenset(WORDS) | {'a'})})"
_SIZE_OF_CAN: Final = r"\([0-9][0-9A-Za-z ./-]{0,20}\)"
_UNIT: Final = rf"{_any_of(frozenset(SPELLINGS))}\.?(?: of)?"
_PLAIN_ADVERBS: Final = frozenset(filter(str.isalpha, ADVERBS))  # not "fresh-"
_DONE: Final = rf"(?:{_any_of(_PLAIN_ADVERBS)} )?{_any_of(PREPARED)}"
_STATES: Final = frozenset(w for w in SEGMENT_PREPARED if w in PREPARED or w.endswith("ed"))
_STATE: Final = rf"(?:{_any_of(_PLAIN_ADVERBS)} )?{_any_of(_STATES | {'split', 'cold', 'warm'})}"
_AMOUNT: Final = (
    rf"(?:{_COUNT} ?)?(?: ?{_SIZE_OF_CAN} )?(?:{_UNIT} )?(?:{_any_of(SIZES)} )?(?:{_DONE} )?"
)
_LATE: Final = rf"(?: {_any_of(LATE_SPELLINGS)})?"
_REMARK: Final = (
    r"(?:,? (?:to taste|as needed|optional|divided|at room temperature|for serving|for garnish)"
    rf"|, {_STATE}(?: and {_STATE})?(?: up| into [a-z ]{{4,20}})?)?"
    r"(?: \([0-9A-Za-z ./-]{2,30}\))?"
)
_FREE_ITEM: Final = rf"- {_AMOUNT}\w[\w'-]*(?: [\w'&-]+){{0,4}}{_REMARK}\n"
_STEP: Final = r"\w.*[.!?)]"


def recipe_form(asked: Sequence[str]) -> Generator[str, str, None]:
    """The patterns of a recipe that uses the names `asked`, if any; a `Form` of generation."""
    missing = list({name.casefold(): name for name in asked}.values())
    before = r"Ingredients:\n"
    while len(missing) > 1:
        written = yield before + _item(missing)
        line = written.rstrip("\n").rpartition("\n")[2] + "\n"
        # The longest name that it has, as "oil" is also in "olive oil".
        names = sorted(missing, key=len, reverse=True)
        missing.remove(next(name for name in names if re.fullmatch(_item([name]), line)))
        before = ""
    steps = ""  # 1. to MOST_STEPS, each a sentence: 1. S(\n2. S(\n3. S)?)?
    for number in range(MOST_STEPS, 0, -1):
        steps = rf"{number}\. {_STEP}" + (rf"(?:\n{steps})?" if steps else "")
    # In one part with the last of them, because "\n\n" may be one token.
    first = _item(missing) if missing else _FREE_ITEM
    yield f"{before}{first}(?:{_FREE_ITEM}){{0,{MOST_MORE}}}" + rf"\nInstructions:\n{steps}"


def _item(names: Sequence[str]) -> str:
    return rf"- {_AMOUNT}(?:{'|'.join(map(_name, names))}){_LATE}{_REMARK}\n"


def _name(name: str) -> str:
    """A name as asked or in small letters, its last word singular or plural."""
    opening, blank, last = name.strip().rpartition(" ")
    ends = _any_of(frozenset({last, *forms(stem(last.casefold()))}))
    openings = {opening + blank, (opening + blank).casefold()}
    return f"{_any_of(frozenset(openings))}{ends}"
