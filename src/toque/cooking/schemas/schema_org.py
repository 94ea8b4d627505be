"""schema.org recipes: JSON-LD nodes from websites, and web pages that contain them.

See https://schema.org/Recipe. A page is one block with its recipes in JSON-LD. The page's layout is
not used, and no content is downloaded or executed. Tags are matched by patterns of bounded length,
because `html.parser` takes quadratic time on damaged pages.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from toque.cooking.schemas.item_objects import ItemReader
from toque.cooking.schemas.list_fields import text_of, words_in
from toque.cooking.schemas.markup import decoded_entities
from toque.sources.decompress import MAX_RECORD_BYTES, UTF_8, chunks
from toque.sources.records import (
    TOO_LONG,
    Block,
    Contents,
    Numbered,
    pack,
    records_until_error,
    unreadable_block,
)

MAX_DEPTH = 12
_INGREDIENTS = ("recipeIngredient", "ingredients")
_STEPS = ("recipeInstructions", "instructions", "steps")


def recipe_nodes(value: Any) -> list[dict[str, Any]]:
    """Return the distinct Recipe nodes of a JSON-LD value, or one empty node if all are empty."""
    full: dict[str, dict[str, Any]] = {}
    empty: list[dict[str, Any]] = []
    for node in _recipes(value, 0):
        ingredients = node.get("recipeIngredient") or node.get("ingredients")
        if ingredients or has_steps(node):
            full.setdefault(f"{node.get('name')}\n{ingredients}", node)
        elif "recipeIngredient" in node or "recipeInstructions" in node:
            empty.append(node)
    return list(full.values()) or empty[:1]


def has_steps(node: Mapping[str, Any]) -> bool:
    """Return whether a Recipe has instructions."""
    return any(map(node.get, _STEPS))


def is_schema_org(fields: Mapping[str, Any]) -> bool:
    """Return whether an object is JSON-LD, or a recipe with schema.org's names and no type."""
    return not fields.keys().isdisjoint(("@type", "@graph", "recipeInstructions"))


def _recipes(value: Any, depth: int) -> Iterator[dict[str, Any]]:
    """Read the Recipe nodes at any depth up to `MAX_DEPTH`."""
    if depth > MAX_DEPTH:
        return
    if isinstance(value, list):
        for item in value:
            yield from _recipes(item, depth + 1)
    elif isinstance(value, dict):
        if _is_recipe(value):
            yield value
            return
        for item in value.values():
            if isinstance(item, dict | list):
                yield from _recipes(item, depth + 1)


