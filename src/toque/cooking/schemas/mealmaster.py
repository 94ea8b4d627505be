"""Meal-Master: recipes as lines with columns, from the program of the same name.

The format has no official description. See https://wedesoft.de/software/2020/07/07/mealmaster/ and
the exports themselves. A recipe begins with a line such as "MMMMM----- Recipe via Meal-Master".
An ingredient has its amount in the columns 1 to 7, its unit in 9 and 10, and its text from 12. A
second ingredient may follow from about column 41. A text that begins with "-" continues the
ingredient above it.
"""

from __future__ import annotations

import re
from typing import Any, Final

_BEGIN: Final = re.compile(
    rb"(?im)^(?:MMMMM|-----)[^\n]{0,80}(?:meal-?master|MM[ a-z]{0,20}recipe)[^\n]{0,80}$"
)
_TITLE: Final = re.compile(rb"(?im)^\s{0,12}title:\s*\S")
_ENTRY: Final = re.compile(r"\s{0,12}([A-Za-z ]{3,20}):\s*(.*)")
_AMOUNT: Final = re.compile(r"[ \d./,-]{7} ")
_UNITS: Final = {
    "x": "", "ea": "", "sm": "small", "md": "medium", "lg": "large", "cn": "can", "pk": "package",
    "pn": "pinch", "dr": "drop", "ds": "dash", "ct": "carton", "bn": "bunch", "sl": "slice",
    "t": "tsp", "ts": "tsp", "tb": "tbsp", "c": "cup", "fl": "fl oz", "pt": "pint", "qt": "quart",
    "ga": "gallon", "oz": "oz", "lb": "lb", "ml": "ml", "cl": "cl", "dl": "dl", "l": "l",
    "mg": "mg", "g": "g", "kg": "kg", "cb": "cubic cm", "cg": "cg", "dg": "dg",
}  # fmt: skip
"""Codes of units in lower-case letters. A capital T is a tablespoon."""
_MAX_PREFACE: Final = 4000
"""Maximum number of bytes before the first recipe of a file."""
_TEXT_AT: Final = 11
_SECOND_AT: Final = range(38, 43)
"""Possible columns, from 0, of the beginning of a second ingredient."""
_NAMES: Final = ("title", "categories", "yield", "servings")


def is_mealmaster(start: bytes) -> bool:
    """Check whether a text begins a Meal-Master recipe."""
    begin = _BEGIN.search(start, 0, _MAX_PREFACE)
    return begin is not None and _TITLE.search(start, begin.end()) is not None


def starts_of_recipes(text: bytes) -> list[int]:
    """Return the position of the beginning of each recipe."""
    return [match.start() for match in _BEGIN.finditer(text)]


def record_of_mealmaster(text: str) -> dict[str, Any]:
    """Convert the lines of a recipe, from its first line, into a record."""
    record: dict[str, Any] = {}
    body = _Body()
    lines = text.expandtabs().splitlines()
    begin = next((n for n, line in enumerate(lines) if _BEGIN.match(line.encode())), 0)
    body.rest = [line.strip() for line in lines[:begin] if line.strip()]
    for line in lines[begin + 1 :]:
        entry = None if body.has_begun else _ENTRY.fullmatch(line)
        if entry and (key := entry[1].strip().lower()) in _NAMES:
            record[key] = entry[2].strip()
        else:
            body.add(line)
    body.end()
    return record | {
        "ingredients": body.ingredients,
        "steps": body.steps,
        "outside the recipe": body.rest,
    }


class _Body:
    """Ingredients and steps of a recipe, line by line."""

    def __init__(self) -> None:
        self.ingredients: list[str | dict[str, Any]] = []
        self.steps: list[str] = []
        self.rest: list[str] = []
        """Lines before the ingredients, and after the mark that ends the recipe."""
        self._group = ""
        self._has_ended = False
        self._columns: tuple[list[str], list[str]] = ([], [])
        self._paragraph: list[str] = []

    @property
    def has_begun(self) -> bool:
        """True after the first line of an ingredient or a step."""
        return bool(
            self.ingredients or self._columns[0] or self.steps or self._paragraph
        )

    def add(self, line: str) -> None:
        """Add a line: an ingredient, a heading, or a part of a step."""
        if self._has_ended:
            self.rest += [line.strip()] if line.strip() else []
        elif line.startswith(("MMMMM", "-----")):
            self._add_heading(line)
        elif not line.strip():
            self._end_paragraph()
        elif not self._add_ingredients(line):
            self._paragraph.append(line.strip())

    def end(self) -> None:
        """Add what is left of the last section."""
        self._end_columns()
        self._end_paragraph()

    def _add_heading(self, line: str) -> None:
        is_in_steps = bool(self.steps or self._paragraph)
        self.end()
        heading = line.removeprefix("MMMMM").strip("- \t")
        if not heading:
            self._has_ended = is_in_steps
        elif is_in_steps:
            self.steps.append(f"{heading.capitalize()}:")
        else:
            self._group = heading

    def _add_ingredients(self, line: str) -> bool:
        """Add an ingredient, or two, of a line. Return False for another line."""
        is_in_steps = bool(self.steps or self._paragraph)
        if is_in_steps and not line[:8].strip():
            return False  # an ingredient without an amount looks like indented text
        for at in _SECOND_AT:
            first, second = _ingredient_in(line[:at]), _ingredient_in(line[at:])
            is_continued = second.startswith("-") and not line[:at].strip()
            if second and (first or is_continued):
                self._begin_list()
                if first:
                    _append(self._columns[0], first)
                _append(self._columns[1], second)
                return True
        if first := _ingredient_in(line):
            self._begin_list()
            _append(self._columns[0], first)
            return True
        return False

    def _begin_list(self) -> None:
        """Set aside the text before the first ingredient, such as the name of a sender."""
        if not self.ingredients and not any(self._columns):
            self.rest += [*self.steps, *self._paragraph]
            self.steps.clear()
            self._paragraph.clear()

    def _end_columns(self) -> None:
        lines = [*self._columns[0], *self._columns[1]]
        for column in self._columns:
            column.clear()
        if lines and self._group:
            self.ingredients.append({"title": self._group, "items": lines})
        else:
            self.ingredients += lines
        self._group = ""

    def _end_paragraph(self) -> None:
        if self._paragraph:
            self._end_columns()
            self.steps.append(" ".join(self._paragraph))
            self._paragraph = []


def _ingredient_in(line: str) -> str:
    """Return the ingredient of a line or of a half of a line, or "" for another text."""
    amount, code, text = line[:8], line[8:10], line[_TEXT_AT:].rstrip()
    has_gap = line[10:_TEXT_AT] == " " and text[:1].strip()
    # A unit that is not known stays as it is, next to an amount.
    is_unit = not code.strip() or (bool(amount.strip()) and code.strip().isalpha())
    if not has_gap or not _AMOUNT.fullmatch(amount) or not is_unit:
        return ""
    if text.startswith("-"):
        return text
    unit = "tbsp" if code.strip() == "T" else _UNITS.get(code.strip().lower(), code)
    return " ".join(f"{amount} {unit} {text.replace(';', ', ')}".split())


def _append(column: list[str], ingredient: str) -> None:
    """Append an ingredient, or continue the last one."""
    if ingredient.startswith("-") and column:
        column[-1] = f"{column[-1]} {ingredient.lstrip('- ')}".replace("( ", "(")
    else:
        column.append(ingredient.lstrip("- "))
