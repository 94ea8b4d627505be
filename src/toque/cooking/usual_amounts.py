"""Scores of the amounts in a recipe. Each is in [0, 1], and 1 is best."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Final

from toque.cooking.dish_steps import dish_of_title
from toque.cooking.labels.features import line_facts
from toque.cooking.recipe import ParsedRecipe

_TABLE: Final = Path(__file__).with_name("usual_shares.tsv")
_ANY_DISH: Final = "*"
_MIN_FOODS: Final = 3
"""Least number of foods with known weights from which shares are compared."""
_FREE_REPEATS: Final = 2
"""Number of lines with the same number of cups that has no penalty."""


@cache
def _usual_shares() -> dict[tuple[str, str], tuple[float, float]]:
    """Return the usual range of a food's share of the weight, by dish and food.

    `tools/make_usual_shares.py` made the table: the 3rd and 97th percentiles.
    """
    lines = _TABLE.read_text(encoding="utf-8").splitlines()[1:]
    rows = (line.split("\t") for line in lines)
    return {(dish, food): (float(low), float(high)) for dish, food, low, high in rows}


def unusual_amounts(title: str, recipe: ParsedRecipe) -> list[str]:
    """List the foods whose share of the weight of all ingredients is unusual for the dish."""
    grams: defaultdict[str, float] = defaultdict(float)
    for line in recipe.ingredients:
        facts = line_facts(line)
        if facts.food is not None and facts.grams > 0.0:
            grams[facts.food.name] += facts.grams
    if len(grams) < _MIN_FOODS:
        return []
    dish, total = dish_of_title(title), sum(grams.values())
    unusual = []
    for food, weight in grams.items():
        shares = _usual_shares()
        limits = shares.get((dish, food)) or shares.get((_ANY_DISH, food))
        if limits and not limits[0] <= weight / total <= limits[1]:
            unusual.append(food)
    return unusual


def amounts_usual(title: str, recipe: ParsedRecipe) -> float | None:
    """Score unusual amounts: 1 / (1 + their number), or None without ingredients."""
    if not recipe.ingredients:
        return None
    return 1.0 / (1.0 + len(unusual_amounts(title, recipe)))


def amounts_differ(recipe: ParsedRecipe) -> float | None:
    """Score many lines with the same number of cups, or None without ingredients.

    A weak model writes "1/2 cup" of nearly everything.
    """
    if not recipe.ingredients:
        return None
    lines = (line_facts(line).line for line in recipe.ingredients)
    cups: Counter[float] = Counter()
    for line in lines:
        for amount in line.amounts[:1]:
            if amount.unit == "cup" and amount.quantity is not None:
                cups[math.fsum(amount.quantity) / 2] += 1
    n_repeated = max(0, max(cups.values(), default=0) - _FREE_REPEATS)
    return 1.0 / (1.0 + n_repeated)
