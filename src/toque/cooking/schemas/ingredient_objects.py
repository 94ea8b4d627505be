"""Ingredients as objects: one line per object, and headings of their groups."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from toque.cooking.schemas.object_keys import (
    FOOD,
    INGREDIENT,
    NOT_READ,
    STEP,
    Keys,
    UnreadPaths,
    is_label,
    is_readable,
    repeats,
    usable_text,
)
from toque.cooking.schemas.object_measures import (
    Measure,
    MeasureReader,
    begins_with_amount,
)

HEADINGS: Final = "ingredient sub-headings"

# Roles that may contain the heading of a group.
_HEADING_ROLES: Final = ("heading", "title", "food", "text")
# Maximum notes that are compared with a line.
_MAX_COMPARED: Final = 50
_AFTER_FOOD: Final = re.compile(r"(?:to|as|for|if|q\.? ?[bs])\b", re.IGNORECASE)
_AMOUNT_WORDS: Final = 3  # maximum words of an amount in a description: "2 large cans"


class IngredientReader:
    """A reader of ingredient objects. It adds the keys that no line uses to `unread`."""

    def __init__(self, notes: Counter[str], unread: UnreadPaths) -> None:
        self._notes = notes
        self._unread = unread
        self._measures = MeasureReader(unread)
        self._group = ""

    def lines(self, value: Any, depth: int = 0) -> Iterator[str]:
        """Read the ingredient lines of a text, a list or an object, and count the headings."""
        if isinstance(value, str):
            yield value
        elif not is_readable(value, depth):
            self._unread.add_value(value)
        elif isinstance(value, list):
            for item in value:
                yield from self.lines(item, depth + 1)
        else:
            yield from self._object(value, depth)

    def lines_in_steps(self, value: Any, depth: int = 0) -> Iterator[str]:
        """Read the ingredient lines inside steps that are objects."""
        if isinstance(value, str):
            return
        if not is_readable(value, depth):
            self._unread.add_value(value)
            return
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict):
                yield from self.lines_in_steps(item, depth + 1)
                continue
            keys = Keys(item, STEP)
            yield from self.lines(keys.take("ingredients", list, dict), depth + 1)
            yield from self.lines_in_steps(keys.take("items", list, dict), depth + 1)

    def _object(self, value: Mapping[Any, Any], depth: int) -> Iterator[str]:
        """Read an object: a group of ingredients, a wrapper, a heading or an ingredient."""
        keys = Keys(value, INGREDIENT)
        if _is_group(keys):
            self._count_headings_of(keys, *_HEADING_ROLES)
            items = keys.take("items", list, dict)
            self._unread.add_keys(keys)
            yield from self.lines(items, depth + 1)
        elif inner := _inner_ingredient(keys):
            # A wrapper such as {"ingredient": {...}}; its other keys may be the amount's range.
            around = {key: one for key, one in value.items() if one is not inner}
            yield from self.lines({**around, **inner}, depth + 1)
        elif keys.announces:
            self._count_headings_of(keys, *_HEADING_ROLES, "note")
            self._unread.add_keys(keys)
        else:
            yield from self._ingredient(value, keys, depth)

    def _ingredient(
        self, value: Mapping[Any, Any], keys: Keys, depth: int
    ) -> Iterator[str]:
        """Read an object with these keys as one ingredient, or as ingredients by name."""
        headings = keys.first("heading")
        titles = keys.texts("title")
        if keys.has("food", "line", "text"):
            # The title is not the food's name.
            headings += titles
            titles = []

        line = self._line(keys, titles)
        self._count_headings(headings)
        if line:
            self._unread.add_keys(keys)
            yield line
        elif not headings and (depth == 0 or _is_named(keys.values)):
            yield from self._ingredients_by_name(value, depth)
        elif keys.unread:
            self._unread.add_keys(keys)
            self._notes[NOT_READ] += 1

    def _count_headings_of(self, keys: Keys, *roles: str) -> None:
        for role in roles:
            self._count_headings(keys.first(role))

    def _count_headings(self, headings: list[str]) -> None:
        """Count headings. Each ingredient may repeat the heading of its group."""
        for heading in headings:
            self._notes[HEADINGS] += heading != self._group
            self._group = heading

    def _ingredients_by_name(
        self, values: Mapping[Any, Any], depth: int
    ) -> Iterator[str]:
        """Read ingredients by name ({"flour": "200 g"}), by part of the dish, or by number.

        A number or a key that a program generated is neither a name nor a heading.
        """
        for key, value in values.items():
            name = str(key)
            if isinstance(value, dict):
                yield from self._named_object(name, value, depth)
            elif isinstance(value, list):
                self._count_headings([] if is_label(name) else [name])
                yield from self.lines(value, depth + 1)
            elif is_label(name) or _contains(value, name):
                # The value of {"flour": "200 g flour"} is an entire line.
                yield from self.lines(value, depth + 1)
            else:
                yield from self.lines({"food": name, "amount": value}, depth + 1)

    def _named_object(
        self, name: str, value: Mapping[Any, Any], depth: int
    ) -> Iterator[str]:
        """Read the object of a name: an ingredient, the food's measure, or a part of the dish."""
        keys = Keys(value, INGREDIENT)
        is_ingredient = keys.has("food", "line", "text", "heading")
        if is_label(name) or is_ingredient or _is_group(keys):
            yield from self.lines(value, depth + 1)
        elif keys.has("amount", "least", "unit", "note"):
            yield from self.lines({**value, "food": name}, depth + 1)
        elif is_readable(value, depth):
            self._count_headings([name])
            yield from self._ingredients_by_name(value, depth + 1)
        else:
            self._unread.add_value(value)

    def _line(self, keys: Keys, titles: list[str]) -> str:
        """Return the line of an ingredient, or "" if it names no food."""
        lines = keys.first("line")
        texts = keys.first("text")
        measures = self._measures.of_object(keys)
        foods = self._foods(keys, measures[0].high if measures else 0.0) or titles
        notes = [
            note
            for value in keys.take("note", str, list, dict)
            for note in self._remarks(value, keys.path_to(value))
        ]
        measures += self._take_descriptions(keys, notes, is_measured=bool(measures))
        is_optional = keys.is_set("optional")
        if keys.is_set("no amount"):
            measures = []

        # A text without an amount is the food, if the measures are in other keys.
        is_food = texts and measures and _is_without_amount(texts[0])
        if not is_food:
            lines += texts
        if lines:
            line = lines[0]
            if measures and _is_without_amount(line):
                keys.release("amount", "least", "most", "also", "unit")
        else:
            line = self._compose_line(keys, measures, texts or foods, notes)

        if foods and not repeats(foods[0], line):
            keys.release("food")
        return _with_notes(line, notes, is_optional=is_optional) if line else ""

    def _compose_line(
        self, keys: Keys, measures: list[Measure], foods: list[str], notes: list[str]
    ) -> str:
        """Compose amounts, size and food. Add remarks that belong after the food to `notes`."""
        extracts = keys.take("extract", list, str)  # Spoonacular's extracts of the line
        notes += [note for value in extracts for note in self._remarks(value, ".meta")]

        # A note without a food is the food, unless the food may be in an unread key.
        if not foods and notes and (measures or not keys.unread):
            foods = [notes.pop(0)]
            if list(map(str, measures)) == ["1"]:
                measures = []  # Mealie's default next to a note that contains the line
        if not foods:
            return ""

        amounts = list(dict.fromkeys(filter(None, map(str, measures))))
        remark = (measures[0].unit or measures[0].text) if measures else ""
        if _AFTER_FOOD.match(remark):
            notes.append(remark[:1].lower() + remark[1:])  # "salt, to taste"
            amounts = amounts[1:]
        first, others = amounts[:1], amounts[1:]
        in_brackets = [f"({'; '.join(others)})"] if others else []
        return " ".join([*first, *in_brackets, *keys.texts("size"), foods[0]])

    def _take_descriptions(
        self, keys: Keys, notes: list[str], *, is_measured: bool
    ) -> list[Measure]:
        """Read the amount at the start of a description ("200 g, sifted"). Add the rest to `notes`.

        An ingredient that `is_measured` has its amount elsewhere.
        """
        measures: list[Measure] = []
        for value in keys.take("described", str):
            amount, _, remark = value.strip().partition(",")
            is_short = len(amount.split()) <= _AMOUNT_WORDS
            needs_amount = not (is_measured or measures)
            if needs_amount and is_short and begins_with_amount(amount):
                measures.append(Measure(amount.strip()))
            else:
                remark = value
            notes += self._remarks(remark, "")
        return measures

    def _foods(self, keys: Keys, amount: float) -> list[str]:
        """Return the food's name for an amount. A different name stays unread."""
        food_name = ""
        for value in keys.take("food", str, dict):
            name = value
            if isinstance(value, dict):
                name = self._food_form(value, amount, keys.path_to(value))
            name = usable_text(name)
            if not food_name:
                food_name = name
            elif not repeats(name, food_name):
                keys.leave(value)
        return [food_name] if food_name else []

    def _food_form(self, food: Mapping[str, Any], amount: float, path: str) -> str:
        """Return the singular or plural of a food."""
        keys = Keys(food, FOOD)
        singular = keys.first("one")
        plural = keys.first("many")
        self._unread.add_keys(keys, path)
        forms = [*plural, *singular] if amount > 1.0 else [*singular, *plural]
        return next(iter(forms), "")

    def _remarks(self, value: Any, path: str) -> Iterator[str]:
        """Read the remarks of a text, a list or an object. Remove brackets around a remark."""
        if isinstance(value, str):
            text = usable_text(value).strip(" ,;")
            if text.startswith("(") and text.endswith(")") and text.count("(") == 1:
                text = text[1:-1].strip()
            if text:
                yield text
        elif isinstance(value, list):
            for item in value:
                yield from self._remarks(item, path)
        elif isinstance(value, dict):
            inside = Keys(value, INGREDIENT)
            for role in ("line", "text", "note", "food"):
                yield from inside.texts(role)
            self._unread.add_keys(inside, path)


