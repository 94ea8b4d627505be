"""Food table: nutrients per 100 g of common foods, their names in recipes, and weights.

The table `foods.tsv` comes from the USDA's National Nutrient Database for Standard Reference 21
(public domain) through `tools/make_foods.py`. One entry covers many names, because a traffic light
does not need to distinguish Gouda from Edam.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from toque.cooking.ingredients.amounts import Amount, IngredientLine
from toque.cooking.ingredients.names import stem
from toque.cooking.ingredients.vocabulary import UNITS

_TABLE = Path(__file__).with_name("foods.tsv")
_WORD = re.compile(r"[^\W\d_]+|(?<!\d)\d++%")
_ALTERNATIVES = re.compile(r",? or |/| and/or |, (?:such as|preferably) |;|:| - ")
NUTRIENTS = (
    "energy_kcal", "fat_g", "saturated_fat_g", "sugar_g", "sodium_mg", "protein_g",
    "carbohydrate_g",
)  # fmt: skip
_MAX_WORDS = 5
_SERVING_G = 30.0  # grams per serving of a rare food
_NOT_FOOD = frozenset(
    """
    skewer toothpick foil parchment equipment accompaniment twine reynold thermometer cutter
    cheesecloth liner charcoal torch ramekin
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Food:
    """A food with values for its raw, edible parts, as recipes weigh them."""

    name: str
    names: tuple[str, ...]  # all names in recipes, with `name` first
    per_100_g: tuple[float, ...]  # values in the order of `NUTRIENTS`
    # Grams per cup, per piece, and per other units of this food.
    weights_g: dict[str, float]
    serving_g: float  # median grams per serving of a dish, for lines without an amount


@cache
def foods() -> tuple[Food, ...]:
    """Return all foods of the table."""
    table: list[Food] = []
    lines = _TABLE.read_text(encoding="utf-8").splitlines()
    for line in lines[1:]:
        name_list, _, *values, weight_list, serving = line.split("\t")
        names = tuple(name_list.split(","))
        weights = (item.split("=") for item in weight_list.split(";") if item)
        food = Food(
            names[0],
            names,
            tuple(map(float, values)),
            {unit: float(grams) for unit, grams in weights},
            float(serving or _SERVING_G),
        )
        table.append(food)
    return tuple(table)


@cache
def _index() -> dict[tuple[str, ...], Food]:
    """Return the foods by the stems of each name. The first food with a name has priority."""
    index: dict[tuple[str, ...], Food] = {}
    for food in foods():
        for name in food.names:
            index.setdefault(_stems(name), food)
    return index


def _stems(name: str) -> tuple[str, ...]:
    """Split a name into word stems, without accents and apostrophes."""
    plain = name.casefold()
    if not plain.isascii():  # "jalapeño" becomes "jalapeno"
        parts = unicodedata.normalize("NFKD", plain)
        plain = "".join(part for part in parts if not unicodedata.combining(part))
    plain = plain.replace("'", "")
    return tuple(map(stem, _WORD.findall(plain)))


@lru_cache(maxsize=1 << 16)
def find_food(name: str) -> Food | None:
    """Find the food with the longest match in a name. Of equally long matches, return the last.

    The first of several alternatives with a food counts: "butter" in "butter or margarine".
    """
    for part in (*_ALTERNATIVES.split(name), name):
        food = _longest_match(_stems(part))
        if food is not None:
            return food
    return None


def _longest_match(stems: tuple[str, ...]) -> Food | None:
    """Return the food with the longest match in the stems, or the last of equally long matches."""
    index = _index()
    for length in range(min(_MAX_WORDS, len(stems)), 0, -1):
        for start in range(len(stems) - length, -1, -1):
            food = index.get(stems[start : start + length])
            if food is not None:
                return food
    return None


@lru_cache(maxsize=1 << 16)
def is_food(name: str) -> bool:
    """Check that a name is edible, unlike a skewer or foil."""
    return _NOT_FOOD.isdisjoint(_stems(name))


