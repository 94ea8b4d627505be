"""Answer forms for constrained decoding: the recipe format as regexes, and JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from toque.errors import ConfigError, argument
from toque.user_paths import named_path

MAX_OTHER_INGREDIENTS = 5
"""Maximum number of ingredients that the prompt does not name. A guess."""
MAX_STEPS = 30
"""Maximum number of steps. A guess: long recipes have 20."""
SHIPPED = {"recipe": Path(__file__).with_name("recipe.schema.json")}
"""Schemas that come with Toque."""


def _any_of(words: frozenset[str]) -> str:
    """Return a pattern that matches any of the words. The longest word is first."""
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    return f"(?:{'|'.join(map(re.escape, longest_first))})"


_FRACTIONS = "½¼¾⅓⅔⅛⅜⅝⅞"
_DIGITS = rf"[0-9{_FRACTIONS}]{{1,5}}(?:[./,-][0-9]{{1,3}})?"
_COUNT = (
    rf"(?:{_DIGITS}(?: (?:to |or |x )?{_DIGITS})?|{_any_of(frozenset(WORDS) | {'a'})})"
)
_SIZE_OF_CAN = r"\([0-9][0-9A-Za-z ./-]{0,20}\)"
_UNIT = rf"{_any_of(frozenset(SPELLINGS))}\.?(?: of)?"
_PLAIN_ADVERBS = frozenset(filter(str.isalpha, ADVERBS))  # without "fresh-"
_DONE = rf"(?:{_any_of(_PLAIN_ADVERBS)} )?{_any_of(PREPARED)}"
_STATES = frozenset(w for w in SEGMENT_PREPARED if w in PREPARED or w.endswith("ed"))
_STATE = (
    rf"(?:{_any_of(_PLAIN_ADVERBS)} )?{_any_of(_STATES | {'split', 'cold', 'warm'})}"
)
_AMOUNT = (
    rf"(?:{_COUNT} ?)?(?: ?{_SIZE_OF_CAN} )?(?:{_UNIT} )?(?:{_any_of(SIZES)} )?"
    rf"(?:{_DONE} )?"
)
_LATE = rf"(?: {_any_of(LATE_SPELLINGS)})?"
_REMARK = (
    r"(?:,? (?:to taste|as needed|optional|divided|at room temperature|for serving|for garnish)"
    rf"|, {_STATE}(?: and {_STATE})?(?: up| into [a-z ]{{4,20}})?)?"
    r"(?: \([0-9A-Za-z ./-]{2,30}\))?"
)
_FREE_ITEM = rf"- {_AMOUNT}\w[\w'-]*(?: [\w'&-]+){{0,4}}{_REMARK}\n"
_STEP = r"\w.*[.!?)]"


def recipe_form(ingredients: Sequence[str]) -> Generator[str, str, None]:
    """Yield the patterns of a recipe with the requested ingredients, as a `Form` of generation.

    The requested `ingredients` are first in the list, each once, in any order and with any amounts.
    Other ingredients may follow. After each pattern except the last, the generator receives the
    generated text.
    """
    missing = list({name.casefold(): name for name in ingredients}.values())
    header = r"Ingredients:\n"
    while len(missing) > 1:
        text = yield header + _item(missing)
        line = text.rstrip("\n").rpartition("\n")[2] + "\n"
        missing.remove(_name_in_line(missing, line))
        header = ""

    # The last ingredients and the steps are one pattern, because "\n\n" may be one token.
    first_item = _item(missing) if missing else _FREE_ITEM
    other_items = rf"(?:{_FREE_ITEM}){{0,{MAX_OTHER_INGREDIENTS}}}"
    yield rf"{header}{first_item}{other_items}\nInstructions:\n{_steps()}"


def _steps() -> str:
    r"""Return a pattern of 1 to `MAX_STEPS` steps, such as 1\. S(?:\n2\. S(?:\n3\. S)?)?"""
    steps = rf"{MAX_STEPS}\. {_STEP}"
    for number in range(MAX_STEPS - 1, 0, -1):
        steps = rf"{number}\. {_STEP}(?:\n{steps})?"
    return steps


def _item(names: Sequence[str]) -> str:
    """Return a pattern of an ingredient line with one of the names."""
    return rf"- {_AMOUNT}(?:{'|'.join(map(_name, names))}){_LATE}{_REMARK}\n"


def _name_in_line(names: Sequence[str], line: str) -> str:
    """Return the longest name in a line, because a line with "olive oil" also matches "oil"."""
    longest_first = sorted(names, key=len, reverse=True)
    return next(name for name in longest_first if re.fullmatch(_item([name]), line))


def _name(name: str) -> str:
    """Return a pattern of a name, unchanged or in lower case, with the last word in any number."""
    first_words, space, last_word = name.strip().rpartition(" ")
    prefix = first_words + space
    last_words = frozenset({last_word, *forms(stem(last_word.casefold()))})
    return _any_of(frozenset({prefix, prefix.casefold()})) + _any_of(last_words)


def answer_schema(schema: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a JSON schema: a mapping unchanged, a shipped schema by name, or a schema in a file.

    Raises:
        ConfigError: The file cannot be read or is not a JSON object.
    """
    if isinstance(schema, Mapping):
        return schema

    file = SHIPPED.get(str(schema)) or named_path(schema)
    problem = ""
    try:
        content = json.loads(file.read_bytes())
        if isinstance(content, dict):
            return content
        problem = f"is a JSON {type(content).__name__}, not an object"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        problem = f"is not JSON: {error}"
    raise ConfigError(
        f"The schema {file} {problem}. {argument('schema')} must be a JSON file or one of "
        f"{', '.join(SHIPPED)}."
    )
