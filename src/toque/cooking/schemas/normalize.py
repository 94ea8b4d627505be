"""Normalisation: a clean `Recipe` from a record with our field names, or a reason to drop it.

`fields` maps every schema to these fields: title; ingredients and directions as lists of lines; and
optionally tags, servings, minutes, prep_time, cook_time, source, difficulty, nutrition_class, and
nutrients. Nutrients may have any name and unit, directly or in "nutrition".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, Final, Literal, TypeVar, get_args
from unicodedata import east_asian_width

from toque.cooking.durations import minutes_of
from toque.cooking.ingredients.parser import MAX_CHARS
from toque.cooking.normalised_words import has_action_verb, words_of
from toque.cooking.recipe import DIFFICULTIES, NUTRITION_CLASSES, Recipe, to_text
from toque.cooking.recipe_scores import MIN_CHARS
from toque.cooking.schemas.cleaning import (
    LOST_NUMBERS,
    STEPS_IN_LIST,
    clean_ingredients,
    clean_steps,
    clean_title,
    is_list_in_line,
    listed_lines,
)
from toque.cooking.schemas.credits import tells_how, without_credits
from toque.cooking.schemas.headings import with_headings_joined
from toque.cooking.schemas.markup import LOST_FRACTION, clean_text
from toque.cooking.schemas.repairs import is_cut_off, without_misprints
from toque.cooking.schemas.repetitions import without_repeat
from toque.cooking.schemas.sections import without_sections

Reason = Literal[
    "no title", "no ingredients", "no steps", "too short", "lost fraction", "text cut off",
    "ingredients on one line", "steps among the ingredients", "no method",
]  # fmt: skip
REASONS: tuple[Reason, ...] = get_args(Reason)

MOST_STEPS_IN_LIST = 2  # maximum steps among the ingredients of a usable recipe
# Maximum ingredient lines of a recipe that may have its list on one line.
MOST_LINES_OF_LIST = 2
# Minimum characters of steps without instructions; "Mix." teaches nothing.
MIN_STEP_CHARS = 20
# Minimum words of shorter steps with instructions: "Mix and bake." is enough.
MIN_STEP_WORDS = 3

_LONG_LINES = (
    f"ingredient lines over {MAX_CHARS:,} characters, only their beginning parsed"
)
_MOST_MINUTES = 1e9  # also the bound of every other number of a record
_T = TypeVar("_T", bound=str)


def recipe_of(record: Mapping[str, Any], notes: Counter[str]) -> Recipe | Reason:
    """Return the clean recipe of a record, or a reason for dropping it. `notes` counts repairs."""
    lines = _texts(record.get("ingredients"))
    steps = _texts(record.get("directions"))
    steps = [listed_lines(text, notes) if "\n \t" in text else text for text in steps]
    title = _title_of(record, notes)
    if not any(map(str.isalnum, title)):
        return "no title"

    line_notes: Counter[str] = Counter()
    ingredients = clean_ingredients(lines, line_notes)
    notes.update(line_notes)
    ingredients = without_sections(
        ingredients, notes, title=title, steps="\n".join(steps)
    )
    if line_notes[STEPS_IN_LIST] > MOST_STEPS_IN_LIST:
        return "steps among the ingredients"

    directions = _directions_of(steps, title, notes)
    if not ingredients:
        return "no ingredients"
    n_long_lines = sum(len(line) > MAX_CHARS for line in ingredients)
    notes[_LONG_LINES] += n_long_lines

    if not directions:
        return "no steps"
    if damage := _damage(ingredients, directions):
        return damage
    recipe = _with_details(record, title, ingredients, directions, notes)
    return _damage_of_text(to_text(recipe)) or recipe


def _title_of(record: Mapping[str, Any], notes: Counter[str]) -> str:
    """Return the clean title of a record, or "" if its title is not a text."""
    title = record.get("title")
    title = title if isinstance(title, str) else ""
    return without_misprints([clean_title(title, notes)], notes)[0]


def _directions_of(
    steps: list[str], title: str, notes: Counter[str]
) -> tuple[str, ...]:
    """Return the clean steps, or none if they are only a link with the recipe's title."""
    directions = tuple(without_repeat(list(clean_steps(steps, notes)), notes))
    directions = without_credits(directions, notes)
    directions = with_headings_joined(directions, notes)
    words = chain.from_iterable(map(words_of, directions))
    is_link = {*words_of(title), "recipe"}.issuperset(words)
    return () if is_link else directions


