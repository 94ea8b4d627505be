"""Food table: nutrients per 100 g of common foods, looked up by the names recipes use.

The table `foods.tsv` comes from the USDA's National Nutrient Database for Standard Reference 21
(public domain) through `tools/make_foods.py`. One entry stands for many names: a traffic light
need not distinguish Gouda from Edam.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

from toque.cooking.ingredients.names import stem

_TABLE: Final = Path(__file__).with_name("foods.tsv")
_WORD: Final = re.compile(r"[^\W\d_]+|(?<!\d)\d++%")
_ALTERNATIVES: Final = re.compile(r",? or |/| and/or |, (?:such as|preferably) |;|:| - ")
NUTRIENTS: Final = (
    "energy_kcal", "fat_g", "saturated_fat_g", "sugar_g", "sodium_mg", "protein_g",
    "carbohydrate_g",
)  # fmt: skip
_MAX_WORDS: Final = 5
_SERVING_G: Final = 30.0
"""Grams in a serving, for a rare food."""
_NOT_FOOD: Final = frozenset(
    {"skewer", "toothpick", "foil", "parchment", "equipment", "accompaniment", "twine", "reynold",
     "thermometer", "cutter", "cheesecloth", "liner", "charcoal", "torch", "ramekin"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Food:
    """A food; its figures are for raw, edible parts, which is what recipes weigh."""

    name: str
    names: tuple[str, ...]
    """All that recipes call it, `name` first."""
    per_100_g: tuple[float, ...]
    """Figures in the order of `NUTRIENTS`."""
    weights_g: dict[str, float]
    """Grams per cup, per piece, and per other units of this food."""
    serving_g: float
    """Median grams in one serving of a dish with it, for lines without an amount."""


@cache
def foods() -> tuple[Food, ...]:
    """Every food of the table."""
    rows: list[Food] = []
    for line in _TABLE.read_text(encoding="utf-8").splitlines()[1:]:
        names, _, *figures, weights, typical = line.split("\t")
        pairs = (item.split("=") for item in weights.split(";") if item)
        grams = {unit: float(value) for unit, value in pairs}
        known = tuple(names.split(","))
        values = tuple(map(float, figures))
        rows.append(Food(known[0], known, values, grams, float(typical or _SERVING_G)))
    return tuple(rows)


@cache
def _index() -> dict[tuple[str, ...], Food]:
    """Foods by the singular words of each of their names."""
    index: dict[tuple[str, ...], Food] = {}
    for food in foods():
        for name in food.names:
            index.setdefault(_words(name), food)
    return index


def _words(name: str) -> tuple[str, ...]:
    plain = name.casefold()
    if not plain.isascii():  # "jalapeño" is "jalapeno"
        parts = unicodedata.normalize("NFKD", plain)
        plain = "".join(mark for mark in parts if not unicodedata.combining(mark))
    return tuple(stem(word) for word in _WORD.findall(plain.replace("'s", "s").replace("'", "")))


@lru_cache(maxsize=1 << 16)
def find_food(name: str) -> Food | None:
    """Look up the food that an ingredient's name means; None if it is not in the table.

    The longest run of words that is a name in the table counts, the last if there are several; of
    alternatives ("butter or margarine"), the first known one.

    >>> find_food("skinless, boneless chicken breast halves").name, find_food("unobtainium")
    ('chicken breast', None)
    """
    for part in _ALTERNATIVES.split(name):
        food = _find(_words(part))
        if food is not None:
            return food
    return _find(_words(name))


def _find(words: tuple[str, ...]) -> Food | None:
    index = _index()
    for length in range(min(_MAX_WORDS, len(words)), 0, -1):
        for start in range(len(words) - length, -1, -1):
            food = index.get(words[start : start + length])
            if food is not None:
                return food
    return None


@lru_cache(maxsize=1 << 16)
def is_food(name: str) -> bool:
    """Whether a line names something to eat rather than a skewer or foil."""
    return _NOT_FOOD.isdisjoint(_words(name))
