"""Grams of an ingredient line: from its weight, its volume, or its number of pieces."""

from __future__ import annotations

from typing import Final

from toque.cooking.ingredients.amounts import Amount, IngredientLine
from toque.cooking.ingredients.units import UNITS
from toque.cooking.labels.foods import Food

CUP_ML: Final = 236.6
_CUP_G: Final = 150.0
"""Grams per cup of a food without a known density; between flour and water."""
_PIECE_G: Final = 60.0
_UNIT_G: Final[dict[str, float]] = {
    "can": 400, "package": 300, "jar": 340, "bottle": 350, "bag": 300, "box": 350, "carton": 450,
    "container": 250, "punnet": 250, "sachet": 10, "drop": 0.05, "splash": 10, "drizzle": 10,
    "squeeze": 5, "glug": 15, "knob": 15, "handful": 30, "slice": 25, "bunch": 100, "stick": 50,
    "sprig": 1, "strip": 10, "sheet": 20, "loaf": 454, "ball": 125, "block": 250, "wedge": 20,
    "cube": 5, "square": 28, "scoop": 60, "rack": 600, "part": 30, "batch": 300, "recipe": 300,
    "serving": 150, "leaf": 1, "glass": 150, "inch": 10, "centimetre": 4,
}  # fmt: skip
"""Grams per unit for foods without their own figure."""
_UNIT_ML: Final = {"pinch": 0.31, "dash": 0.62}
_SIZE_FACTORS: Final = {
    "small": 0.7, "sm": 0.7, "baby": 0.5, "large": 1.3, "lg": 1.3, "big": 1.3, "jumbo": 1.5,
    "extra-large": 1.5, "heaping": 1.25, "heaped": 1.25, "scant": 0.9,
}  # fmt: skip
_SIZED_ALREADY: Final = frozenset({"egg", "egg white", "egg yolk", "shrimp", "marshmallow"})
"""Foods whose usual piece is the "large" one."""


def grams_of(line: IngredientLine, food: Food) -> float | None:
    """The weight of an ingredient (the mean of a range); None if the line gives no amount.

    >>> from toque.cooking.labels.foods import find_food
    >>> from toque.cooking.ingredients.parser import parse_line
    >>> round(grams_of(parse_line("1 (14 ounce) can milk"), find_food("milk")), 1)
    396.9
    """
    if not line.amounts:
        return None
    for kind in ("mass", "volume"):
        total = _measured(line.amounts, kind, food)
        if total is not None:
            return total * (_factor(line) if kind == "volume" else 1.0)
    return _counted(line, food)


def _measured(amounts: tuple[Amount, ...], kind: str, food: Food) -> float | None:
    """The weight by the first measure of a kind, with the "plus" measures that follow it."""
    count = _mean(amounts[0]) if amounts[0].quantity is not None else 1.0
    for at, amount in enumerate(amounts):
        unit = UNITS.get(amount.unit or "")
        if unit is None or unit.kind != kind or amount.quantity is None:
            continue
        grams = _weight(amount, food)
        if amount.role == "each":
            return grams * count
        for more in amounts[at + 1 :]:
            if more.role != "plus":
                break
            grams += _weight(more, food)
        return grams
    return None


def _weight(amount: Amount, food: Food) -> float:
    unit = UNITS[amount.unit or "gram"]
    if unit.kind == "mass":
        return _mean(amount) * unit.size
    if unit.kind == "volume":
        return _mean(amount) * unit.size / CUP_ML * food.weights_g.get("cup", _CUP_G)
    return 0.0


def _counted(line: IngredientLine, food: Food) -> float:
    """The weight of pieces, cans, cloves and the like."""
    first = line.amounts[0]
    count, unit = _mean(first), first.unit
    own = food.weights_g
    cup = own.get("cup", _CUP_G)
    if unit is None:
        piece = own.get("piece", _PIECE_G)
        return count * piece * (1.0 if food.name in _SIZED_ALREADY else _factor(line))
    if unit in _UNIT_ML:
        return count * _UNIT_ML[unit] / CUP_ML * cup
    if unit in own:
        return count * own[unit]
    if (
        unit in {"stalk", "head", "bulb", "clove", "piece", "ear", "leaf", "stick"}
        and "piece" in own
    ):
        return count * own["piece"]
    return count * _UNIT_G.get(unit, _PIECE_G)


def _mean(amount: Amount) -> float:
    return (amount.quantity[0] + amount.quantity[1]) / 2.0 if amount.quantity else 1.0


def _factor(line: IngredientLine) -> float:
    """How much more a large piece weighs, or a heaped spoon holds."""
    for word in line.size.split():
        if word in _SIZE_FACTORS:
            return _SIZE_FACTORS[word]
    return 1.0
