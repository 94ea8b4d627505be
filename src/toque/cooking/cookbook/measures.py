"""Foods of the cookbook (`pantry.tsv`), and amounts in usual kitchen measures."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from toque.cooking.labels.nutrition import SALT_PER_SODIUM

_TABLE = Path(__file__).with_name("pantry.tsv")
_CAN_OUNCES = "15"
"""Ounces per can of a food without its own size."""


@dataclass(frozen=True)
class PantryFood:
    """Food with its names, nutrients and weights."""

    name: str
    """Singular in a step: "chickpea"."""
    plural: str
    """Plural in a step: "chickpeas". Equal to `name` for a mass noun."""
    listed_as: str
    """Words before the name in the ingredient list: "boneless skinless" for chicken breasts."""
    title: str
    """Name in a title: "lemon" for lemon zest. Empty if it is the name in a step."""
    per_100_g: Mapping[str, float]
    """energy_kcal, fat_g, sugar_g and salt_g per 100 g."""
    cup_g: float
    """Grams per cup. 0 for a food without a volume."""
    piece_g: float
    """Grams per piece, clove, slice, stalk or can. 0 for a food that is not counted."""
    origin: str
    """plant, dairy, egg, honey, meat or fish."""
    can: str
    """Ounces per can: "14.5"."""
    halved: bool
    """True if a recipe may use half a piece."""


def _load_pantry() -> dict[str, PantryFood]:
    """Load the foods of the table by singular and plural."""
    lines = _TABLE.read_text(encoding="utf-8").splitlines()
    table = (line for line in lines if not line.startswith("#"))
    foods: dict[str, PantryFood] = {}
    for row in csv.DictReader(table, delimiter="\t"):
        name, ending = row["food"], row["ending"]
        is_entire_plural = len(ending) > 2  # "leaves", not "s" or "es"
        per_100_g = {
            "energy_kcal": float(row["energy_kcal"]),
            "fat_g": float(row["fat_g"]),
            "sugar_g": float(row["sugar_g"]),
            "salt_g": float(row["sodium_mg"]) * SALT_PER_SODIUM / 1000.0,
        }
        foods[name] = PantryFood(
            name=name,
            plural=ending if is_entire_plural else name + ending,
            listed_as=row["listed_as"],
            title=row["title"],
            per_100_g=per_100_g,
            cup_g=float(row["cup_g"] or 0),
            piece_g=float(row["piece_g"] or 0),
            origin=row["origin"],
            can=row["can"] or _CAN_OUNCES,
            halved=row["halved"] == "yes",
        )
    # A singular has priority: "rice" is raw rice, although it is also the plural of cooked rice.
    return {food.plural: food for food in foods.values()} | foods


PANTRY: Mapping[str, PantryFood] = _load_pantry()
"""Foods by their singular and plural names."""

GRAMS_PER_POUND = 453.6
OUNCES_PER_POUND = 16.0
TEASPOONS_PER_CUP = 48.0
VOLUMES = {"cup": 48.0, "tbsp": 3.0, "tsp": 1.0}
"""Teaspoons per unit of volume."""

PIECES = {"clove", "stalk", "slice", "can", "sprig"}
"""Units that count pieces."""

_FRACTIONS = {0.25: "1/4", 1 / 3: "1/3", 0.5: "1/2", 2 / 3: "2/3", 0.75: "3/4"}
_CUPS = (
    *_FRACTIONS,
    *(1.0 + part for part in (0.0, *_FRACTIONS)),
    *(2.0 + part for part in (0.0, *_FRACTIONS)),
    3.0,
)
"""Usual numbers of cups."""
_TABLESPOONS = (1.0, 1.5, 2.0, 3.0)
_TEASPOONS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.25)
_PINCHES_PER_TEASPOON = 16.0
_PINCH_G = 0.4


@dataclass(frozen=True)
class Specification:
    """Ingredient per serving or per batch: "1/2 cup carrots, sliced|diced"."""

    amount: float
    unit: str
    key: str
    """Singular of the food."""
    preparations: tuple[str, ...]


@dataclass(frozen=True)
class Measured:
    """Rounded amount of a food."""

    line: str
    """Amount, unit and food as in an ingredient list, without the preparation."""
    grams: float
    is_single: bool
    """True if steps use the singular ("the onion")."""


@lru_cache(maxsize=4096)
def specification(text: str) -> Specification:
    """Parse "AMOUNT [UNIT] FOOD[, preparation[|preparation...]]".

    Raises:
        KeyError: The food is not in the pantry.
    """
    amount_text, _, rest = text.partition(" ")
    numerator, _, denominator = amount_text.partition("/")
    amount = float(numerator) / float(denominator or 1)
    unit, _, food = rest.partition(" ")
    if unit not in VOLUMES and unit not in PIECES and unit not in {"lb", "oz", "pinch"}:
        unit, food = "", rest
    key, _, preparation = food.partition(", ")
    if key not in PANTRY:
        raise KeyError(f"{key!r} of {text!r} is not in the pantry")
    return Specification(amount, unit, PANTRY[key].name, tuple(preparation.split("|")))


def measure(spec: Specification, scale: float) -> Measured:
    """Multiply an amount, round it to a usual measure, and format it."""
    food, amount = PANTRY[spec.key], spec.amount * scale
    if spec.unit in VOLUMES:
        return _volume(food, amount * VOLUMES[spec.unit])
    if spec.unit == "pinch":
        if amount > 2.0:
            return _volume(food, amount / _PINCHES_PER_TEASPOON)
        return Measured(f"1 pinch {food.name}", _PINCH_G, is_single=False)
    if spec.unit == "lb":
        return _weight(food, amount * OUNCES_PER_POUND)
    if spec.unit == "oz":
        return _weight(food, amount)
    return _pieces(spec, food, amount)


def _name_in_list(food: PantryFood, *, plural: bool = True) -> str:
    return f"{food.listed_as} {food.plural if plural else food.name}".strip()


def _nearest(value: float, choices: tuple[float, ...]) -> float:
    """Return the choice with the smallest relative error."""
    return min(choices, key=lambda choice: abs(math.log(choice / value)))


def write_number(value: float) -> str:
    """Format a number with a fraction: 1.5 is "1 1/2"."""
    integer = math.floor(value + 1e-9)
    part = value - integer
    parts = [str(integer)] if integer else []
    parts += [text for size, text in _FRACTIONS.items() if abs(size - part) < 0.02]
    return " ".join(parts) or "0"


def _volume(food: PantryFood, teaspoons: float) -> Measured:
    """Measure a volume in teaspoons up to 2 1/4, tablespoons up to 3, or cups."""
    if teaspoons < 2.6:
        count = _nearest(teaspoons, _TEASPOONS)
        name, size = "teaspoon", 1.0
    elif teaspoons < 10.5:
        count = _nearest(teaspoons / 3.0, _TABLESPOONS)
        name, size = "tablespoon", 3.0
    else:
        cups = teaspoons / TEASPOONS_PER_CUP
        half_cups = math.floor(2 * cups + 0.5)
        count = _nearest(cups, _CUPS) if cups <= 3.0 else half_cups / 2
        name, size = "cup", TEASPOONS_PER_CUP
    unit = name if count <= 1.0 else name + "s"
    line = f"{write_number(count)} {unit} {_name_in_list(food)}"
    grams = count * size * food.cup_g / TEASPOONS_PER_CUP
    return Measured(line, grams, is_single=False)


def _weight(food: PantryFood, ounces: float) -> Measured:
    """Measure a weight in ounces up to 8, in quarters of a pound, or from 3 pounds in halves."""
    if ounces < 9.0:
        count = max(1.0, math.floor(ounces + 0.5))
        unit, grams = "ounce", GRAMS_PER_POUND / OUNCES_PER_POUND
    else:
        step = 4.0 if ounces < 44.0 else 8.0  # in ounces
        n_steps = math.floor(ounces / step + 0.5)
        count = max(0.75, n_steps * step / OUNCES_PER_POUND)
        unit, grams = "pound", GRAMS_PER_POUND
    if count > 1.0:
        unit += "s"
    line = f"{write_number(count)} {unit} {_name_in_list(food)}"
    return Measured(line, count * grams, is_single=False)


def _pieces(spec: Specification, food: PantryFood, amount: float) -> Measured:
    """Measure whole pieces, cans, cloves and so on, or half a piece."""
    count = float(max(1, math.floor(amount + 0.5)))
    if amount < 0.75 and food.halved and not spec.unit:
        count = 0.5
    is_plural = count > 1.0
    ending = "s" if is_plural else ""
    if spec.unit == "can":
        noun = f"({food.can} ounce) can{ending} {food.plural}"
    elif spec.unit:
        noun = f"{spec.unit}{ending} {_name_in_list(food)}"
    else:
        noun = _name_in_list(food, plural=is_plural)
    line = f"{write_number(count)} {noun}"
    return Measured(line, count * food.piece_g, is_single=not (is_plural or spec.unit))
