"""Meal-Master text exports: recipes in fixed columns, one or two ingredients side by side.

Format: the import specification that came with Meal-Master 8 (IMPORTF.DOC). An ingredient line
holds the amount in columns 1-7, the unit in 9-10, the text from 12 on, up to 28 characters; a
second ingredient may begin at column 42. A text that begins with "-" continues the one above.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from toque.sources.decompress import MAX_RECORD_BYTES, UTF_8, chunks, count_lines, runs_of_lines
from toque.sources.records import TOO_LONG, Block, Contents, Numbered, attempted, pack, unreadable

_HEADER = re.compile(
    rb"^(?:MMMMM|-----)[^\r\n]*(?:meal-?master|recipe (?:extracted )?(?:via|from))",
    re.IGNORECASE | re.MULTILINE,
)
_END = re.compile(r"(?:M{5}|-{5})[-\s]*\Z")
_SECTION = re.compile(r"(?:M{5}|-{5})-*+")
_FIELD = re.compile(
    r"\s{0,8}(Title|Categories|Category|Servings|Serves|Yield)\s*:\s*(.*)\Z", re.IGNORECASE
)
_FIELDS = {
    "title": "title", "categories": "tags", "category": "tags", "servings": "servings",
    "serves": "servings", "yield": "servings",
}  # fmt: skip
_AMOUNT = r"[\d ./\-½¼¾⅓⅔⅛]"
_UNIT_WORDS = {
    "x": "", "ea": "", "sm": "small", "md": "medium", "lg": "large", "cn": "can",
    "pk": "package", "pn": "pinch", "dr": "drop", "ds": "dash", "ct": "carton", "bn": "bunch",
    "sl": "slice", "t": "teaspoon", "ts": "teaspoon", "T": "tablespoon", "tb": "tablespoon",
    "fl": "fluid ounce", "c": "cup", "pt": "pint", "qt": "quart", "ga": "gallon", "oz": "ounce",
    "lb": "pound", "ml": "ml", "cb": "ml", "cl": "cl", "dl": "dl", "l": "l", "mg": "mg",
    "cg": "cg", "dg": "dg", "g": "g", "kg": "kg",
}  # fmt: skip
_NO_PLURAL = frozenset("small medium large ml cl dl l mg cg dg g kg".split())  # noqa: SIM905
_CELL = re.compile(rf"({_AMOUNT}{{7}}) ([A-Za-z ]{{2}}) (\S.*)")
_LOOSE = re.compile(rf"\s{{0,10}}(\d{_AMOUNT}{{0,40}}?)\s++({'|'.join(_UNIT_WORDS)})\s++(\S.*)")
_SECOND_COLUMNS = (41, 40, 39, 42)
_PLAIN_CHARS = 50


def is_mealmaster(start: bytes) -> bool:
    """True if the start of a file contains the header line of an export."""
    return _HEADER.search(start) is not None


def mealmaster_blocks(path: Path, *, encoding: str = UTF_8) -> Iterator[Block]:
    """Blocks of about a mebibyte of whole recipes; text before the first header is ignored."""
    pending, line = b"", 1
    for run in runs_of_lines(chunks(path, encoding=encoding)):
        buffer = pending + run
        starts = [match.start() for match in _HEADER.finditer(buffer)]
        cut = starts[-1] if starts else 0
        if cut and (body := buffer[:cut]):
            yield from _recipes_block(path, line, body)
            line += count_lines(body)
        pending = buffer[cut:]
        if len(pending) > MAX_RECORD_BYTES:
            yield unreadable(path, line, TOO_LONG)
            line += count_lines(pending)
            pending = b""
    yield from _recipes_block(path, line, pending)


def _recipes_block(path: Path, line: int, body: bytes) -> Iterator[Block]:
    first = _HEADER.search(body)
    if first:
        line += count_lines(body[: first.start()])
        yield pack(path, line, "mealmaster", body[first.start() :])


def mealmaster_records(contents: Contents) -> Numbered:
    """The recipes of a block as records."""
    text = contents.body
    starts = [match.start() for match in _HEADER.finditer(text)]
    line, before = contents.first, 0
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        line += count_lines(text[before:start])
        before = start
        yield line, attempted(_record, text[start:end])


def _record(recipe: bytes) -> dict[str, Any]:
    try:
        text = recipe.decode()
    except UnicodeDecodeError:
        text = recipe.decode("cp437")  # the program ran under DOS
    lines = takewhile(lambda line: not _END.match(line.rstrip()), text.splitlines()[1:])
    fields = dict.fromkeys(_FIELDS.values(), "")
    ingredients: list[str] = []
    left: list[str] = []
    right: list[str] = []
    heading = last_field = ""
    in_list = False
    steps: list[str] = []
    for line in lines:
        line = line.expandtabs()  # noqa: PLW2901
        bare = line.strip()
        is_head = not (ingredients or left or steps)
        match = _FIELD.match(line) if is_head else None
        if steps:
            steps.append(bare)
        elif not bare:
            last_field, in_list = "", False
        elif match:
            last_field = _FIELDS[match[1].lower()]
            fields[last_field] = fields[last_field] or match[2].strip()
        elif is_head and last_field in ("title", "tags") and not _CELL.match(line):
            fields[last_field] += f" {bare}"  # a long title continues
        elif section := _section_name(bare):
            ingredients += _listed(heading, left + right)
            left, right, heading = [], [], section
        elif (found := _cells(line, in_list=in_list)) != (None, None):
            left += filter(None, found[:1])
            right += filter(None, found[1:])
            in_list = True
        else:
            steps.append(bare)
    return {
        **fields,
        "ingredients": ingredients + _listed(heading, left + right),
        "directions": _paragraphs(steps),
        "tags": [tag for text in fields["tags"].split(",") if (tag := text.strip())],
    }


def _listed(heading: str, texts: list[str]) -> list[str]:
    """The ingredients of a section, its columns one after the other; "-" continues a line."""
    lines: list[str] = []
    for text in texts:
        bare = text.lstrip("- ")
        if text.startswith("-") and lines:
            lines[-1] += f" {bare}"
        else:
            lines.append(bare)
    return [f"{heading.capitalize()}:", *lines] if heading and lines else lines


def _paragraphs(lines: list[str]) -> list[str]:
    found: list[list[str]] = [[]]
    for line in lines:
        if section := _section_name(line):
            found += [f"{section.capitalize()}:"], []
        elif not line or line.startswith(":"):  # a line break that was meant
            found.append([line[1:].strip()] if line else [])
        else:
            found[-1].append(line)
    return [" ".join(paragraph) for paragraph in found if paragraph]


def _cells(line: str, *, in_list: bool) -> tuple[str | None, str | None]:
    """The one or two ingredients of a line; versions differ in where the second one begins."""
    found: tuple[str | None, str | None] = (_cell(line), None)
    for at in _SECOND_COLUMNS:
        if len(line) > at and not line[at - 1].strip():
            cell = _CELL.match(line, at)
            if cell and (cell[1].strip() or cell[2].strip() or at == _SECOND_COLUMNS[0]):
                found = _cell(line[:at]), _cell(line[at:])
                break
    if found == (None, None):
        bare = line.strip()  # outside the columns, as hand-made files have them
        plain = len(bare) <= _PLAIN_CHARS and not bare.endswith(".")
        if plain and (in_list or bare[:1].isdigit()):
            return bare, None
    return found


def _section_name(line: str) -> str:
    """The name in a line such as "-----FILLING-----"; "" when the line is none.

    >>> _section_name("MMMMM--------- For the sauce --------"), _section_name("-----")
    ('For the sauce', '')
    """
    start = _SECTION.match(line)
    name = line[start.end() :] if start else ""
    bare = name.lstrip()
    if not name or (bare[:1] == "-" and bare == name):
        return ""
    if bare[:1] in ("", "-"):  # "----- - x": a name may begin with a blank, never with a dash
        bare = name[len(name) - len(bare) - 1 :]
    return bare.rstrip().rstrip("-").rstrip() or bare[0]


def _cell(text: str) -> str | None:
    """One ingredient with its unit in words; None if there is none."""
    match = _CELL.match(text.ljust(12)) or _LOOSE.match(text)
    if match is None:
        return None
    amount, unit, name = " ".join(match[1].split()), match[2].strip(), match[3].strip()
    word = _UNIT_WORDS.get(unit, _UNIT_WORDS.get(unit.lower(), "" if not unit else None))
    if word is None:
        return None
    one = amount in ("1", "") or "/" in amount.partition(" ")[0]
    if word and word not in _NO_PLURAL and not one:
        word += "es" if word.endswith(("h", "x")) else "s"
    return " ".join(part for part in (amount, word, name) if part)