def _with_details(
    record: Mapping[str, Any],
    title: str,
    ingredients: tuple[str, ...],
    directions: tuple[str, ...],
    notes: Counter[str],
) -> Recipe:
    """Return the recipe with the record's tags, times, servings, nutrition and labels."""
    raw_tags = record.get("tags")
    tags = raw_tags.split(",") if isinstance(raw_tags, str) else _texts(raw_tags)
    source = record.get("source")
    nutrition = record.get("nutrition")
    facts = nutrition if isinstance(nutrition, dict) else record
    return Recipe(
        title=title,
        ingredients=ingredients,
        steps=directions,
        tags=tuple(tag for text in tags if (tag := clean_text(text, notes))),
        servings=_round_count(record.get("servings")),
        minutes=_total_minutes(record),
        source=source if isinstance(source, str) else "",
        nutrition=nutrients_of(facts) or None,
        difficulty=_label(record.get("difficulty"), DIFFICULTIES),
        nutrition_class=_label(record.get("nutrition_class"), NUTRITION_CLASSES),
    )


def _total_minutes(record: Mapping[str, Any]) -> int | None:
    """Return the total time, or the sum of the times for preparation and cooking."""
    minutes = _duration(record.get("minutes"))
    if minutes is not None:
        return minutes
    preparation = _duration(record.get("prep_time")) or 0
    cooking = _duration(record.get("cook_time")) or 0
    # Two missing times are an unknown time, not 0 minutes.
    return preparation + cooking or None


def _damage_of_text(text: str) -> Reason | None:
    """Return the reason for dropping a recipe with this text, or None."""
    if _is_short(text, MIN_CHARS):
        return "too short"
    if not text.isascii() and LOST_FRACTION.search(text):
        return "lost fraction"
    return "lost fraction" if any(map(text.__contains__, LOST_NUMBERS)) else None


def _damage(ingredients: tuple[str, ...], steps: tuple[str, ...]) -> Reason | None:
    """Return the reason for dropping a recipe with incomplete steps or ingredients."""
    if any(map(is_cut_off, steps)):
        return "text cut off"
    has_few_lines = len(ingredients) <= MOST_LINES_OF_LIST
    if has_few_lines and any(map(is_list_in_line, ingredients)):
        return "ingredients on one line"
    if _is_short("".join(steps), MIN_STEP_CHARS):
        words = " ".join(steps).split()
        if len(words) < MIN_STEP_WORDS or not any(map(has_action_verb, steps)):
            return "too short"
    if not any(map(tells_how, steps)):
        return "no method"
    return None


def _is_short(text: str, fewest: int) -> bool:
    """Return whether a text is too short. A wide character, e.g. in Chinese, counts as three."""
    n_missing = fewest - len(text)
    if n_missing <= 0:
        return False
    n_wide = sum(east_asian_width(character) in "WF" for character in text)
    return 2 * n_wide < n_missing  # its length already counts each wide character once


