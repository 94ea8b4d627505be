"""List fields: a list of lines from a list, a printed list, or text with separators."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from toque.cooking.schemas.printed_lists import looks_like_literal, parse_literal

_SEPARATORS = ("\n", "|", ";")
_AMOUNT_FOLLOWS = re.compile(
    r",\s+(?=(?:\d|[¼½¾⅓⅔⅛⅜⅝⅞]|an? |pinch |dash |salt\b|pepper\b))", re.IGNORECASE
)
_MARKUP = re.compile(r"<(?:br|p|li|ol|ul)\b", re.IGNORECASE)
_ITEM_TEXT = ("text", "original", "originalString", "line", "raw", "step", "description")
_QUANTITY = ("quantity", "amount", "qty")
_UNIT = ("unit", "units", "measure")
_NAME = ("name", "ingredient", "item", "food", "title")


class BrokenListError(ValueError):
    """A cell looks like a list and cannot be parsed as one, e.g. because it was truncated."""


def ingredient_lines(value: Any) -> list[str]:
    """Ingredient lines of a list, a printed list, or a text with one separator.

    >>> ingredient_lines("['2 eggs', 'salt']"), ingredient_lines("2 eggs|salt")
    (['2 eggs', 'salt'], ['2 eggs', 'salt'])
    >>> ingredient_lines("1 onion, chopped, 2 eggs")
    ['1 onion, chopped', '2 eggs']

    Raises:
        BrokenListError: the text looks like a list and cannot be parsed as one.
    """
    value = _read(value)
    return _split(value, commas=True) if isinstance(value, str) else _all_lines(value)


def step_lines(value: Any) -> list[str]:
    """Steps of a list, a printed list, or a text; a text without line breaks is one step.

    Raises:
        BrokenListError: the text looks like a list and cannot be parsed as one.
    """
    value = _read(value)
    return _split(value, commas=False) if isinstance(value, str) else _all_lines(value)


def text_of(value: Any) -> str:
    """A text, or the first text of a list."""
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else ""


def _read(value: Any) -> Any:
    """The value printed in a cell; the text itself if it is not a printed value."""
    if not isinstance(value, str) or not looks_like_literal(value):
        return value
    try:
        return parse_literal(value)
    except ValueError as error:
        if value.lstrip().startswith(("[", "c(", "list(")):
            raise BrokenListError(str(error)) from error
        return value  # text that happens to begin with a brace or a quote


def _split(text: str, *, commas: bool) -> list[str]:
    if "\n" in text or _MARKUP.search(text):
        return [text]  # cleaning makes lines of it
    for separator in _SEPARATORS[1:] if commas else ("|",):
        if separator in text:
            return [part.strip() for part in text.split(separator)]
    if not commas:
        return [text]
    names_only = not any(character.isdigit() for character in text)
    parts = text.split(",") if names_only else _AMOUNT_FOLLOWS.split(text)
    return [part.strip() for part in parts]


def _all_lines(value: Any) -> list[str]:
    if isinstance(value, list) and set(map(type, value)) == {str}:
        return value  # as nearly always
    return list(_lines(value))


def _lines(value: Any, depth: int = 0) -> Iterator[str]:
    """The texts in lists of texts, of lists and of objects, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and depth < 8:
        for item in value:
            yield from _lines(item, depth + 1)
    elif isinstance(value, dict) and depth < 8:
        yield from _lines_of_object(value, depth)


def _lines_of_object(value: Mapping[Any, Any], depth: int) -> Iterator[str]:
    nested = value.get("itemListElement") or value.get("steps") or value.get("ingredients")
    text = next((value[name] for name in _ITEM_TEXT if isinstance(value.get(name), str)), "")
    if isinstance(nested, list):
        heading = text_of(value.get("name") or value.get("title")).strip().rstrip(":")
        if heading:
            yield f"{heading}:"
        yield from _lines(nested, depth + 1)
    elif text:
        yield text
    elif parts := [_part(value, names) for names in (_QUANTITY, _UNIT, _NAME)]:
        if parts[2]:
            yield " ".join(part for part in parts if part)
            return
        for heading, items in value.items():  # {"For the sauce": [...]}
            if isinstance(items, list) and isinstance(heading, str):
                yield f"{heading.rstrip(':')}:"
                yield from _lines(items, depth + 1)


def _part(value: Mapping[Any, Any], names: tuple[str, ...]) -> str:
    found = next((value[name] for name in names if value.get(name)), "")
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    return str(found) if isinstance(found, str | int | float) else ""
