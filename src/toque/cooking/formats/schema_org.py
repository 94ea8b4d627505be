"""schema.org's Recipe as websites write it: graphs, lists, sections, steps and strings.

https://schema.org/Recipe; recipeInstructions may be text, a list of texts, HowToSteps, or
HowToSections of HowToSteps.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 12
KCAL_PER_KJ = 1 / 4.184

_AMOUNT = re.compile(r"(\d+(?:[.,]\d+)?)\s*([a-zA-Zµ]*)")
_TO_GRAMS = {"mg": 1e-3, "milligram": 1e-3, "milligrams": 1e-3, "µg": 1e-6, "mcg": 1e-6}
_NUTRIENTS = {
    "fatContent": "fat_g",
    "saturatedFatContent": "saturated_fat_g",
    "carbohydrateContent": "carbohydrate_g",
    "sugarContent": "sugar_g",
    "fiberContent": "fibre_g",
    "proteinContent": "protein_g",
}


def recipe_nodes(value: Any) -> list[dict[str, Any]]:
    """Every Recipe in a JSON-LD value, a repeated one once.

    Carousels name other recipes by title and address only: those are no recipes of this page.
    A Recipe whose lists are empty is told (once) only when there is no other.
    """
    full: dict[str, dict[str, Any]] = {}
    empty: list[dict[str, Any]] = []
    for node in _recipes(value, 0):
        if is_full(node):
            ingredients = node.get("recipeIngredient") or node.get("ingredients")
            full.setdefault(f"{node.get('name')}\n{ingredients}", node)
        elif "recipeIngredient" in node or "recipeInstructions" in node:
            empty.append(node)
    return list(full.values()) or empty[:1]


def is_full(node: Mapping[str, Any]) -> bool:
    """Whether a Recipe says more than its name."""
    return bool(node.get("recipeIngredient") or node.get("ingredients")) or has_steps(node)


def has_steps(node: Mapping[str, Any]) -> bool:
    """Whether a Recipe says how it is made."""
    return bool(node.get("recipeInstructions") or node.get("instructions") or node.get("steps"))


def is_schema_org(fields: Mapping[str, Any]) -> bool:
    """Whether an object is JSON-LD, or a recipe in schema.org's words without its type."""
    return not fields.keys().isdisjoint(("@type", "@graph", "recipeInstructions"))


def _recipes(value: Any, depth: int) -> Iterator[dict[str, Any]]:
    if depth > MAX_DEPTH:
        return
    if isinstance(value, list):
        for item in value:
            yield from _recipes(item, depth + 1)
    elif isinstance(value, dict):
        kinds = value.get("@type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if any(isinstance(k, str) and k.rpartition("/")[2] == "Recipe" for k in kinds):
            yield value
            return
        if kinds == [None] and "recipeIngredient" in value and has_steps(value):
            yield value
            return
        for item in value.values():
            if isinstance(item, dict | list):
                yield from _recipes(item, depth + 1)


def record_of_node(node: Mapping[str, Any], notes: Counter[str]) -> dict[str, Any]:
    """A Recipe node in the field names of a record."""
    steps = list(_steps(node.get("recipeInstructions") or node.get("instructions"), notes, 0))
    tags = [
        tag
        for name in ("keywords", "recipeCategory", "recipeCuisine")
        for tag in _words(node.get(name))
    ]
    record = {
        "title": _text(node.get("name")) or _text(node.get("headline")),
        "ingredients": list(_texts(node.get("recipeIngredient") or node.get("ingredients"))),
        "directions": steps,
        "tags": tags,
        "servings": _first(node.get("recipeYield")),
        "minutes": _first(node.get("totalTime")),
        "prep_time": _first(node.get("prepTime")),
        "cook_time": _first(node.get("cookTime")),
        "source": _text(node.get("url")),
        "nutrition": nutrition_of(node.get("nutrition")),
    }
    return {name: value for name, value in record.items() if value}


def _steps(value: Any, notes: Counter[str], depth: int) -> Iterator[str]:
    """Texts of steps in order; a section's name stands as a heading before its steps."""
    if depth > MAX_DEPTH:
        return
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _steps(item, notes, depth + 1)
    elif isinstance(value, dict):
        nested = value.get("itemListElement") or value.get("steps")
        kind = value.get("@type")
        if kind == "HowToTip":
            notes["tips beside the steps left out"] += 1
        elif nested and not isinstance(value.get("text"), str):
            heading = _text(value.get("name")).strip().rstrip(":")
            if kind == "HowToSection" and heading:
                yield f"{heading}:"
            yield from _steps(nested, notes, depth + 1)
        else:
            yield next(
                (t for n in ("text", "description", "name") if (t := _text(value.get(n)))), ""
            )


def nutrition_of(value: Any) -> dict[str, float]:
    """kcal, grams and milligrams of a NutritionInformation, whatever units it is written in.

    >>> nutrition_of({"calories": "1000 kJ", "sodiumContent": "0.5 g", "fatContent": "2,5 g"})
    {'energy_kcal': 239.0, 'fat_g': 2.5, 'sodium_mg': 500.0}
    """
    if not isinstance(value, dict):
        return {}
    found: dict[str, float] = {}
    energy = _amount(value.get("calories"))
    if energy is not None:
        number, unit = energy
        found["energy_kcal"] = round(number * (KCAL_PER_KJ if unit == "kj" else 1), 1)
    for name, field in _NUTRIENTS.items():
        if (amount := _amount(value.get(name))) is not None:
            found[field] = round(amount[0] * _TO_GRAMS.get(amount[1], 1), 3)
    sodium = _amount(value.get("sodiumContent"))
    if sodium is not None:
        number, unit = sodium
        found["sodium_mg"] = round(number * (1000 if unit in ("g", "gram", "grams") else 1), 3)
    return found


def _amount(value: Any) -> tuple[float, str] | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (float(value), "") if 0 <= value < 1e9 else None
    match = _AMOUNT.search(value) if isinstance(value, str) else None
    if match is None or len(match[1]) > 9:
        return None
    return float(match[1].replace(",", ".")), match[2].casefold()


def _text(value: Any) -> str:
    value = _first(value)
    return value if isinstance(value, str) else ""


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _texts(value: Any) -> Iterator[str]:
    """Strings of a list, or the lines of one string."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, str):
                yield item
            elif isinstance(item, list):
                yield from _texts(item[:1])
            elif isinstance(item, dict):
                yield _text(item.get("text")) or _text(item.get("name"))


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    if isinstance(value, list):
        return [word for item in value for word in _words(item)]
    return []
