"""Measures of ingredient objects: amounts, ranges and units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from toque.cooking.ingredients.number_words import WORDS
from toque.cooking.ingredients.tokens import NUMBER, number, replace_glyphs
from toque.cooking.ingredients.vocabulary import SPELLINGS
from toque.cooking.schemas.object_keys import (
    FRACTION,
    INGREDIENT,
    UNIT,
    Keys,
    UnreadPaths,
    has_letter,
    usable_text,
)
from toque.sources.records import is_filled

# Words in "one to two"
_NUMBERS: Final = frozenset({*WORDS, "to", "or", "and", "a", "an"})
_PIECES: Final = frozenset({"unit", "units", "item", "items", "each", "ea", "qty"})
_DECIMAL: Final = re.compile(r"\d{1,9}\.(?:0+|\d{4,})")
_AMOUNT: Final = re.compile(NUMBER)
_FRACTIONS: Final = {
    1 / 8: "1/8", 1 / 4: "1/4", 1 / 3: "1/3", 3 / 8: "3/8", 1 / 2: "1/2", 5 / 8: "5/8",
    2 / 3: "2/3", 3 / 4: "3/4", 7 / 8: "7/8",
}  # fmt: skip
_NEAR: Final = 0.006  # maximum distance to a fraction: 0.33 and 0.667 are thirds
# Units with decimal amounts.
_IN_DECIMALS: Final = frozenset(
    "milligram gram kilogram millilitre centilitre decilitre litre".split()  # noqa: SIM905
)


class Measure(NamedTuple):
    """An amount and its unit."""

    text: str = ""  # the amount as text in the source; "" if it is a number
    low: float = 0.0
    high: float = 0.0  # equal to `low`, unless the amount is a range
    unit: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.amount, self.unit) if part)

    @property
    def is_bare(self) -> bool:
        """True for a number without a unit."""
        if self.unit or not self.amount:
            return False
        words = filter(has_letter, self.text.lower().split())
        return all(word in _NUMBERS for word in words)

    @property
    def amount(self) -> str:
        """The amount as text: "2", "1/2", "2-3"."""
        if self.text or not self.high:
            return self.text
        low, high = (
            _format_number(value, self.unit) for value in (self.low, self.high)
        )
        return low if low == high else f"{low}-{high}"

    def up_to(self, other: Measure) -> Measure:
        """Return the range from this amount to another amount."""
        if not self.high or other.high <= self.high:
            return self
        text = f"{self.amount}-{other.amount}" if self.text or other.text else ""
        return Measure(text, self.low, other.high, self.unit or other.unit)


class MeasureReader:
    """A reader of the measures of objects. It adds the keys that no measure uses to `unread`."""

    def __init__(self, unread: UnreadPaths) -> None:
        self._unread = unread

    def of_object(self, keys: Keys, path: str = "") -> list[Measure]:
        """Return the measures of an object at this path, the main measure first."""
        unit_objects = _take_unit_objects(keys)
        measures = self._amounts(keys, path)
        lows = self._limits(keys, "least", path)
        highs = self._limits(keys, "most", path)
        measures = measures or lows or highs
        if measures and highs:
            measures[0] = measures[0].up_to(highs[0])

        unit = self._take_unit(keys, unit_objects, measures, path)
        measures = [
            measure._replace(unit=unit) if measure.is_bare else measure
            for measure in measures
        ]
        if unit and not measures:
            measures = [Measure(unit=unit)]

        for value in keys.take("also", str, dict):
            others = self.read(value, path + keys.path_to(value))
            measures += [measure for measure in others if not measure.is_bare]
        return measures or _take_named_units(keys)

    def read(self, value: Any, path: str) -> list[Measure]:
        """Read the measures of an amount: a number, a text, a range, or an object around them."""
        if isinstance(value, bool) or not is_filled(value) or value == 0:
            return []
        if isinstance(value, int | float):
            return [Measure("", value, value)]
        if isinstance(value, str):
            return _measures_of_text(value)
        if isinstance(value, list):
            measures = [measure for one in value for measure in self.read(one, path)]
            # [2, 3] is a range.
            is_range = len(measures) == 2 and all(one.is_bare for one in measures)
            return [measures[0].up_to(measures[1])] if is_range else measures
        if (fraction := _fraction_of(value)) is not None:
            return self.read(fraction, path)
        return self._inside(value, path)

    def _amounts(self, keys: Keys, path: str) -> list[Measure]:
        """Return the measures of the keys for amounts."""
        measures: list[Measure] = []
        for value in keys.take("amount", int, float, str, dict, list):
            others = self.read(value, path + keys.path_to(value))
            if measures and others and others[0].is_bare:
                keys.leave(value)  # a second number without its own unit
            else:
                measures += others
        return measures

    def _limits(self, keys: Keys, role: str, path: str) -> list[Measure]:
        """Return the numbers of the keys for the minimum or the maximum of a range."""
        return [
            measure
            for value in keys.take(role, int, float, str, dict)
            for measure in self.read(value, path + keys.path_to(value))
            if measure.high
        ]

    def _take_unit(
        self, keys: Keys, objects: list[Any], measures: list[Measure], path: str
    ) -> str:
        """Return the unit of an object. If it is one of the measures, remove it there."""
        unit = "".join(map(_unit_text, keys.first("unit")))
        if objects:
            amount = measures[0].high if measures else 0.0
            return self._unit_form(objects[0], amount, path + keys.path_to(objects[0]))
        if unit or len(measures) < 2:
            return unit
        for measure in measures:
            # The key "measure" may contain the unit "cup".
            if measure.text and not begins_with_amount(measure.text):
                measures.remove(measure)
                return measure.text
        return ""

    def _unit_form(self, unit: Mapping[str, Any], amount: float, path: str) -> str:
        """Return the form of a unit for an amount: its name or its abbreviation."""
        keys = Keys(unit, UNIT)
        one, many = keys.first("one"), keys.first("many")
        short, short_many = keys.first("short"), keys.first("short many")
        is_short = keys.is_set("is short")
        self._unread.add_keys(keys, path)

        names, abbreviations = one, short
        if amount > 1.0:
            names = [*many, *one]
            abbreviations = [*short_many, *short]
        forms = [*names, *abbreviations, *many]
        if is_short:
            forms = [*abbreviations, *names]
        return _unit_text(next(iter(forms), ""))

    def _inside(self, value: Mapping[str, Any], path: str) -> list[Measure]:
        """Return the measures inside an amount that is an object."""
        keys = Keys(value, INGREDIENT)
        measures = self.of_object(keys, path)
        if not measures:
            # Each key may be a system of units, as in {"us": ..., "metric": ...}.
            for key, one in keys.values.items():
                is_amount = isinstance(one, str) and begins_with_amount(one)
                if is_amount or isinstance(one, dict):
                    measures += self.read(one, f"{path}.{key}")
                    keys.use(key)
        self._unread.add_keys(keys, path)
        return measures


def begins_with_amount(text: str) -> bool:
    """Return whether the first word of a text is a number, such as "2", "½" or "two"."""
    first = "".join(text.lower().split(None, 1)[:1])
    if not first:
        return False
    return not first[0].isalpha() or first in WORDS or first in {"a", "an"}


def _take_unit_objects(keys: Keys) -> list[Any]:
    """Take the units that are objects. An object with an amount is a measure and stays."""
    units = []
    for value in keys.take("unit", dict):
        if Keys(value, INGREDIENT).has("amount", "least"):
            keys.leave(value)
        else:
            units.append(value)
    return units


def _take_named_units(keys: Keys) -> list[Measure]:
    """Take the measures with their unit as key, e.g. {"grams": 200}."""
    measures: list[Measure] = []
    for key in keys.unread:
        value = keys.values[key]
        unit = SPELLINGS.get(key.lower())
        is_measured = unit is not None and unit.kind in ("mass", "volume")
        if is_measured and isinstance(value, int | float):
            measures.append(Measure("", value, value, key))
            keys.use(key)
    return measures


def _measures_of_text(value: str) -> list[Measure]:
    """Return the measure of a text, or an empty list for a zero or a text without content."""
    text = usable_text(value)
    if _DECIMAL.fullmatch(text):  # exporters write 0.5 as "0.500000"
        amount = float(text)
        return [Measure("", amount, amount)] if amount else []
    if not text.strip("0"):
        return []
    bare = replace_glyphs(text).strip()
    amount = number(bare) if _AMOUNT.fullmatch(bare) else 0.0
    return [Measure(text, amount, amount)]


def _unit_text(unit: str) -> str:
    """Return a unit as text, "" for pieces, and "TBSP" in lower case."""
    unit = unit.strip()
    lower = unit.lower()
    if lower in _PIECES:
        return ""
    is_capitals = unit.isupper() and len(unit) > 1 and lower in SPELLINGS
    return lower if is_capitals else unit


def _fraction_of(value: Mapping[str, Any]) -> float | None:
    """Return the value of a fraction object, e.g. {"numerator": 1, "denominator": 2}."""
    keys = Keys(value, FRACTION)
    integers = keys.take("whole", int, float)
    top = keys.take("top", int, float)
    bottom = keys.take("bottom", int, float)
    if not bottom:
        return None
    return float(sum(integers) + sum(top) / float(bottom[0]))


def _format_number(value: float, unit: str) -> str:
    """Format a number for a recipe: 2, 1 1/2, or 0.5 for metric units.

    >>> _format_number(1.5, "cup"), _format_number(0.5, "kg"), _format_number(0.333, "")
    ('1 1/2', '0.5', '1/3')
    """
    if isinstance(value, int):
        return str(value)
    integer = int(value)
    spelling = SPELLINGS.get(unit.lower())
    if not (spelling and spelling.name in _IN_DECIMALS):
        for part, fraction in _FRACTIONS.items():
            if abs(value - integer - part) < _NEAR:
                return f"{integer} {fraction}" if integer else fraction
    return f"{value:.3f}".rstrip("0").rstrip(".")
