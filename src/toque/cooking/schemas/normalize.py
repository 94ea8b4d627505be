"""Normalisation: a record in our field names to a cleaned `Recipe`, or the reason for dropping it.

`fields` maps every schema to these: title; ingredients and directions, lists of lines; and, if
known, tags, servings, minutes, prep_time, cook_time, source, difficulty, nutrition_class, and
nutrients (see `nutrients`), directly or in "nutrition". A bad record is dropped for one of
`REASONS` or its reader's; never an error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args

from toque.cooking.action_verbs import has_action_verb
from toque.cooking.ingredients.parser import MAX_CHARS
from toque.cooking.labels.nutrients import nutrients_of
from toque.cooking.recipe import DIFFICULTIES, NUTRITION_CLASSES, Recipe
from toque.cooking.schemas.cleaning import (
    clean_ingredients,
    clean_steps,
    clean_text,
    clean_title,
    is_plain,
)
from toque.cooking.schemas.credits import without_credits
from toque.cooking.schemas.repairs import without_misprints
from toque.cooking.schemas.sections import without_sections
from toque.cooking.scoring.form import MIN_CHARS

Reason = Literal["no title", "no ingredients", "no steps", "too short"]
REASONS: tuple[Reason, ...] = get_args(Reason)

MIN_STEP_CHARS = 20
"""Fewest characters in all steps, unless they tell how; less teaches nothing ("Mix.")."""
MIN_STEP_WORDS = 3
"""Fewest words of steps that are shorter and yet tell how: "Mix and bake." is all a cook needs."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_ISO_TIME = re.compile(r"P(?:(\d{1,9})D)?T?(?:(\d{1,9})H)?(?:(\d{1,9})M)?(?:\d+S)?", re.IGNORECASE)
_HOURS = re.compile(r"((?<!\d)\d++(?:\.\d++)?+)\s*+h", re.IGNORECASE)
_MINUTE = re.compile(r"((?<!\d)\d++(?:\.\d++)?+)\s*+m", re.IGNORECASE)
_MOST_MINUTES = 1e9
"""A longer time is no time; the same bound as for every other number of a record."""
_FRAME_CHARS = 29
"""Characters of the headers in a recipe's text; see `recipe.to_text`."""
_T = TypeVar("_T", bound=str)


def recipe_of(record: Mapping[str, Any], notes: Counter[str]) -> Recipe | Reason:
    """The cleaned recipe of a record, or the reason for dropping it; `notes` counts repairs."""
    title = record.get("title")
    title = title if isinstance(title, str) else ""
    lines, steps = _texts(record.get("ingredients")), _texts(record.get("directions"))
    plain = is_plain((title, *lines, *steps))
    title = title.strip() if plain else clean_title(title, notes)
    title = without_misprints([title], notes)[0]
    if not (title.isalnum() or any(map(str.isalnum, title))):
        return "no title"
    ingredients = without_sections(clean_ingredients(lines, notes, plain=plain), notes)
    directions = without_credits(clean_steps(steps, notes, plain=plain), notes)
    if not ingredients:
        return "no ingredients"
    notes[f"ingredient lines over {MAX_CHARS:,} characters, only their beginning parsed"] += sum(
        len(line) > MAX_CHARS for line in ingredients
    )
    if not directions:
        return "no steps"
    n_step_chars = sum(map(len, directions))
    n_chars = n_step_chars + sum(map(len, ingredients))
    n_chars += 3 * (len(directions) + len(ingredients)) + _FRAME_CHARS
    if n_chars < MIN_CHARS or (n_step_chars < MIN_STEP_CHARS and not _tells_how(directions)):
        return "too short"
    source, tags, nutrition = map(record.get, ("source", "tags", "nutrition"))
    return Recipe(
        title=title,
        ingredients=ingredients,
        steps=directions,
        tags=_tags(tags, notes) if tags else (),
        servings=_whole(record.get("servings")),
        minutes=_minutes(record),
        source=source if isinstance(source, str) else "",
        nutrition=nutrients_of(nutrition if isinstance(nutrition, dict) else record) or None,
        difficulty=_label(record.get("difficulty"), DIFFICULTIES),
        nutrition_class=_label(record.get("nutrition_class"), NUTRITION_CLASSES),
    )


def _tells_how(steps: tuple[str, ...]) -> bool:
    """Whether steps that are few characters say what to do, with a cooking verb.

    >>> _tells_how(("Mix; bake 20 min.",)), _tells_how(("Mix.",)), _tells_how(("Ice // rocks",))
    (True, False, False)
    """
    words = " ".join(steps).split()
    return len(words) >= MIN_STEP_WORDS and any(map(has_action_verb, steps))


def _texts(value: Any) -> list[str]:
    """The texts of a list, or of a single text."""
    if isinstance(value, str):
        return [value]
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _tags(value: Any, notes: Counter[str]) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else _texts(value)
    return tuple(tag for item in items if (tag := clean_text(item, notes)))


def _number(value: Any) -> float | None:
    """A finite number, or the first number of a text ("4 servings", "143 kcal")."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e9 else None  # also false for NaN
    match = _NUMBER.search(value) if isinstance(value, str) else None
    return float(match.group()) if match and len(match.group()) < 10 else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return round(number) if number is not None and number >= 1 else None


def _minutes(record: Mapping[str, Any]) -> int | None:
    total = _duration(record.get("minutes"))
    if total is None:
        prep, cook = _duration(record.get("prep_time")), _duration(record.get("cook_time"))
        total = (prep or 0) + (cook or 0) or None
    return total


def _duration(value: Any) -> int | None:
    """Minutes of a number, "1 hour 20 min" or ISO 8601 "PT1H20M"."""
    if not isinstance(value, str):
        return _whole(value)
    if value.upper().startswith("P") and (iso := _ISO_TIME.fullmatch(value.strip())):
        days, hours, minutes = (int(group or 0) for group in iso.groups())
        return 1440 * days + 60 * hours + minutes or None
    hour, minute = _HOURS.search(value), _MINUTE.search(value)
    if hour or minute:
        whole = 60 * float(hour[1] if hour else 0) + float(minute[1] if minute else 0)
        return round(whole) or None if whole < _MOST_MINUTES else None
    return _whole(value)


def _label(value: Any, allowed: tuple[_T, ...]) -> _T | None:
    if not isinstance(value, str):
        return None
    folded = value.casefold()
    return next((label for label in allowed if label.casefold() == folded), None)