CUP_ML = 236.6
# Grams per cup of a food without a known density: between flour and water.
_CUP_G = 150.0
_PIECE_G = 60.0
_UNIT_G: dict[str, float] = {  # grams per unit of foods without their own value
    "can": 400, "package": 300, "jar": 340, "bottle": 350, "bag": 300, "box": 350, "carton": 450,
    "container": 250, "punnet": 250, "sachet": 10, "drop": 0.05, "splash": 10, "drizzle": 10,
    "squeeze": 5, "glug": 15, "knob": 15, "handful": 30, "slice": 25, "bunch": 100, "stick": 50,
    "sprig": 1, "strip": 10, "sheet": 20, "loaf": 454, "ball": 125, "block": 250, "wedge": 20,
    "cube": 5, "square": 28, "scoop": 60, "rack": 600, "part": 30, "batch": 300, "recipe": 300,
    "serving": 150, "leaf": 1, "glass": 150, "inch": 10, "centimetre": 4,
}  # fmt: skip
_UNIT_ML = {"pinch": 0.31, "dash": 0.62}
"""Small units of volume, which the parser counts as pieces."""
_SIZE_FACTORS = {
    "small": 0.7, "sm": 0.7, "baby": 0.5, "large": 1.3, "lg": 1.3, "big": 1.3, "jumbo": 1.5,
    "extra-large": 1.5, "heaping": 1.25, "heaped": 1.25, "scant": 0.9,
}  # fmt: skip
_PIECES = frozenset({"stalk", "head", "bulb", "clove", "piece", "ear", "leaf", "stick"})
_SIZED_ALREADY = frozenset({"egg", "egg white", "egg yolk", "shrimp", "marshmallow"})


def grams_of(line: IngredientLine, food: Food) -> float | None:
    """Return the grams of an ingredient (the mean of a range), or None without an amount.

    A mass is more exact than a volume, and a volume than a number of pieces.
    """
    if not line.amounts:
        return None
    grams = _grams_in(line.amounts, "mass", food)
    if grams is not None:
        return grams
    grams = _grams_in(line.amounts, "volume", food)
    if grams is not None:
        return grams * _size_factor(line)
    return _grams_of_pieces(line, food)


def _grams_in(amounts: tuple[Amount, ...], kind: str, food: Food) -> float | None:
    """Return the grams of the first measure of a kind and of its "plus" measures."""
    for index, amount in enumerate(amounts):
        unit = UNITS.get(amount.unit or "")
        if unit is None or unit.kind != kind or amount.quantity is None:
            continue
        grams = _grams_of_measure(amount, food)
        if amount.role == "each":
            return grams * _mean(amounts[0])
        for more in amounts[index + 1 :]:
            if more.role != "plus":
                break
            grams += _grams_of_measure(more, food)
        return grams
    return None


def _grams_of_measure(amount: Amount, food: Food) -> float:
    """Return the grams of a mass or a volume, and 0.0 for other units."""
    unit = UNITS[amount.unit or "gram"]
    if unit.kind == "mass":
        return _mean(amount) * unit.size
    if unit.kind == "volume":
        return _mean(amount) * unit.size / CUP_ML * food.weights_g.get("cup", _CUP_G)
    return 0.0


def _grams_of_pieces(line: IngredientLine, food: Food) -> float:
    """Return the grams of counted pieces, or of a unit such as "can" or "bunch"."""
    count, unit = _mean(line.amounts[0]), line.amounts[0].unit
    weights_g = food.weights_g
    if unit is None:
        factor = 1.0 if food.name in _SIZED_ALREADY else _size_factor(line)
        return count * weights_g.get("piece", _PIECE_G) * factor
    if unit in _UNIT_ML:
        return count * _UNIT_ML[unit] / CUP_ML * weights_g.get("cup", _CUP_G)
    if unit in weights_g:
        return count * weights_g[unit]
    if unit in _PIECES and "piece" in weights_g:
        return count * weights_g["piece"]
    return count * _UNIT_G.get(unit, _PIECE_G)


def _mean(amount: Amount) -> float:
    """Return the mean of a range, or 1.0 without a number ("pinch of salt")."""
    if amount.quantity is None:
        return 1.0
    low, high = amount.quantity
    return (low + high) / 2.0


def _size_factor(line: IngredientLine) -> float:
    """Return the factor for the weight of a large piece or the volume of a heaped spoon."""
    for word in line.size.split():
        if word in _SIZE_FACTORS:
            return _SIZE_FACTORS[word]
    return 1.0
