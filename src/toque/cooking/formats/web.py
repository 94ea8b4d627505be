"""Recipes in web pages: schema.org in JSON-LD, else in microdata; a page is one block.

Only what the page says to machines is read; there is no guessing from the look of a page.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from toque.cooking.formats.opening import chunks
from toque.cooking.formats.payload import (
    MAX_RECORD_BYTES,
    TOO_LONG,
    Header,
    Numbered,
    pack,
    unreadable,
)
from toque.cooking.formats.schema_org import is_full, recipe_nodes
from toque.data.example import Block

NO_RECIPE = "no recipe in page"

_LOOKS_LIKE_PAGE = re.compile(
    rb"\s*+(?:<\?xml[^>]*+>\s*+)?(?:<!--(?:(?!-->).)*+-->\s*+)*+"
    rb"<(?:!doctype\s+html|html|head|body|script|meta|div|article|main|section)\b",
    re.IGNORECASE | re.DOTALL,
)
_JSON_LD = re.compile(
    r"<script\b[^>]{0,400}?\btype\s*=\s*[\"']?application/ld\+json\b[^>]{0,400}>", re.IGNORECASE
)
_SCRIPT_END = re.compile(r"</script", re.IGNORECASE)
_CHARSET = re.compile(rb"<meta\b[^>]*\bcharset\s*=\s*[\"']?([\w-]+)", re.IGNORECASE)
_WRAPPING = re.compile(
    r"^\s*(?:<!--|//\s*<!\[CDATA\[|<!\[CDATA\[|/\*.*?\*/)|(?:-->|//\s*\]\]>|\]\]>)\s*$"
)
_TRAILING_COMMA = re.compile(r",(\s*[}\]])")
_BAD_ESCAPE = re.compile(r"\\(?![\"\\/bfnrtu])")
_VOID = frozenset(
    "area base br col embed hr img input link meta param source track wbr".split()  # noqa: SIM905
)
_BREAKS = frozenset(("br", "p", "li", "div", "tr", "h2", "h3", "h4"))
_MAX_MICRODATA_CHARS = 2 << 20
"""html.parser can take quadratic time on damaged markup; pages with a recipe are shorter."""
_INGREDIENTS = ("recipeIngredient", "ingredients")
_LISTED = ("recipeIngredient", "ingredients", "recipeInstructions", "keywords")


def is_page(start: bytes) -> bool:
    """Whether a file begins as HTML does."""
    return _LOOKS_LIKE_PAGE.match(start) is not None


def page_blocks(path: Path) -> Iterator[Block]:
    """The page whole, in one block."""
    text = b""
    for chunk in chunks(path):
        text += chunk
        if len(text) > MAX_RECORD_BYTES:
            yield unreadable(path, 1, TOO_LONG)
            return
    yield pack(path, 1, "page", text)


def page_records(header: Header, body: memoryview, first_line: int) -> Numbered:
    """The page's recipes as schema.org nodes; a page without any is one record without one."""
    del header
    text = page_text(bytes(body))
    values: list[Any] = []
    line = first_line
    for start, script in _scripts(text):
        values.append(_json_of(script))
        line = first_line + text.count("\n", 0, start)
    nodes = recipe_nodes(values)
    if not any(is_full(node) for node in nodes):
        in_markup = _microdata(text)
        nodes = [in_markup] if in_markup else nodes
    for node in nodes:
        yield line, node
    if not nodes:
        yield first_line, NO_RECIPE


def _scripts(text: str) -> Iterator[tuple[int, str]]:
    """Where each JSON-LD script of a page begins, and its text; one that never ends is left."""
    at = 0
    while match := _JSON_LD.search(text, at):
        end = _SCRIPT_END.search(text, match.end())
        if end is None:
            return
        yield match.start(), text[match.end() : end.start()]
        at = end.end()


def page_text(page: bytes) -> str:
    """The page in the encoding it is in: UTF-8, else what it declares, else Windows-1252."""
    declared = _CHARSET.search(page, 0, 4096)
    for name in ("utf-8", declared[1].decode("ascii") if declared else "cp1252"):
        try:
            return page.decode(name)
        except (UnicodeDecodeError, LookupError):
            continue
    return page.decode("utf-8", "replace")


def _json_of(script: str) -> Any:
    """The value of a JSON-LD script, with the slips that pages make; None when there is none."""
    bare = _WRAPPING.sub("", _WRAPPING.sub("", script.strip())).strip().rstrip(";")
    repaired = _BAD_ESCAPE.sub("", _TRAILING_COMMA.sub(r"\1", bare))
    for text in (bare, repaired, html.unescape(repaired)):
        try:
            return json.loads(text, strict=False)  # pages write line breaks into strings
        except (ValueError, RecursionError):
            continue
    return None


@dataclass
class _Item:
    """An element that carries `itemprop`, or a list item (whose name is empty), while open."""

    name: str
    depth: int
    text: list[str] = field(default_factory=list)
    n_ingredients: int = 0


class _Microdata(HTMLParser):
    """Collects the properties of the first schema.org/Recipe in a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: dict[str, list[str]] = {}
        self._depth = 0
        self._scopes: list[tuple[int, bool]] = []
        self._items: list[_Item] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        void = tag in _VOID
        if not void:
            self._depth += 1
        if tag in _BREAKS:
            self._add("\n")
        names = (given.get("itemprop") or "").split()
        if self._inside() and names and "itemscope" not in given:
            content = given.get("content") or (given.get("datetime") if tag == "time" else None)
            for name in names:
                if content:
                    self.found.setdefault(name, []).append(content)
                elif not void:
                    self._items.append(_Item(name, self._depth))
        if tag == "li" and self._inside() and not names:
            self._items.append(_Item("", self._depth))
        if "itemscope" in given and not void:
            kind = given.get("itemtype") or ""
            self._scopes.append((self._depth, kind.rstrip("/").endswith("schema.org/Recipe")))

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID:
            return
        if tag in _BREAKS:
            self._add("\n")
        while self._items and self._items[-1].depth >= self._depth:
            self._close(self._items.pop())
        while self._scopes and self._scopes[-1][0] >= self._depth:
            self._scopes.pop()
        self._depth -= 1

    def _close(self, item: _Item) -> None:
        text = "".join(item.text).strip()
        if item.name:
            self.found.setdefault(item.name, []).append(text)
        if item.name in _INGREDIENTS:
            for outer in self._items:
                outer.n_ingredients += 1
        elif not item.name and item.n_ingredients == 1:
            # The amount often stands before the marked name: "<li>6 cl <a itemprop=...>Malibu".
            name = next(name for name in _INGREDIENTS if name in self.found)
            self.found[name][-1] = " ".join(text.split())

    def handle_data(self, data: str) -> None:
        self._add(" ".join(data.split("\n")))

    def _add(self, text: str) -> None:
        for item in self._items:
            item.text.append(text)

    def _inside(self) -> bool:
        return bool(self._scopes) and self._scopes[-1][1]


def _microdata(page: str) -> dict[str, Any] | None:
    if "schema.org/Recipe" not in page or len(page) > _MAX_MICRODATA_CHARS:
        return None
    parser = _Microdata()
    parser.feed(page)
    parser.close()
    node: dict[str, Any] = {
        name: values if name in _LISTED else values[0] for name, values in parser.found.items()
    }
    if not (node.get("recipeIngredient") or node.get("ingredients")):
        return None
    return {"@type": "Recipe", **node}
