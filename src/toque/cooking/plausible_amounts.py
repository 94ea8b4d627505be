"""Plausibility checks for the amounts, times and temperatures of a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from toque.cooking.ingredients.amounts import Amount
from toque.cooking.ingredients.parser import parse_line
from toque.cooking.ingredients.vocabulary import UNITS
from toque.cooking.recipe import ParsedRecipe

MAX_AMOUNTS: dict[str, float] = {
    "mass": 10_000.0,  # grams
    "volume": 10_000.0,  # millilitres
    "length": 100.0,  # centimetres
    "count": 100.0,
}
"""Largest plausible amount of an ingredient, by kind of unit. A guess."""
MAX_SPOONS = 24.0
"""Largest plausible number of teaspoons or tablespoons. A guess."""
MAX_STRONG_ML = 60.0
"""Largest plausible amount of leavening, extract or ground spice, in millilitres (1/4 cup).

In 20,000 recipes from Allrecipes and Epicurious, 16 of 13,953 such lines exceed it.
"""
_STRONG = re.compile(
    r"\bbaking (?:soda|powder)\b|\bcream of tartar\b|\b(?:onion|garlic) powder\b"
    r"|\b(?:vanilla|almond|lemon|orange|peppermint|rum) (?:extract|essence)\b|\bsaffron\b"
    r"|\bground (?:cinnamon|nutmeg|allspice|cloves?|cardamom|ginger|cumin|coriander|turmeric|mace"
    r"|anise|sage)\b|\bcayenne(?! pepper sauce| sauce)\b|\bnutmeg\b|\bcinnamon$",
    re.IGNORECASE,
)
DEGREES = (30.0, 600.0)
"""Plausible temperatures in a step, in Celsius or Fahrenheit."""
MINUTES = (0.0, 3 * 24 * 60.0)
"""Plausible times in a step, in minutes. 0 is not plausible."""

# Other lines have only numbers from 1 to 9 and are accepted without the slow parser.
_MAY_BE_MANY = re.compile(
    r"\d\d|(?<![\d.,/])0(?![\d.,/])|\bhundred|\bthousand|\bmillion|\bdozen",
    re.IGNORECASE,
)
_MEASURE = re.compile(
    r"(\d(?<!\d\d)\d*+(?:\.\d++)?+)\s*+(°|degrees?\b|minutes?\b|mins?\b|hours?\b|hrs?\b)",
    re.IGNORECASE,
)


def quantity_sanity(recipe: ParsedRecipe) -> float | None:
    """Compute the fraction of plausible amounts, temperatures and times, or None without any."""
    verdicts = [is_sane_line(line) for line in recipe.ingredients]
    for step in recipe.steps:
        verdicts += [is_plausible for _, is_plausible in _times_and_degrees(step)]
    return sum(verdicts) / len(verdicts) if verdicts else None


def check_times(step: str) -> list[bool]:
    """Check each time in a step for plausibility."""
    measures = _times_and_degrees(step)
    return [is_plausible for is_time, is_plausible in measures if is_time]


def _times_and_degrees(step: str) -> Iterator[tuple[bool, bool]]:
    """Yield (is a time, is plausible) for each time and temperature in a step."""
    for digits, unit in _MEASURE.findall(step):
        amount = float(digits)
        if unit[0] in "mMhH":
            minutes = amount * (60.0 if unit[0] in "hH" else 1.0)
            yield True, MINUTES[0] < minutes <= MINUTES[1]
        else:
            yield False, DEGREES[0] <= amount <= DEGREES[1]


@lru_cache(maxsize=1 << 16)
def is_sane_line(line: str) -> bool:
    """Check whether all amounts in an ingredient line are plausible."""
    is_strong = _STRONG.search(line) is not None
    if not (is_strong or _MAY_BE_MANY.search(line)):
        return True
    amounts = parse_line(line).amounts
    return all(_is_plausible(amount, is_strong=is_strong) for amount in amounts)


def _is_plausible(amount: Amount, *, is_strong: bool) -> bool:
    """Check an amount against the limit for its unit. A missing number is plausible."""
    if amount.quantity is None:
        return True
    high = amount.quantity[1]
    if high <= 0.0:
        return False

    unit = UNITS.get(amount.unit or "")
    if unit is None or unit.kind == "count":
        return high <= MAX_AMOUNTS["count"]
    if is_strong and unit.kind == "volume":
        return high * unit.size <= MAX_STRONG_ML
    if unit.name in {"teaspoon", "tablespoon"}:
        return high <= MAX_SPOONS
    return high * unit.size <= MAX_AMOUNTS[unit.kind]