def _is_recipe(node: Mapping[str, Any]) -> bool:
    """Return whether a node has the type Recipe, or no type and the fields of a recipe."""
    kinds = node.get("@type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds == [None]:
        return "recipeIngredient" in node and has_steps(node)
    names = (kind.rpartition("/")[2] for kind in kinds if isinstance(kind, str))
    return "Recipe" in names


def record_of_node(node: Mapping[str, Any], notes: Counter[str]) -> dict[str, Any]:
    """Convert a Recipe node to our field names."""
    list_field = next((name for name in _INGREDIENTS if node.get(name)), "")
    step_field = next((name for name in _STEPS if node.get(name)), "")
    steps = node.get(step_field)
    ingredients = ItemReader(list_field, notes).ingredients(node.get(list_field))
    if not ingredients:
        reader = ItemReader(f"{step_field}.ingredients", notes)
        ingredients = reader.ingredients_in_steps(steps)

    kinds = [node.get(name) for name in ("keywords", "recipeCategory", "recipeCuisine")]
    title = text_of(node.get("name")) or text_of(node.get("headline"))
    record = {
        "title": _without_publisher(title, node.get("publisher")),
        "ingredients": ingredients,
        "directions": ItemReader(step_field, notes).steps(steps),
        "tags": words_in(kinds),
        "servings": _first_of(node.get("recipeYield")),
        "minutes": _first_of(node.get("totalTime")),
        "prep_time": _first_of(node.get("prepTime")),
        "cook_time": _first_of(node.get("cookTime")),
        "source": text_of(node.get("url")),
        "nutrition": node.get("nutrition"),
    }
    return {name: value for name, value in record.items() if value}


def _first_of(value: Any) -> Any:
    """Return the first item of a list that is not empty, or the value itself."""
    return value[0] if isinstance(value, list) and value else value


def _without_publisher(title: str, publisher: Any) -> str:
    """Remove the website's name from the end of a title.

    >>> _without_publisher("Plum Jam - Podco", {"name": "Podco"})
    'Plum Jam'
    """
    name = text_of(publisher.get("name")) if isinstance(publisher, dict) else ""
    for separator in (" - ", " – ", " | "):
        if name and title.endswith(separator + name):
            return title.removesuffix(separator + name)
    return title


NO_RECIPE = "no recipe in page"

_LOOKS_LIKE_PAGE = re.compile(
    rb"\s*+(?:<\?xml[^>]*+>\s*+)?(?:<!--(?:(?!-->).)*+-->\s*+)*+"
    rb"<(?:!doctype\s+html|html|head|body|script|meta|div|article|main|section)\b",
    re.IGNORECASE | re.DOTALL,
)
_JSON_LD = re.compile(r"application/ld\+json", re.IGNORECASE)
_TAG_BEFORE = re.compile(r"<script\b[^<>]*\btype\s*=\s*[\"']?\Z", re.IGNORECASE)
_TAG_CHARS = 400
_MAX_SCRIPTS = 200
_SCRIPT_END = re.compile(r"</script", re.IGNORECASE)
_CHARSET = re.compile(rb"<meta\b[^<>]*\bcharset\s*=\s*[\"']?([\w-]+)", re.IGNORECASE)
_WRAPPING = re.compile(
    r"^\s*(?:<!--|//\s*<!\[CDATA\[|<!\[CDATA\[|/\*.*?\*/)|(?:-->|//\s*\]\]>|\]\]>)\s*$"
)
_TRAILING_COMMA = re.compile(r",(\s*[}\]])")
_BAD_ESCAPE = re.compile(r"\\(?![\"\\/bfnrtu])")


def is_page(start: bytes) -> bool:
    """Return whether a file begins like HTML."""
    return _LOOKS_LIKE_PAGE.match(start) is not None


def page_blocks(path: Path, *, encoding: str = UTF_8) -> Iterator[Block]:
    """Read the entire page as one block."""
    text = b""
    for chunk in chunks(path, encoding=encoding):
        text += chunk
        if len(text) > MAX_RECORD_BYTES:
            yield unreadable_block(path, 1, TOO_LONG)
            return
    yield pack(path, 1, "page", text)


def page_records(contents: Contents) -> Numbered:
    """Read the page's recipes as schema.org nodes. A page without recipes is one dropped record."""
    for record in records_until_error(_nodes(contents)):
        yield (contents.first, record) if isinstance(record, str) else record


def _nodes(contents: Contents) -> Numbered:
    """Read the Recipe nodes of a page, with the line of its last script."""
    text = page_text(contents.body)
    values: list[Any] = []
    line = contents.first
    counted = 0  # end of the text in which lines were counted
    for start, script in islice(_scripts(text), _MAX_SCRIPTS):
        values.append(_json_of(script))
        line += text.count("\n", counted, start)
        counted = start
    nodes = recipe_nodes(values)
    for node in nodes:
        yield line, node
    if not nodes:
        yield contents.first, NO_RECIPE


def _scripts(text: str) -> Iterator[tuple[int, str]]:
    """Read the offset and text of each JSON-LD script. A script without an end is ignored."""
    after = 0
    for match in _JSON_LD.finditer(text):
        at = match.start()
        if at < after or not _TAG_BEFORE.search(text[max(after, at - _TAG_CHARS) : at]):
            continue
        begin = text.find(">", at, at + _TAG_CHARS) + 1
        end = _SCRIPT_END.search(text, begin) if begin else None
        if end is None:
            return
        yield begin, text[begin : end.start()]
        after = end.end()


def page_text(page: bytes) -> str:
    """Decode a page as UTF-8, its declared encoding, or Windows-1252."""
    declared = _CHARSET.search(page, 0, 4096)
    for name in ("utf-8", declared[1].decode("ascii") if declared else "cp1252"):
        try:
            return page.decode(name)
        except (UnicodeDecodeError, LookupError):
            continue
    return page.decode("utf-8", "replace")


def _json_of(script: str) -> Any:
    """Parse a JSON-LD script after repairing common mistakes. Return None if that fails."""
    bare = _WRAPPING.sub("", _WRAPPING.sub("", script.strip())).strip().rstrip(";")
    repaired = _BAD_ESCAPE.sub("", _TRAILING_COMMA.sub(r"\1", bare))
    for text in (bare, repaired, decoded_entities(repaired)):
        try:
            # Pages write line breaks into strings.
            return json.loads(text, strict=False)
        except (ValueError, RecursionError):
            continue
    return None
