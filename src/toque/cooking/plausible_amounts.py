"""Amounts, times and temperatures that a kitchen can have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from toque.cooking.ingredients.parser import parse_line
from toque.cooking.ingredients.vocabulary import UNITS
from toque.cooking.recipe import ParsedRecipe

MOST: Final[dict[str, float]] = {
    "mass": 10_000.0,  # grams
    "volume": 10_000.0,  # millilitres
    "length": 100.0,  # centimetres
    "count": 100.0,
}  # largest plausible amounts of one ingredient; chosen by hand
MOST_OF_A_SPOON: Final = 24.0  # largest plausible number of tea- or tablespoons
MOST_OF_A_STRONG_ONE: Final = 60.0
"""Millilitres (a quarter of a cup) of a leavening, an extract or a ground spice.

Of 13,953 such lines in 20,000 recipes of allrecipes and epicurious 16 hold more.
"""
_STRONG: Final = re.compile(
    r"\bbaking (?:soda|powder)\b|\bcream of tartar\b|\b(?:onion|garlic) powder\b"
    r"|\b(?:vanilla|almond|lemon|orange|peppermint|rum) (?:extract|essence)\b|\bsaffron\b"
    r"|\bground (?:cinnamon|nutmeg|allspice|cloves?|cardamom|ginger|cumin|coriander|turmeric|mace"
    r"|anise|sage)\b|\bcayenne(?! pepper sauce| sauce)\b|\bnutmeg\b|\bcinnamon$",
    re.IGNORECASE,
)
DEGREES: Final = (30.0, 600.0)
MINUTES: Final = (0.0, 3 * 24 * 60.0)  # plausible temperatures and times in steps

# A line without a number of two digits, a lone zero or the name of a large number is plausible,
# unless it names something strong: every other bound above is over nine.
_MAY_BE_MANY: Final = re.compile(
    r"\d\d|(?<![\d.,/])0(?![\d.,/])|\bhundred|\bthousand|\bmillion|\bdozen", re.IGNORECASE
)
_MEASURE: Final = re.compile(
    r"(\d(?<!\d\d)\d*+(?:\.\d++)?+)\s*+(°|degrees?\b|minutes?\b|mins?\b|hours?\b|hrs?\b)",
    re.IGNORECASE,
)


def quantity_sanity(recipe: ParsedRecipe) -> float | None:
    """Share of plausible amounts, temperatures and times; None without any."""
    sane = [is_sane_line(line) for line in recipe.ingredients]
    sane += [plausible for step in recipe.steps for _, plausible in _measures(step)]
    return sum(sane) / len(sane) if sane else None


def sane_times(step: str) -> list[bool]:
    """True for each time in a step that a kitchen can have, False for each other."""
    return [plausible for is_time, plausible in _measures(step) if is_time]


def _measures(step: str) -> Iterator[tuple[bool, bool]]:
    """For each time and temperature in a step: is it a time, and is it plausible?"""
    for digits, unit in _MEASURE.findall(step):
        amount = float(digits)
        if unit[0] in "mMhH":
            minutes = amount * (60.0 if unit[0] in "hH" else 1.0)
            yield True, MINUTES[0] < minutes <= MINUTES[1]
        else:
            yield False, DEGREES[0] <= amount <= DEGREES[1]


@lru_cache(maxsize=1 << 16)
def is_sane_line(line: str) -> bool:
    """True unless an ingredient line names an amount that no kitchen has."""
    strong = _STRONG.search(line) is not None
    if not (strong or _MAY_BE_MANY.search(line)):
        return True
    for amount in parse_line(line).amounts:
        if amount.quantity is None:
            continue
        high, unit = amount.quantity[1], UNITS.get(amount.unit or "")
        if high <= 0.0:
            return False
        kind = unit.kind if unit is not None else "count"
        most, size = MOST[kind], unit.size if unit is not None and kind != "count" else 1.0
        if strong and kind == "volume":
            most = MOST_OF_A_STRONG_ONE
        elif unit is not None and unit.name in {"teaspoon", "tablespoon"}:
            most, size = MOST_OF_A_SPOON, 1.0
        if high * size > most:
            return False
    return True
