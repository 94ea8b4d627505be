"""RecipeML: recipes in XML. See http://www.formatdata.com/recipeml/spec/.

Each recipe is parsed alone, without the document type of its file. So no entity of a file is
expanded, and nothing is downloaded.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final
from xml.etree import ElementTree as ET

_DOCUMENT: Final = re.compile(rb"<recipeml\b|<!DOCTYPE\s+recipeml\b", re.IGNORECASE)
_START: Final = re.compile(rb"<recipe[\s>]")
_END: Final = re.compile(rb"</recipe\s{0,9}>")
_ENTITY: Final = re.compile(
    r"&(?!(?:amp|lt|gt|quot|apos|#\d+|#x[\da-fA-F]+);)(\w{1,30});"
)
_KEYS: Final = {"item": "food", "prep": "note", "ing-note": "note", "modifier": "note"}
"""Our keys of the parts of an ingredient."""
DAMAGED: Final = "damaged XML"


def is_recipeml(start: bytes) -> bool:
    """Check whether a file is RecipeML."""
    return start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<") and (
        _DOCUMENT.search(start, 0, 4096) is not None
    )


def recipes_in(text: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each recipe in a file."""
    text = _without_comments(text)
    position = 0
    while start := _START.search(text, position):
        end = _END.search(text, start.end())
        position = len(text) if end is None else end.end()
        yield start.start(), position


def _without_comments(text: bytes) -> bytes:
    """Replace comments by spaces, so that positions stay the same."""
    parts: list[bytes] = []
    position = 0
    while (start := text.find(b"<!--", position)) >= 0:
        end = text.find(b"-->", start + 4)
        end = len(text) if end < 0 else end + 3
        parts += [text[position:start], b" " * (end - start)]
        position = end
    return b"".join([*parts, text[position:]])


def record_of_recipeml(text: str) -> dict[str, Any] | str:
    """Convert a recipe element into a record. Return the reason why it cannot be read."""
    # XML knows only five entities. Others are characters of HTML.
    text = _ENTITY.sub(lambda match: html.unescape(match[0]), text)
    try:
        recipe = ET.fromstring(text)  # noqa: S314 - the text has no document type
    except ET.ParseError:
        return DAMAGED
    head = recipe.find("head")
    record: dict[str, Any] = {}
    for part in [*(head if head is not None else ()), *recipe]:
        if part.tag in ("head", "ingredients", "directions"):
            continue
        if part.tag == "categories":
            record["categories"] = [_text(cat) for cat in part.iter("cat")]
        else:
            earlier = [record[part.tag]] if record.get(part.tag) else []
            record[part.tag] = "\n".join([*earlier, _text(part)])
    ingredients = map(_ingredients, recipe.findall("ingredients"))
    steps = map(_steps, recipe.findall("directions"))
    return record | {
        "ingredients": list(chain.from_iterable(ingredients)),
        "steps": list(chain.from_iterable(steps)),
    }


def _text(element: ET.Element) -> str:
    """Return the texts in an element with single spaces."""
    return " ".join(" ".join(element.itertext()).split())


def _ingredients(element: ET.Element) -> Iterator[dict[str, Any]]:
    for child in element:
        if child.tag == "ing-div":
            title = child.find("title")
            heading = "" if title is None else _text(title)
            yield {"title": heading, "items": list(_ingredients(child))}
        elif child.tag == "ing":
            yield _ingredient(child)
        elif child.tag != "title":
            yield {child.tag: _text(child)}


def _ingredient(element: ET.Element) -> dict[str, Any]:
    """Return the parts of an ingredient by our keys, and other elements by their tag."""
    parts: dict[str, list[str]] = {"note": [_direct_text(element)]}
    amounts: list[tuple[str, str]] = []
    for child in element:
        key = _KEYS.get(child.tag, child.tag)
        if child.tag == "amt":
            amounts.append(_amount(child))
        else:
            parts.setdefault(key, []).append(_text(child))
    record: dict[str, Any] = {
        key: " ".join(filter(None, texts)) for key, texts in parts.items()
    }
    if not record.get("food"):  # "<ing>2 cups flour</ing>"
        record["food"] = record.pop("note")
    if len(amounts) == 1:
        record["quantity"], record["unit"] = amounts[0]
    elif amounts:  # "1 lb" and "450 g"
        record["quantity"] = " / ".join(" ".join(pair).strip() for pair in amounts)
    return record


def _amount(element: ET.Element) -> tuple[str, str]:
    """Return the quantity and the unit of an amount."""
    limits = [_text(limit) for tag in ("q1", "q2") for limit in element.iter(tag)]
    quantity = "-".join(filter(None, limits))
    if not limits:
        quantity = " ".join(map(_text, element.iter("qty")))
    units = [_text(unit) for tag in ("size", "unit") for unit in element.iter(tag)]
    quantity = " ".join(filter(None, (quantity, _direct_text(element))))
    return quantity, " ".join(filter(None, units))


def _direct_text(element: ET.Element) -> str:
    """Return the text in an element that is in none of its children."""
    texts = [element.text or "", *(child.tail or "" for child in element)]
    return " ".join(" ".join(texts).split())


def _steps(element: ET.Element) -> Iterator[str]:
    """Yield the steps of the directions, with the titles of their parts."""
    if element.text and element.text.strip():
        yield from filter(None, map(str.strip, element.text.splitlines()))
    for child in element:
        if child.tag == "dir-div":
            title = child.find("title")
            if title is not None:
                yield f"{_text(title)}:"
            yield from _steps(child)
        elif child.tag != "title" and (text := _text(child)):
            yield text
        if child.tail and child.tail.strip():
            yield from filter(None, map(str.strip, child.tail.splitlines()))