def _texts(value: Any) -> list[str]:
    """Return a text, or the texts of a list, as a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return []
    return [item for item in value if isinstance(item, str)]


def _round_count(value: Any) -> int | None:
    """Round a number, or the first number of a text ("4 servings"). Return None below 1."""
    amount = _amount(value)
    return round(amount[0]) if amount is not None and amount[0] >= 1 else None


def _duration(value: Any) -> int | None:
    """Convert a value to whole minutes.

    Strings are parsed with `minutes_of`; a bare number is already in minutes.
    """
    minutes = minutes_of(value) if isinstance(value, str) else None
    if minutes is None:
        return _round_count(value)
    if minutes >= _MOST_MINUTES:
        return None
    return round(minutes) or None  # 0 minutes are an unknown time


def _label(value: Any, allowed: tuple[_T, ...]) -> _T | None:
    """Return the allowed label that equals a text in any case, or None."""
    if not isinstance(value, str):
        return None
    folded = value.casefold()
    return next((label for label in allowed if label.casefold() == folded), None)


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
_FIELDS: Final = {
    name: what for what, names in _NAMES.items() for name in names.split()
}

_MASS_IN_G: Final = dict.fromkeys(("g", "gram", "grams", "gr"), 1.0) | {
    "mg": 1e-3, "milligram": 1e-3, "milligrams": 1e-3, "µg": 1e-6, "mcg": 1e-6, "kg": 1e3,
    "oz": 28.35, "ounce": 28.35, "ounces": 28.35,
}  # fmt: skip
# "1,200 mg" and "1 200 mg" have thousands separators, "2,5 g" a decimal comma.
_AMOUNT: Final = re.compile(
    r"(?:([1-9]\d{0,2}+(?:[, \xa0\u202f]\d{3})++(?:\.\d++)?+(?![\d,]))|(\d++(?:[.,]\d++)?+))"
    r"\s*+([a-zA-Zµ]*+)"
)
_MAX_DIGITS: Final = 9  # maximum characters of a plausible number
_BETWEEN_THOUSANDS: Final = re.compile(r"[, \xa0\u202f]")
_KILOJOULES: Final = frozenset({"kj", "kilojoule", "kilojoules"})
_MASS: Final = re.compile(
    r"((?<!\d)\d++(?:[.,]\d++)?+)\s*+(g|grams?|gr|oz|ounces?)\b", re.IGNORECASE
)
_NOT_FOLDED: Final = re.compile(r"[^a-z0-9]")
# Minimum grams per serving; exporters write "1 g" for unknown servings.
_MIN_SERVING_G: Final = 5.0


@lru_cache(maxsize=1024)
def nutrient_fields(names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return pairs of field name and nutrient. If fields share a nutrient, the first one counts."""
    nutrient_of_name = {
        name: _FIELDS.get(_NOT_FOLDED.sub("", name.lower())) for name in names
    }
    return tuple((name, what) for name, what in nutrient_of_name.items() if what)


def nutrients_of(facts: Mapping[str, Any]) -> dict[str, float]:
    """Return nutrients per serving (kcal, g, mg) from a record or its NutritionInformation.

    >>> nutrients_of({"calories": "1000 kJ", "sodiumContent": "0.5 g", "fatContent": "2,5 g"})
    {'energy_kcal': 239.0, 'sodium_mg': 500.0, 'fat_g': 2.5}
    >>> nutrients_of({"fat_g": 0, "sugar_g": None, "servingSize": "1 Serving (165g)"})
    {'fat_g': 0.0, 'serving_g': 165.0}
    """
    nutrients: dict[str, float] = {}
    for name, what in nutrient_fields(tuple(facts)):
        if what in nutrients:
            continue
        is_serving = what == "serving_g"
        value = _serving_g(facts[name]) if is_serving else _figure(facts[name], what)
        if value is not None:
            nutrients[what] = value
    return nutrients


def _figure(value: Any, what: str) -> float | None:
    """Return the amount of a nutrient in kcal, mg of sodium, or g. Numbers have this unit."""
    amount = _amount(value)
    if amount is None:
        return None
    number, unit = amount
    if what == "energy_kcal":
        return round(number * (KCAL_PER_KJ if unit in _KILOJOULES else 1.0), 1)
    if what == "sodium_mg":
        return round(number * 1000.0 * _MASS_IN_G.get(unit, 1e-3), 3)
    return round(number * _MASS_IN_G.get(unit, 1.0), 3)


def _serving_g(value: Any) -> float | None:
    """Return the grams per serving. A bare number ("4") is ignored, because it is often a count."""
    grams = 0.0
    if not isinstance(value, str):
        amount = _amount(value)
        grams = amount[0] if amount else 0.0
    elif len(value) < 200 and (match := _MASS.search(value)):
        grams = float(match[1].replace(",", ".")) * _MASS_IN_G[match[2].lower()]
    return round(grams, 1) if _MIN_SERVING_G <= grams < 1e5 else None


def _amount(value: Any) -> tuple[float, str] | None:
    """Return a finite, non-negative number and its unit in the text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (float(value), "") if 0 <= value < 1e9 else None  # also false for NaN
    match = _AMOUNT.search(value) if isinstance(value, str) else None
    if match is None or value.lstrip().startswith("-"):
        return None
    thousands, plain_digits, unit = match.groups()
    digits = plain_digits or _BETWEEN_THOUSANDS.sub("", thousands)
    if len(digits) > _MAX_DIGITS:
        return None
    return float(digits.replace(",", ".")), unit.casefold()
