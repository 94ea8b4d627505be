"""Shopping list of a recipe: its foods with amounts for a number of servings, equal foods added.

A spoon or a cup is written in halves, thirds, quarters and eighths, a metric unit with three
digits; what outgrows or no longer fills its unit gets another (6 teaspoons are 2 tablespoons).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from toque.cooking.ingredients.amounts import Amount, IngredientLine
from toque.cooking.ingredients.names import ingredient_name, stem
from toque.cooking.ingredients.parser import parse_line
from toque.cooking.ingredients.tokens import Range
from toque.cooking.labels.features import read
from toque.cooking.labels.nutrition import estimate
from toque.cooking.recipe import Recipe
from toque.cooking.text_keys import words_of

MOST_SERVINGS: Final = 1000  # most servings; more is a canteen's order, and no recipe scales to it
_ONE: Final = (1.0, 1.0)


@dataclass(frozen=True)
class Item:
    """One food to buy."""

    food: str
    amounts: tuple[str, ...]  # to be added, "1½ cups"; several where units differ
    note: str  # "to taste", "for dusting", "optional"; "" without


def shopping_list(lines: Sequence[str], *, factor: float) -> list[Item]:
    """The foods of ingredient lines with their amounts times `factor`, in order."""
    foods: dict[str, _Food] = {}
    for text in lines:
        line = parse_line(text)
        if name := ingredient_name(text):
            key = " ".join(map(stem, words_of(name))) or name
            foods.setdefault(key, _Food(f"{line.size} {name}".strip())).add(line, factor)
    return [
        Item(
            food.name,
            tuple(
                f"{write_amount(many, unit)}{each}" for (unit, each), many in food.measures.items()
            ),
            ", ".join(food.notes),
        )
        for food in foods.values()
    ]


def unlisted_item(food: str) -> Item:
    """A food that the steps use and the ingredient list does not name."""
    return Item(food, (), "in the steps, not in the list")


def estimated_servings(recipe: Recipe) -> int:
    """Servings that the recipe states, else those of `labels.nutrition.estimate`."""
    found = recipe.servings or estimate(read(recipe)).servings
    return max(1, round(found or 1))


@dataclass
class _Food:
    name: str
    measures: dict[tuple[str | None, str], Range] = field(default_factory=dict)
    """Amounts, keyed by unit and the size of one piece."""
    notes: dict[str, None] = field(default_factory=dict)

    def add(self, line: IngredientLine, factor: float) -> None:
        for amount, each in _measures(line):
            low, high = amount.quantity or _ONE  # "pinch of salt"
            before = self.measures.get((amount.unit, each), (0.0, 0.0))
            scaled = (before[0] + low * factor, before[1] + high * factor)
            self.measures[amount.unit, each] = scaled
        notes = (line.purpose or line.comment, "optional" if line.optional else "")
        self.notes |= dict.fromkeys(filter(None, notes))


def _measures(line: IngredientLine) -> list[tuple[Amount, str]]:
    """The measures that add up, each with the size of one piece, which does not scale."""
    found: list[tuple[Amount, str]] = []
    for amount in line.amounts:
        if amount.role in ("whole", "plus"):
            found.append((amount, ""))
        elif amount.role == "each" and found and amount.quantity and not found[-1][1]:
            size = write_amount(amount.quantity, amount.unit, keep_unit=True)
            found[-1] = (found[-1][0], f" of {size}")
    return found


_FRACTIONS: Final = (
    (0.0, ""), (1 / 8, "⅛"), (1 / 4, "¼"), (1 / 3, "⅓"), (1 / 2, "½"), (2 / 3, "⅔"), (3 / 4, "¾"),
    (1.0, ""),
)  # fmt: skip
_OFF: Final = 0.05  # largest relative error by which a fraction may change the unit


class _Step(NamedTuple):
    unit: str
    holds: float  # amount of the ladder's first unit that it holds, exactly, unlike millilitres
    least: float = 0.0  # the least amount written in it
    most: float = math.inf  # an amount written in it is less


_LADDERS: Final = (
    (_Step("teaspoon", 1, most=3), _Step("tablespoon", 3, 1, most=4), _Step("cup", 48, 1 / 4)),
    (_Step("ounce", 1, most=16), _Step("pound", 16, 1 / 4)),
    (_Step("gram", 1, most=1000), _Step("kilogram", 1000, 1)),
    (_Step("millilitre", 1, most=1000), _Step("litre", 1000, 1)),
)  # units that change into each other, the smallest first
_LADDER_OF: Final = {step.unit: ladder for ladder in _LADDERS for step in ladder}
_ABBREVIATED: Final = {  # metric units, which take decimals, as they are written
    "milligram": "mg", "gram": "g", "kilogram": "kg", "millilitre": "ml", "centilitre": "cl",
    "decilitre": "dl", "litre": "l", "millimetre": "mm", "centimetre": "cm",
}  # fmt: skip


def write_amount(quantity: Range, unit: str | None, *, keep_unit: bool = False) -> str:
    """An amount for people: 6 of "teaspoon" is "2 tablespoons", unless it is to `keep_unit`."""
    if not keep_unit:
        quantity, unit = _in_a_fitting_unit(quantity, unit)
    low, high = (_written(value, unit) for value in quantity)
    number = low if low == high else f"{low}–{high}"
    if unit is None:
        return number
    if unit in _ABBREVIATED or quantity[1] <= 1.0:
        return f"{number} {_ABBREVIATED.get(unit, unit)}"
    ending = "es" if unit.endswith(("ch", "sh", "x", "s")) else "s"
    return f"{number} {unit[:-1] + 'ves' if unit.endswith('f') else unit + ending}"


def _in_a_fitting_unit(quantity: Range, unit: str | None) -> tuple[Range, str | None]:
    """The amount in its own unit if that fits, else in the largest that its fractions suit."""
    ladder = _LADDER_OF.get(unit or "")
    if ladder is None:
        return quantity, unit
    own = next(step for step in ladder if step.unit == unit)
    if own.least <= quantity[0] and quantity[1] < own.most:
        return quantity, unit
    low, high = quantity[0] * own.holds, quantity[1] * own.holds
    for step in reversed(ladder):
        found = (low / step.holds, high / step.holds)
        close = all(abs(sum(_fraction(value)[:2]) - value) <= _OFF * value for value in found)
        if found[0] >= step.least and (close or step.unit in _ABBREVIATED):
            return found, step.unit
    smallest = ladder[0]
    return (low / smallest.holds, high / smallest.holds), smallest.unit


def _written(value: float, unit: str | None) -> str:
    if unit in _ABBREVIATED:
        return f"{float(f'{value:.3g}'):,.10g}"
    whole, _, glyph = _fraction(value)
    return f"{whole:,}{glyph}" if whole or not glyph else glyph


def _fraction(value: float) -> tuple[int, float, str]:
    """The whole part, the nearest fraction and its glyph; an eighth is the least there is."""
    whole = math.floor(value)
    rest = value - whole
    part, glyph = min(_FRACTIONS, key=lambda fraction: abs(fraction[0] - rest))
    if whole == 0 and part == 0.0 and value > 0.0:
        part, glyph = _FRACTIONS[1]
    return (whole + 1, 0.0, "") if part == 1.0 else (whole, part, glyph)
