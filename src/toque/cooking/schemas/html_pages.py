"""HTML pages: recipes marked up with schema.org, in JSON-LD or else microdata; a page is one block.

Only structured data is read; nothing is guessed from the layout of a page. Pages are untrusted:
every pattern has bounded cost, nothing is fetched, no code is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from toque.cooking.schemas.cleaning import decoded_entities
from toque.cooking.schemas.microdata import microdata_recipe
from toque.cooking.schemas.schema_org import is_full, recipe_nodes
from toque.sources.decompress import MAX_RECORD_BYTES, UTF_8, chunks
from toque.sources.records import TOO_LONG, Block, Contents, Numbered, pack, survivors, unreadable

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
    """Whether a file begins as HTML does."""
    return _LOOKS_LIKE_PAGE.match(start) is not None


def page_blocks(path: Path, *, encoding: str = UTF_8) -> Iterator[Block]:
    """The page whole, in one block."""
    text = b""
    for chunk in chunks(path, encoding=encoding):
        text += chunk
        if len(text) > MAX_RECORD_BYTES:
            yield unreadable(path, 1, TOO_LONG)
            return
    yield pack(path, 1, "page", text)


def page_records(contents: Contents) -> Numbered:
    """The page's recipes as schema.org nodes; a page without any is one dropped record."""
    for found in survivors(_nodes(contents)):
        yield (contents.first, found) if isinstance(found, str) else found


def _nodes(contents: Contents) -> Numbered:
    text = page_text(contents.body)
    values: list[Any] = []
    line, counted = contents.first, 0
    for start, script in islice(_scripts(text), _MAX_SCRIPTS):
        values.append(_json_of(script))
        line += text.count("\n", counted, start)
        counted = start
    nodes = recipe_nodes(values)
    if not any(is_full(node) for node in nodes):
        in_markup = microdata_recipe(text)
        nodes = [in_markup] if in_markup else nodes
    for node in nodes:
        yield line, node
    if not nodes:
        yield contents.first, NO_RECIPE


def _scripts(text: str) -> Iterator[tuple[int, str]]:
    """The offset and text of each JSON-LD script; one that never ends is ignored."""
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
    """The page decoded as UTF-8, else as it declares, else as Windows-1252."""
    declared = _CHARSET.search(page, 0, 4096)
    for name in ("utf-8", declared[1].decode("ascii") if declared else "cp1252"):
        try:
            return page.decode(name)
        except (UnicodeDecodeError, LookupError):
            continue
    return page.decode("utf-8", "replace")


def _json_of(script: str) -> Any:
    """The value of a JSON-LD script, after repair of common mistakes; None if it has none."""
    bare = _WRAPPING.sub("", _WRAPPING.sub("", script.strip())).strip().rstrip(";")
    repaired = _BAD_ESCAPE.sub("", _TRAILING_COMMA.sub(r"\1", bare))
    for text in (bare, repaired, decoded_entities(repaired)):
        try:
            return json.loads(text, strict=False)  # pages write line breaks into strings
        except (ValueError, RecursionError):
            continue
    return None
