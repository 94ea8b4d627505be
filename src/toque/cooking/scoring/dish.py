"""Dish scores of a generated recipe: whether title, ingredients and steps are of one dish.

Foods are words of the food table. Each score is a share in [0, 1], None where nothing applies.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from toque.cooking.ingredients.names import ingredient_name, stem
from toque.cooking.labels.foods import find_food
from toque.cooking.recipe import ParsedRecipe
from toque.cooking.text_keys import words_of

_PARTING: Final = re.compile(r"\b(?:with|and|in|on|over|of|for|from)\b|[&,:;(/-]", re.IGNORECASE)
_NAMES_DISHES: Final = frozenset(
    """
    berry biscuit bread bun burger butter cake candy caramel cereal cheese chili chip chutney coffee
    cookie corn cracker cream cup curry custard dip dog dressing drink egg finger fruit gravy green
    guacamole herb hot hummus ice icing jam jelly juice kimchi lasagna leaf loaf marinade milk mock
    mole noodle nut pastry pesto pie pizza pot pound punch relish rib roll salad salsa sauce savory
    sherbet soup spaghetti spice spread steak stew sweet tea toast tortilla vegetable vinaigrette
    water wing
    """.split()  # noqa: SIM905
)
"""Words of the table that often name a dish, or a kind, instead of a food: "coffee cake"."""
STAPLES: Final = frozenset(
    """
    broth butter flour garlic herb ice juice liquid oil onion pepper salt sauce spice stock sugar
    vegetable water wine
    """.split()  # noqa: SIM905
)
"""Words of foods that steps may use unlisted, or that name what they made of others."""


def title_kept(title: str, recipe: ParsedRecipe) -> float | None:
    """Share of the foods before the title's last word that are listed or used; None without any.

    The last word names the dish ("blueberry muffins"), and what follows "with" names its foods.

    >>> title_kept("Blueberry Muffins", ParsedRecipe(("2 cups flour",), ("Bake the flour.",)))
    0.0
    """
    wanted = foods_of_title(title)
    if not wanted:
        return None
    there = _listed(recipe) | {stem(word) for step in recipe.steps for word in words_of(step)}
    return len(wanted & there) / len(wanted)


@lru_cache(maxsize=1 << 14)
def foods_of_title(title: str) -> frozenset[str]:
    """Words of foods that a dish of this title holds.

    >>> sorted(foods_of_title("Lemon Pasta with Roasted Garlic and Peas")), foods_of_title("Bread")
    (['garlic', 'lemon', 'pea'], frozenset())
    """
    first, *others = (words_of(part) for part in _PARTING.split(title))
    named = {stem(word) for word in (*first[:-1], *(word for part in others for word in part))}
    return frozenset(word for word in named - _NAMES_DISHES if _is_food(word))


def steps_listed(recipe: ParsedRecipe) -> float | None:
    """Share of the foods in the steps that are listed; None if the steps name none.

    >>> recipe = ParsedRecipe(("2 cups flour", "1 egg"), ("Mix the egg with the blueberries.",))
    >>> steps_listed(recipe)
    0.5
    """
    listed = _listed(recipe)
    named = {stem(word) for step in recipe.steps for word in words_of(step)}
    foods = {word for word in named if word in listed or _is_unlisted_food(word)}
    return len(foods & listed) / len(foods) if foods else None


def _listed(recipe: ParsedRecipe) -> set[str]:
    """Words of the listed ingredients, and of all that their foods are called."""
    listed: set[str] = set()
    for line in recipe.ingredients:
        listed.update(map(stem, words_of(line)))
        food = find_food(ingredient_name(line))
        if food is not None:  # "spaghetti" is listed for "drain the pasta"
            listed.update(stem(word) for name in food.names for word in words_of(name))
    return listed


def _is_unlisted_food(word: str) -> bool:
    return word not in STAPLES and word not in _NAMES_DISHES and _is_food(word)


@lru_cache(maxsize=1 << 15)
def _is_food(word: str) -> bool:
    """Whether a single word is a name in the food table."""
    return len(word) > 2 and find_food(word) is not None
