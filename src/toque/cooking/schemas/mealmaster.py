"""Meal-Master text exports: recipes in fixed columns, one or two ingredients side by side.

Format: the import specification that came with Meal-Master 8 (IMPORTF.DOC). An ingredient line
holds the amount in columns 1-7, the unit in 9-10, the text from 12 on, up to 28 characters; a
second ingredient may begin at column 42. A text that begins with "-" continues the one above.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
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


def _record(recipe: bytes) -> dict[str, Any] | str:
    try:
        text = recipe.decode()
    except UnicodeDecodeError:
        text = recipe.decode("cp437")  # the program ran under DOS
    parser = _Reading()
    for line in text.splitlines()[1:]:
        if _END.match(line.rstrip()):
            break
        parser.line(line.expandtabs())
    parser.close()
    return {
        "title": parser.field("title") or "",
        "ingredients": parser.ingredients,
        "directions": parser.steps,
        "tags": [t.strip() for t in (parser.field("categories") or "").split(",") if t.strip()],
        "servings": parser.field("yield"),
    }


@dataclass
class _Reading:
    """Parser state of one recipe."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    ingredients: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    _left: list[str] = field(default_factory=list)
    _right: list[str] = field(default_factory=list)
    _paragraph: list[str] = field(default_factory=list)
    _heading: str = ""
    _last_field: str = ""
    _in_steps: bool = False
    _block_has_ingredient: bool = False

    def line(self, line: str) -> None:
        """Parse the next line."""
        if not line.strip():
            self._end_paragraph()
            self._last_field = ""
            self._block_has_ingredient = False
            return
        if not self.ingredients and not self._left and not self._in_steps and self._field(line):
            return
        if section := _section_name(line.strip()):
            self._section(section)
        elif self._in_steps or not self._ingredient(line):
            self._end_ingredients()
            self._in_steps = True
            self._step(line)

    def close(self) -> None:
        """Parse the end."""
        self._end_ingredients()
        self._end_paragraph()

    def field(self, name: str) -> str | None:
        """The text of a field with its continuation lines; None without the field."""
        return " ".join(self.fields[name]) if name in self.fields else None

    def _field(self, line: str) -> bool:
        match = _FIELD.match(line)
        if match:
            name = match[1].lower()
            name = {"category": "categories", "servings": "yield", "serves": "yield"}.get(
                name, name
            )
            self.fields.setdefault(name, [match[2].strip()])
            self._last_field = name
            return True
        if self._last_field in ("title", "categories") and not _CELL.match(line):
            self.fields[self._last_field].append(line.strip())  # a long title continues
            return True
        return False

    def _section(self, name: str) -> None:
        if self._in_steps:
            self._end_paragraph()
            self._paragraph.append(f"{name.capitalize()}:")
            self._end_paragraph()
        else:
            self._end_ingredients()
            self._heading = f"{name.capitalize()}:"

    def _ingredient(self, line: str) -> bool:
        """Add a line's ingredients, if any, to their columns."""
        left, right = _columns(line)
        found = [_cell(left), _cell(right)]
        if found == [None, None] and self._is_plain(line):
            found[0] = line.strip()
        for column, text in zip((self._left, self._right), found, strict=True):
            if text is not None:
                column.append(text)
        self._block_has_ingredient |= found != [None, None]
        return found != [None, None]

    def _is_plain(self, line: str) -> bool:
        """True if a line outside the columns is an ingredient, as hand-made files have them."""
        text = line.strip()
        if text.endswith(".") or len(text) > _PLAIN_CHARS:
            return False
        return text[:1].isdigit() or self._block_has_ingredient

    def _end_ingredients(self) -> None:
        """Read the columns of a section one after the other; "-" continues the line above."""
        lines: list[list[str]] = []
        for text in self._left + self._right:
            if text.startswith("-") and lines:
                lines[-1].append(text.lstrip("- "))
            else:
                lines.append([text.lstrip("- ")])
        if self._heading and lines:
            self.ingredients.append(self._heading)
        self.ingredients += map(" ".join, lines)
        self._left, self._right, self._heading = [], [], ""

    def _step(self, line: str) -> None:
        text = line.strip()
        if text.startswith(":"):  # a line break that was meant
            self._end_paragraph()
            text = text[1:].strip()
        self._paragraph.append(text)

    def _end_paragraph(self) -> None:
        if self._paragraph:
            self.steps.append(" ".join(self._paragraph))
            self._paragraph = []


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


def _columns(line: str) -> tuple[str, str]:
    """A line's one or two ingredients; versions differ in where the second one begins."""
    for at in _SECOND_COLUMNS:
        if len(line) > at and not line[at - 1].strip():
            cell = _CELL.match(line, at)
            if cell and (cell[1].strip() or cell[2].strip() or at == _SECOND_COLUMNS[0]):
                return line[:at], line[at:]
    return line, ""


def _cell(text: str) -> str | None:
    """One ingredient with its unit in words; None if there is none."""
    match = _CELL.match(text.ljust(12)) or _LOOSE.match(text)
    if match is None:
        return None
    amount, unit, name = " ".join(match[1].split()), match[2].strip(), match[3].strip()
    word = _UNIT_WORDS.get(unit, _UNIT_WORDS.get(unit.lower()))
    if word is None:
        if unit:
            return None
        word = ""
    if (
        word
        and word not in _NO_PLURAL
        and amount not in ("1", "")
        and "/" not in amount.split(" ")[0]
    ):
        word += "es" if word.endswith(("h", "x")) else "s"
    return " ".join(part for part in (amount, word, name) if part)
