"""schema.org Recipe nodes as websites write them: graphs, lists, sections, steps and strings.

https://schema.org/Recipe; recipeInstructions may be text, a list of texts, HowToSteps, or
HowToSections of HowToSteps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from toque.cooking.schemas.list_fields import all_lines, text_of, words_in

MAX_DEPTH = 12


def recipe_nodes(value: Any) -> list[dict[str, Any]]:
    """The distinct Recipe nodes in a JSON-LD value.

    Carousels list other recipes by title and address only; these are ignored. A Recipe with empty
    lists is returned (once) only if there is no other.
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
    """True if a Recipe has more than its name."""
    return bool(node.get("recipeIngredient") or node.get("ingredients")) or has_steps(node)


def has_steps(node: Mapping[str, Any]) -> bool:
    """True if a Recipe has instructions."""
    return bool(node.get("recipeInstructions") or node.get("instructions") or node.get("steps"))


def is_schema_org(fields: Mapping[str, Any]) -> bool:
    """True if an object is JSON-LD, or a recipe in schema.org's terms without a type."""
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
    """A Recipe node in our field names."""
    steps = list(_steps(node.get("recipeInstructions") or node.get("instructions"), notes, 0))
    kinds = [node.get(name) for name in ("keywords", "recipeCategory", "recipeCuisine")]
    record = {
        "title": text_of(node.get("name")) or text_of(node.get("headline")),
        "ingredients": all_lines(node.get("recipeIngredient") or node.get("ingredients")),
        "directions": steps,
        "tags": words_in(kinds),
        "servings": _first(node.get("recipeYield")),
        "minutes": _first(node.get("totalTime")),
        "prep_time": _first(node.get("prepTime")),
        "cook_time": _first(node.get("cookTime")),
        "source": text_of(node.get("url")),
        "nutrition": node.get("nutrition"),
    }
    return {name: value for name, value in record.items() if value}


def _steps(value: Any, notes: Counter[str], depth: int) -> Iterator[str]:
    """Texts of steps in order; a section's name is a heading before its steps."""
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
            heading = text_of(value.get("name")).strip().rstrip(":")
            if kind == "HowToSection" and heading:
                yield f"{heading}:"
            yield from _steps(nested, notes, depth + 1)
        else:
            yield next(
                (t for n in ("text", "description", "name") if (t := text_of(value.get(n)))), ""
            )


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value