def _contains(value: Any, name: str) -> bool:
    """Return whether a value is a text with a name in it."""
    return isinstance(value, str) and name.lower() in value.lower()


def _with_notes(line: str, notes: list[str], *, is_optional: bool) -> str:
    """Return a line with the notes that it does not contain."""
    if len(notes) <= _MAX_COMPARED:
        notes = [note for note in dict.fromkeys(notes) if not repeats(note, line)]
    line = ", ".join([line, *notes])
    says_optional = "optional" in line.lower()
    return f"{line} (optional)" if is_optional and not says_optional else line


def _is_group(keys: Keys) -> bool:
    """Return whether an object is a list of items, not a single ingredient."""
    values = Keys(keys.values, INGREDIENT)
    if values.take("items", list):
        return True
    parts = ("line", "food", "amount")
    if any(values.take(role, str, int, float) for role in parts):
        return False
    return any(
        Keys(one, INGREDIENT).take("items", list, dict)
        for one in values.take("items", dict)
    )


def _inner_ingredient(keys: Keys) -> dict[str, Any] | None:
    """Return the complete ingredient inside an object with only a food key, or None."""
    if keys.has("line", "amount", "least"):
        return None
    foods: list[dict[str, Any]] = keys.take("food", dict)
    keys.release("food")
    for food in foods:
        inside = Keys(food, INGREDIENT)
        if inside.has("food", "line") and inside.has("line", "amount"):
            return food
    return None


def _is_named(values: Mapping[str, Any]) -> bool:
    """Return whether an object is one ingredient under its name, e.g. {"flour": "200 g"}."""
    if len(values) != 1:
        return False
    ((name, value),) = values.items()
    if not isinstance(value, str) or begins_with_amount(value):
        return True
    return is_label(name) or _AFTER_FOOD.match(value) is not None


def _is_without_amount(text: str) -> bool:
    """Return whether a text names a food and has no amount or "to taste"."""
    words = text.split()
    return not any(
        begins_with_amount(word) or _AFTER_FOOD.match(word) for word in words
    )
