"""Recipes of recipe managers in formats of their own: Cooklang, Meal-Master and RecipeML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toque.cooking.schemas.cooklang import is_cooklang, record_of_cooklang
from toque.cooking.schemas.mealmaster import (
    is_mealmaster,
    record_of_mealmaster,
    starts_of_recipes,
)
from toque.cooking.schemas.recipeml import is_recipeml, recipes_in, record_of_recipeml
from toque.sources.decompress import MAX_RECORD_BYTES, UTF_8, chunks, count_lines
from toque.sources.records import (
    TOO_LONG,
    Block,
    Contents,
    Numbered,
    Raw,
    pack,
    unreadable_block,
)

COOKLANG: Final = "cooklang"
"""Format with weak signs. A table may have such a text in its cells."""
_SUFFIXES: Final = (".cook", ".txt", ".md", ".gz", ".zst", ".xz", ".bz2")
_DOS_LETTERS: Final = re.compile(
    rb"[A-Za-z](?:[\x81-\x84\x87-\x8d]|[\x91\x93-\x95\xa1-\xa4](?=[A-Za-z]))|\d[\xab\xac\xf8]"
)
"""Letters such as "e" with an accent, fractions and degrees in CP437. In Windows-1252 these bytes
are quotation marks and signs, which do not follow a letter or a digit."""
_WINDOWS_LETTERS: Final = re.compile(rb"[A-Za-z][\xc0-\xff]|\d[\xb0\xbc-\xbe]")
_GROUP_BYTES: Final = 1 << 20
"""Bytes of a block, which has one or several recipes."""


def export_format(start: bytes) -> str:
    """Return the name of the format of a file that begins with `start`, or ""."""
    return next((name for name, form in _FORMATS.items() if form.recognise(start)), "")


def export_blocks(path: Path, name: str, *, encoding: str = UTF_8) -> Iterator[Block]:
    """Read the recipes of a file in the format `name`."""
    divide = _FORMATS[name].divide
    rest = b""
    line = 1
    for chunk in chunks(path, _GROUP_BYTES, encoding=encoding):
        rest += chunk
        # The last recipe may continue in the next chunk.
        ends = [end for _, end in divide(rest)][:-1]
        if ends:
            yield _pack(path, line, name, rest[: ends[-1]])
            line += count_lines(rest[: ends[-1]])
            rest = rest[ends[-1] :]
        elif len(rest) > MAX_RECORD_BYTES:
            yield unreadable_block(path, line, TOO_LONG)
            return
    if any(divide(rest)):
        yield _pack(path, line, name, rest)


def _pack(path: Path, line: int, name: str, text: bytes) -> Block:
    return pack(path, line, "export", text, format=name, stem=_title_of(path.name))


def _title_of(name: str) -> str:
    """Return the name of a file without its suffixes, but with dots such as in "St. Louis"."""
    while name.lower().endswith(_SUFFIXES):
        name = name.rpartition(".")[0]
    return name


def export_records(contents: Contents) -> Numbered:
    """Read the recipes of a block, each with its line."""
    form = _FORMATS[contents.meta["format"]]
    counted = 0
    line = contents.first
    for start, end in form.divide(contents.body):
        line += count_lines(contents.body[counted:start])
        counted = start
        text = _decode(contents.body[start:end])
        yield line, form.read(text, str(contents.meta["stem"]))


def _decode(text: bytes) -> str:
    """Decode UTF-8 or, as in old exports, the encoding of Windows or of DOS (CP437)."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        n_dos = len(_DOS_LETTERS.findall(text))
        n_windows = len(_WINDOWS_LETTERS.findall(text))
        return text.decode("cp437" if n_dos > n_windows else "cp1252", "replace")


@dataclass(frozen=True)
class _Format:
    """Format of files with one or several recipes."""

    recognise: Callable[[bytes], bool]
    """Checks the first bytes of a file."""
    divide: Callable[[bytes], Iterator[tuple[int, int]]]
    """Yields the start and end of each recipe."""
    read: Callable[[str, str], Raw]
    """Converts a recipe, and the name of its file, into a record."""


def _whole(text: bytes) -> Iterator[tuple[int, int]]:
    if text.strip():
        yield 0, len(text)


def _divide_mealmaster(text: bytes) -> Iterator[tuple[int, int]]:
    # The text before the first recipe belongs to it, and is reported.
    starts = starts_of_recipes(text)[1:]
    if text.strip():
        yield from zip([0, *starts], [*starts, len(text)], strict=True)


def _read_mealmaster(text: str, _: str) -> dict[str, Any]:
    return record_of_mealmaster(text)


def _read_recipeml(text: str, _: str) -> Raw:
    return record_of_recipeml(text)


_FORMATS: Final = {
    "mealmaster": _Format(is_mealmaster, _divide_mealmaster, _read_mealmaster),
    "recipeml": _Format(is_recipeml, recipes_in, _read_recipeml),
    COOKLANG: _Format(is_cooklang, _whole, record_of_cooklang),
}
