"""Shopping list of a recipe: foods with total amounts for a number of servings.

Amounts in spoons and cups are fractions. Amounts in metric units have three significant digits. An
amount that is unusual in its unit is converted: 6 teaspoons become 2 tablespoons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from toque.cooking.ingredients.amounts import Amount, IngredientLine
from toque.cooking.ingredients.names import ingredient_name, stem
from toque.cooking.ingredients.parser import parse_line
from toque.cooking.ingredients.tokens import Range
from toque.cooking.labels.features import read_features
from toque.cooking.labels.nutrition import estimate_nutrition
from toque.cooking.normalised_words import words_of
from toque.cooking.recipe import Recipe

MAX_SERVINGS = 1000
"""Maximum number of servings."""
_ONE = (1.0, 1.0)
"""Amount of a unit without a number, such as "pinch of salt"."""


@dataclass(frozen=True)
class Item:
    """Food to buy."""

    food: str
    amounts: tuple[str, ...]
    """Amounts to add, e.g. "1½ cups". Several if their units cannot be converted."""
    note: str
    """Remark such as "to taste" or "optional", or ""."""


def shopping_list(lines: Sequence[str], *, factor: float) -> list[Item]:
    """List the foods of ingredient lines in order, with their total amounts times `factor`."""
    foods: dict[str, _Food] = {}
    for text in lines:
        name = ingredient_name(text)
        if not name:
            continue
        line = parse_line(text)
        # Singular and plural of a food are one item. A name without letters is its own key.
        key = " ".join(map(stem, words_of(name))) or name
        food = foods.setdefault(key, _Food(f"{line.size} {name}".strip()))
        food.add(line, factor)
    return [food.item() for food in foods.values()]


def unlisted_item(food: str) -> Item:
    """Create an item for a food that is in the steps but not in the ingredient list."""
    return Item(food, (), "in the steps, not in the list")


def estimated_servings(recipe: Recipe) -> int:
    """Return the servings of a recipe, or estimate them from its ingredients."""
    servings = recipe.servings or estimate_nutrition(read_features(recipe)).servings
    return max(1, round(servings or 1))


@dataclass
class _Food:
    """Sum of the amounts of a food."""

    name: str
    measures: dict[tuple[str | None, str], Range] = field(default_factory=dict)
    """(Unit, size of a piece) -> amount."""
    notes: dict[str, None] = field(default_factory=dict)

    def add(self, line: IngredientLine, factor: float) -> None:
        """Add the amounts and notes of a line. `factor` multiplies the amounts."""
        for amount, piece_size in _measures(line):
            low, high = amount.quantity or _ONE
            total_low, total_high = self.measures.get(
                (amount.unit, piece_size), (0.0, 0.0)
            )
            total = (total_low + low * factor, total_high + high * factor)
            self.measures[amount.unit, piece_size] = total
        notes = (line.purpose or line.comment, "optional" if line.optional else "")
        self.notes |= dict.fromkeys(filter(None, notes))

    def item(self) -> Item:
        """Format the amounts and notes."""
        amounts = [
            f"{write_amount(quantity, unit)}{piece_size}"
            for (unit, piece_size), quantity in self.measures.items()
        ]
        return Item(self.name, tuple(amounts), ", ".join(self.notes))


def _measures(line: IngredientLine) -> list[tuple[Amount, str]]:
    """List the amounts of a line with the size of a piece, e.g. " of 400 g", or "".

    The size of a piece is not multiplied: two recipes need two cans of the same size.
    """
    measures: list[tuple[Amount, str]] = []
    for amount in line.amounts:
        if amount.role in ("whole", "plus"):
            measures.append((amount, ""))
        elif amount.role == "each" and amount.quantity and measures:
            pieces, piece_size = measures[-1]
            if not piece_size:
                size = write_amount(amount.quantity, amount.unit, keep_unit=True)
                measures[-1] = (pieces, f" of {size}")
    return measures


_FRACTIONS = (
    (0.0, ""), (1 / 8, "⅛"), (1 / 4, "¼"), (1 / 3, "⅓"), (1 / 2, "½"), (2 / 3, "⅔"), (3 / 4, "¾"),
    (1.0, ""),
)  # fmt: skip
_MAX_ERROR = 0.05
"""Maximum relative error of a fraction after a conversion."""


class _Step(NamedTuple):
    """Unit in a series of units that are multiples of the first unit."""

    unit: str
    size: float
    """Size of the unit, in the first unit of the series."""
    min_amount: float = 0.0
    """Smallest amount in this unit."""
    max_amount: float = math.inf
    """Exclusive upper limit of amounts in this unit."""


_LADDERS = (
    (
        _Step("teaspoon", 1, max_amount=3),
        _Step("tablespoon", 3, 1, max_amount=4),
        _Step("cup", 48, 1 / 4),
    ),
    (_Step("ounce", 1, max_amount=16), _Step("pound", 16, 1 / 4)),
    (_Step("gram", 1, max_amount=1000), _Step("kilogram", 1000, 1)),
    (_Step("millilitre", 1, max_amount=1000), _Step("litre", 1000, 1)),
)
"""Series of units, each from the smallest to the largest."""
_LADDER_OF = {step.unit: ladder for ladder in _LADDERS for step in ladder}
_ABBREVIATED = {  # metric units, which have decimals instead of fractions
    "milligram": "mg", "gram": "g", "kilogram": "kg", "millilitre": "ml", "centilitre": "cl",
    "decilitre": "dl", "litre": "l", "millimetre": "mm", "centimetre": "cm",
}  # fmt: skip


def write_amount(quantity: Range, unit: str | None, *, keep_unit: bool = False) -> str:
    """Format an amount. 6 teaspoons are "2 tablespoons", except with `keep_unit`."""
    if not keep_unit:
        quantity, unit = _convert(quantity, unit)
    low, high = (_format_number(value, unit) for value in quantity)
    number = low if low == high else f"{low}–{high}"
    if unit is None:
        return number
    if unit in _ABBREVIATED:
        return f"{number} {_ABBREVIATED[unit]}"
    return f"{number} {unit if quantity[1] <= 1.0 else _plural(unit)}"


def _plural(unit: str) -> str:
    if unit.endswith("f"):  # "loaf", "leaf"
        return f"{unit[:-1]}ves"
    return f"{unit}es" if unit.endswith(("ch", "sh", "x", "s")) else f"{unit}s"


def _convert(quantity: Range, unit: str | None) -> tuple[Range, str | None]:
    """Convert an amount outside of its unit's limits to the largest unit with a close fraction."""
    ladder = _LADDER_OF.get(unit or "")
    if ladder is None:
        return quantity, unit
    current = next(step for step in ladder if step.unit == unit)
    if current.min_amount <= quantity[0] and quantity[1] < current.max_amount:
        return quantity, unit

    low, high = quantity[0] * current.size, quantity[1] * current.size
    for step in reversed(ladder):
        converted = (low / step.size, high / step.size)
        is_close = step.unit in _ABBREVIATED or all(map(_is_near_fraction, converted))
        if converted[0] >= step.min_amount and is_close:
            return converted, step.unit
    return (low, high), ladder[0].unit


def _is_near_fraction(value: float) -> bool:
    integer, part, _ = _fraction(value)
    return abs(integer + part - value) <= _MAX_ERROR * value


def _format_number(value: float, unit: str | None) -> str:
    if unit in _ABBREVIATED:
        rounded = float(f"{value:.3g}")
        return f"{rounded:,.10g}"
    integer, _, glyph = _fraction(value)
    is_below_1 = integer == 0 and glyph
    return glyph if is_below_1 else f"{integer:,}{glyph}"


def _fraction(value: float) -> tuple[int, float, str]:
    """Return the integer part, the nearest fraction and its glyph. Amounts below 1/8 become 1/8."""
    integer = math.floor(value)
    rest = value - integer
    part, glyph = min(_FRACTIONS, key=lambda fraction: abs(fraction[0] - rest))
    if integer == 0 and part == 0.0 and value > 0.0:
        part, glyph = _FRACTIONS[1]
    if part == 1.0:
        return integer + 1, 0.0, ""
    return integer, part, glyph
