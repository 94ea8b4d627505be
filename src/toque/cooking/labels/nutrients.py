"""Nutrient fields of a record, under any name and in any unit.

Figures are taken to be per serving, as collections and schema.org's NutritionInformation give them.
A zero is a value; an empty field is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

KCAL_PER_KJ: Final = 1 / 4.184

_NAMES: Final[dict[str, str]] = {
    "energy_kcal": "energykcal calories kcal caloriescontent energy totalcalories",
    "fat_g": "fatg fat fatcontent totalfat totalfatg",
    "saturated_fat_g": "saturatedfatg saturatedfat saturatedfatcontent saturates saturatesg satfat",
    "sugar_g": "sugarg sugar sugars sugarsg sugarcontent totalsugars",
    "salt_g": "saltg salt saltcontent",
    "sodium_mg": "sodiummg sodium sodiumcontent",
    "carbohydrate_g": "carbohydrateg carbohydrate carbohydrates carbohydratesg carbs carbsg "
    "carbohydratecontent",
    "protein_g": "proteing protein proteincontent",
    "fibre_g": "fibre fiber fibercontent fiberg fibreg dietaryfiber totalfiber",
    "serving_g": "servingg servingsize portionweight servingweightg servingweight",
}
_FIELDS: Final = {name: what for what, names in _NAMES.items() for name in names.split()}
"""Field names, in lower case and without punctuation, to nutrients."""

_MASS_IN_G: Final = dict.fromkeys(("g", "gram", "grams", "gr"), 1.0) | {
    "mg": 1e-3, "milligram": 1e-3, "milligrams": 1e-3, "µg": 1e-6, "mcg": 1e-6, "kg": 1e3,
    "oz": 28.35, "ounce": 28.35, "ounces": 28.35,
}  # fmt: skip
_AMOUNT: Final = re.compile(r"(\d+(?:[.,]\d+)?)\s*([a-zA-Zµ]*)")
_MASS: Final = re.compile(
    r"((?<!\d)\d++(?:[.,]\d++)?+)\s*+(g|grams?|gr|oz|ounces?)\b", re.IGNORECASE
)
_NOT_FOLDED: Final = re.compile(r"[^a-z0-9]")
_MIN_SERVING_G: Final = 5.0
"""Smallest serving in grams: exporters write "1 g" for an unknown one."""


@lru_cache(maxsize=1024)
def nutrient_fields(names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The field names that hold a nutrient, each with the nutrient; the first of several counts.

    >>> nutrient_fields(("title", "Total Fat (g)", "sodium_mg"))
    (('Total Fat (g)', 'fat_g'), ('sodium_mg', 'sodium_mg'))
    """
    found = ((name, _FIELDS.get(_NOT_FOLDED.sub("", name.lower()))) for name in names)
    return tuple((name, what) for name, what in found if what is not None)


def nutrients_of(facts: Mapping[str, Any]) -> dict[str, float]:
    """Nutrients per serving (kcal, g, mg), from a record or its NutritionInformation.

    >>> nutrients_of({"calories": "1000 kJ", "sodiumContent": "0.5 g", "fatContent": "2,5 g"})
    {'energy_kcal': 239.0, 'sodium_mg': 500.0, 'fat_g': 2.5}
    >>> nutrients_of({"fat_g": 0, "sugar_g": None, "servingSize": "1 Serving (165g)"})
    {'fat_g': 0.0, 'serving_g': 165.0}
    """
    found: dict[str, float] = {}
    for name, what in nutrient_fields(tuple(facts)):
        if what in found:
            continue
        value = _serving_g(facts[name]) if what == "serving_g" else _figure(facts[name], what)
        if value is not None:
            found[what] = value
    return found


def _figure(value: Any, what: str) -> float | None:
    amount = _amount(value)
    if amount is None:
        return None
    number, unit = amount
    if what == "energy_kcal":
        return round(number * (KCAL_PER_KJ if unit == "kj" else 1.0), 1)
    if what == "sodium_mg":
        return round(number * 1000.0 * _MASS_IN_G.get(unit, 1e-3), 3)
    return round(number * _MASS_IN_G.get(unit, 1.0), 3)


def _serving_g(value: Any) -> float | None:
    """The weight of a serving; a bare number is ignored, because it is as often a count ("4")."""
    match = _MASS.search(value) if isinstance(value, str) and len(value) < 200 else None
    if match is None:
        amount = None if isinstance(value, str) else _amount(value)
        grams = amount[0] if amount else 0.0
    else:
        grams = float(match[1].replace(",", ".")) * _MASS_IN_G[match[2].lower()]
    return round(grams, 1) if _MIN_SERVING_G <= grams < 1e5 else None


def _amount(value: Any) -> tuple[float, str] | None:
    """A finite number that is not negative, with the unit a text gives it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (float(value), "") if 0 <= value < 1e9 else None  # also false for NaN
    match = _AMOUNT.search(value) if isinstance(value, str) else None
    if match is None or len(match[1]) > 9 or value.lstrip().startswith("-"):
        return None
    return float(match[1].replace(",", ".")), match[2].casefold()
