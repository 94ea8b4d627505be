"""Items as objects: the lines of ingredients and steps, and their unused keys.

The names of the keys determine how an object is read. A filled key that no line uses is noted once
per record with its path: "ingredients.aisle".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from toque.cooking.schemas.ingredient_objects import IngredientReader
from toque.cooking.schemas.object_keys import UnreadPaths
from toque.cooking.schemas.step_objects import StepReader

UNUSED: Final = "field that no example holds: "  # start of a note about an unused field


class ItemReader:
    """A reader of the items of a field. It notes the keys that no line uses.

    `record` is the entire record, see `StepReader`.
    """

    def __init__(
        self, field: str, notes: Counter[str], record: Mapping[str, Any] | None = None
    ) -> None:
        self._field = field
        self._notes = notes
        self._unread = UnreadPaths()
        self._ingredients = IngredientReader(notes, self._unread)
        self._steps = StepReader(notes, self._unread, record or {})

    def ingredients(self, value: Any) -> list[str]:
        """Return the ingredient lines of texts, lists and objects. Count the headings."""
        return self._list_and_note(self._ingredients.lines(value))

    def steps(self, value: Any) -> list[str]:
        """Return the steps of texts, lists and objects. A heading becomes a line with a colon."""
        return self._list_and_note(self._steps.lines(value))

    def ingredients_in_steps(self, value: Any) -> list[str]:
        """Return the ingredient lines inside steps that are objects."""
        return self._list_and_note(self._ingredients.lines_in_steps(value))

    def _list_and_note(self, lines: Iterator[str]) -> list[str]:
        """Return all lines, and note the keys that they do not use."""
        item_lines = list(lines)
        self._notes.update(f"{UNUSED}{self._field}{path}" for path in self._unread)
        return item_lines
