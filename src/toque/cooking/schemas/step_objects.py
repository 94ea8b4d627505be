"""Steps as objects: texts, headings and nested lists of steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, Final

from toque.cooking.schemas.object_keys import (
    INGREDIENT,
    NOT_READ,
    STEP,
    Keys,
    UnreadPaths,
    has_letter,
    is_label,
    is_readable,
    number_of,
    usable_text,
)
from toque.cooking.schemas.object_measures import MeasureReader

TIPS: Final = "tips beside the steps left out"

_MAX_HEADING_CHARS: Final = 60
# Maximum nested steps that are compared with the text around them.
_MAX_COMPARED: Final = 50
_MAX_DIGITS: Final = 9  # maximum digits of a step's number; further digits are ignored
# Kinds of pieces in a Cooklang step.
_INLINE: Final = frozenset(
    {"text", "ingredient", "cookware", "timer", "inlineQuantity"}
)
_STEP_NUMBER: Final = re.compile(
    r"\W*+(?:step|schritt|étape|paso|passo)?+\W*+\d*+\W*+", re.IGNORECASE
)


class StepReader:
    """A reader of step objects. It adds the keys that no line uses to `unread`.

    `record` is the entire record: Cooklang's steps refer to its ingredients by index.
    """

    def __init__(
        self, notes: Counter[str], unread: UnreadPaths, record: Mapping[str, Any]
    ) -> None:
        self._notes = notes
        self._unread = unread
        self._record = record
        self._measures = MeasureReader(unread)

    def lines(self, value: Any, depth: int = 0) -> Iterator[str]:
        """Read the steps of a text, a list or an object. A heading becomes a line with a colon."""
        if isinstance(value, str):
            yield value
        elif not is_readable(value, depth):
            self._unread.add_value(value)
        elif isinstance(value, dict):
            yield from self._object(value, depth)
        elif _is_inline(value):
            yield "".join(map(self._piece, value))
        else:
            for item in value:
                yield from self.lines(item, depth + 1)

    def _object(self, value: Mapping[Any, Any], depth: int) -> Iterator[str]:
        """Read an object: a step, a section with its heading, or steps by name."""
        kind = _schema_type(value)
        if kind == "HowToTip":
            self._notes[TIPS] += 1
            return

        keys = Keys(value, STEP)
        keys.take("ingredients", str, list, dict)  # `ingredients_in_steps` reads them
        text = self._text(keys)
        title = "".join(keys.first("title"))
        if _STEP_NUMBER.fullmatch(title):  # "Step 1"
            title = ""
        lines = list(self.lines(keys.take("items", list, dict), depth + 1))
        if not (text or title or lines):
            yield from self._named_steps(keys, depth)
            return

        if keys.announces and not lines:  # the text is marked as a heading
            title = text or title
            text = ""
        if text and lines:
            text, lines = self._without_repeats(text, lines, is_typed=bool(kind))
        if text and _folded([title]).rstrip(" .:!") in _folded([text]):
            title = ""  # the text already contains it

        # Otherwise, the title is the step itself.
        is_heading = bool(lines or text) or kind == "HowToSection" or keys.announces
        if title and is_heading:
            title = _write_heading(keys, title, kind)
        self._unread.add_keys(keys)

        if title:
            yield title
        if text:
            yield text
        yield from lines

    def _without_repeats(
        self, text: str, lines: list[str], *, is_typed: bool
    ) -> tuple[str, list[str]]:
        """Return the text of a step and its nested lines, without repetitions."""
        folded_text = _folded([text])
        # A comparison of more lines takes too long.
        may_compare = len(lines) <= _MAX_COMPARED
        if may_compare and all(_folded([line]) in folded_text for line in lines):
            return text, []
        if folded_text in _folded(lines):
            return "", lines
        if is_typed:  # pages repeat the directions with different words
            self._unread.add(".itemListElement")
            return text, []
        return text, lines

    def _text(self, keys: Keys) -> str:
        """Return the text of a step. A text with different words stays unread."""
        keys.take("number", int, float)
        for digits in keys.take("number", str):
            if not digits.strip().isdecimal():
                keys.leave(digits)
        chosen = ""
        # The longer of "Fry" and "Fry the onion until golden." is the step.
        details = sorted(keys.take("detail", str), key=len, reverse=True)
        for value in [*keys.take("text", str), *details]:
            text = usable_text(value)
            if not has_letter(text) or _STEP_NUMBER.fullmatch(text):
                continue
            if not chosen:
                chosen = text
            elif text.lower() not in chosen.lower():
                keys.leave(value)
        return chosen

    def _named_steps(self, keys: Keys, depth: int) -> Iterator[str]:
        """Read steps by number ({"1": "Mix."}) or by part of the dish ({"For the sauce": []})."""
        for name in _sort_by_number(list(keys.values)):
            value = keys.values[name]
            is_number = is_label(name)
            may_have_steps = is_number or depth == 0 or isinstance(value, list)
            if name.startswith("@") or not may_have_steps:
                continue
            keys.use(name)
            lines = list(self.lines(value, depth + 1))
            if lines and not is_number:
                yield f"{name.rstrip(': ')}:"
            yield from lines
        self._notes[NOT_READ] += bool(keys.unread)
        self._unread.add_keys(keys)

    def _piece(self, piece: Mapping[str, Any]) -> str:
        """Return a piece of a Cooklang step: a text, or the name of an ingredient, tool or time."""
        kind = str(piece["type"])
        item = self._find_item(piece, kind)
        keys = ("alias", "value", "text", "name")
        name = next((item[key] for key in keys if item.get(key)), "")
        if kind == "timer" or not name:
            measures = self._measures.of_object(Keys(item, INGREDIENT))
            name = " ".join(map(str, measures)) or name
        return name if isinstance(name, str) else ""

    def _find_item(self, piece: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
        """Return the item of the record that a piece refers to by index, or the piece itself."""
        index = piece.get("index")
        items = self._record.get(kind if kind == "cookware" else f"{kind}s")
        if not isinstance(index, int) or not isinstance(items, list):
            return piece
        if not 0 <= index < len(items):
            return piece
        return items[index] if isinstance(items[index], dict) else {}


def _write_heading(keys: Keys, title: str, kind: str) -> str:
    """Return a title with a colon. If it may not be a heading, leave its key and return ""."""
    # A typed step has its name next to its text, which need not be a heading.
    is_typed_step = kind not in ("", "HowToSection")
    if is_typed_step or len(title) > _MAX_HEADING_CHARS:
        keys.leave(title)
        return ""
    return f"{title.rstrip(' :')}:"


def _schema_type(value: Mapping[Any, Any]) -> str:
    """Return the schema.org type of an object without its address, or ""."""
    types = value.get("@type") or ""
    first = types[0] if isinstance(types, list) else types
    return str(first).rpartition("/")[2]


def _sort_by_number(names: list[str]) -> list[str]:
    """Sort names by number if all have a number, such as "step 2"."""
    digits = filter(None, map(number_of, names))
    numbers = [int(number[:_MAX_DIGITS]) for number in digits]
    if len(numbers) < len(names):
        return names
    numbered = sorted(zip(numbers, names, strict=True), key=itemgetter(0))
    return [name for _, name in numbered]


def _is_inline(items: list[Any]) -> bool:
    """Return whether objects are the pieces of one step from a Cooklang parser."""
    kinds = {str(item.get("type")) if isinstance(item, dict) else "" for item in items}
    return len(kinds) > 1 and "text" in kinds and kinds <= _INLINE


def _folded(lines: list[str]) -> str:
    """Return lines as one text in lower case with single spaces."""
    return " ".join(" ".join(lines).lower().split())
