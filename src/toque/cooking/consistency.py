"""Consistency scores of a generated recipe: with its prompt, with its title, and within itself.

Every score is in [0, 1]; 1 is best, except for `hallucinated_ingredients`, where 0 is. A score that
does not apply to a text (no quantity in it, no ingredient requested) is None. Foods are words of
the food table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from toque.cooking.ingredients.names import forms_in_line, head_of_line, ingredient_name, stem
from toque.cooking.ingredients.parser import parse_line
from toque.cooking.ingredients.vocabulary import UNITS
from toque.cooking.labels.foods import find_food
from toque.cooking.recipe import ParsedRecipe
from toque.cooking.text_keys import words_of

STAPLES: Final = frozenset({"water", "salt", "pepper"})
"""Head nouns that never count as hallucinated."""

MOST: Final[dict[str, float]] = {
    "mass": 10_000.0,  # grams
    "volume": 10_000.0,  # millilitres
    "length": 100.0,  # centimetres
    "count": 100.0,
}
"""Largest plausible amounts of one ingredient; chosen by hand."""
MOST_OF_A_SPOON: Final = 24.0
"""Largest plausible number of tea- or tablespoons."""
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
MINUTES: Final = (0.0, 3 * 24 * 60.0)
"""Plausible temperatures and times in steps."""

# A line without a number of two digits, a lone zero or the name of a large number is plausible,
# unless it names something strong: every other bound above is over nine.
_MAY_BE_MANY: Final = re.compile(
    r"\d\d|(?<![\d.,/])0(?![\d.,/])|\bhundred|\bthousand|\bmillion|\bdozen", re.IGNORECASE
)
_MEASURE: Final = re.compile(
    r"(\d(?<!\d\d)\d*+(?:\.\d++)?+)\s*+(°|degrees?\b|minutes?\b|mins?\b|hours?\b|hrs?\b)",
    re.IGNORECASE,
)
_COLLECTIVE: Final = re.compile(
    r"\b(?:all|remaining|other|rest of|dry|wet)\b(?: \w+){0,2} ingredients\b|\beverything\b"
    r"|\bingredients (?:in|into|together)\b"
)
_NUMBERED: Final = re.compile(r"\n[^\S\n]*+(\d{1,3})[.)](?=\s)")
_ENDED: Final = (".", "!", "?", ")", '"', "'", "”", "…")  # fmt: skip


def ingredient_coverage(ingredients: Sequence[str], text: str) -> float:
    """Share of the requested ingredients whose head noun occurs in the text, singular or plural.

    Args:
        ingredients: names or whole ingredient lines, as in the prompt.
        text: the model's output.

    Returns:
        1.0 if none was requested.
    """
    n_missed = len(missed_ingredients(ingredients, text))
    return (len(ingredients) - n_missed) / len(ingredients) if ingredients else 1.0


def missed_ingredients(ingredients: Sequence[str], text: str) -> list[str]:
    """The requested ingredients whose head noun does not occur in the text.

    >>> missed_ingredients(["red lentils", "a carrot"], "Peel the carrots.")
    ['red lentils']
    """
    words = set(words_of(text))
    return [line for line in ingredients if forms_in_line(line).isdisjoint(words)]


def hallucinated_ingredients(asked: Sequence[str], recipe: ParsedRecipe) -> float | None:
    """Share of the listed ingredients that were not requested; None if none is listed.

    An ingredient was requested if its head noun, singular or plural, is a word of a requested name.
    Water, salt and pepper always count as requested.
    """
    if not recipe.ingredients:
        return None
    known = STAPLES | {stem(word) for name in asked for word in words_of(name)}
    lines = recipe.ingredients
    return sum(head_of_line(line) not in known for line in lines) / len(lines)


def ingredients_used(recipe: ParsedRecipe) -> float | None:
    """Share of the listed ingredients that a step mentions; None if none is listed.

    A step with "all ingredients" or "everything" mentions each.
    """
    if not recipe.ingredients:
        return None
    text = " ".join(recipe.steps)
    if _COLLECTIVE.search(text.lower()):
        return 1.0
    return ingredient_coverage(recipe.ingredients, text)


def quantity_sanity(recipe: ParsedRecipe) -> float | None:
    """Share of plausible amounts, temperatures and times; None without any.

    >>> quantity_sanity(ParsedRecipe(("2 eggs", "900 cups flour"), ("Bake at 350 degrees.",)))
    0.6666666666666666
    """
    sane = [_is_sane(line) for line in recipe.ingredients]
    for step in recipe.steps:
        for number, unit in _MEASURE.findall(step):
            sane.append(_fits(float(number), unit.lower()))
    return sum(sane) / len(sane) if sane else None


@lru_cache(maxsize=1 << 16)
def _is_sane(line: str) -> bool:
    strong = _STRONG.search(line) is not None
    if not (strong or _MAY_BE_MANY.search(line)):
        return True
    for amount in parse_line(line).amounts:
        if amount.quantity is None:
            continue
        high, unit = amount.quantity[1], UNITS.get(amount.unit or "")
        if high <= 0.0:
            return False
        if unit is None or unit.kind == "count":
            most, size = MOST["count"], 1.0
        else:
            most, size = MOST[unit.kind], unit.size
        if unit is not None and unit.name in {"teaspoon", "tablespoon"}:
            most, size = MOST_OF_A_SPOON, 1.0
        if strong and unit is not None and unit.kind == "volume":
            most, size = MOST_OF_A_STRONG_ONE, unit.size
        if high * size > most:
            return False
    return True


def _fits(number: float, unit: str) -> bool:
    if unit.startswith(("°", "d")):
        return DEGREES[0] <= number <= DEGREES[1]
    minutes = number * (60.0 if unit.startswith("h") else 1.0)
    return MINUTES[0] < minutes <= MINUTES[1]


def structure_score(text: str, recipe: ParsedRecipe) -> float:
    r"""Share of six things a well-formed recipe has; see the comments.

    >>> structure_score("Ingredients:\n- 1 egg\n", ParsedRecipe(("1 egg",), (), True))
    0.0
    """
    if not recipe.ingredients or not recipe.steps:
        return 0.0
    numbers = [int(n) for n in _NUMBERED.findall("\n" + text)]
    folded = text.lower()
    lines = "\n".join((*recipe.ingredients, *recipe.steps)).lower().split("\n")
    held = (
        0 <= folded.find("ingredients") < max(folded.rfind("instructions"), folded.rfind("steps")),
        len(recipe.ingredients) > 1,
        len(recipe.steps) > 1,
        numbers == list(range(1, len(recipe.steps) + 1)),  # numbered from 1, none left out
        len(set(lines)) == len(lines),  # no repetition
        text.rstrip().endswith(_ENDED),  # not cut off
    )
    return sum(held) / len(held)


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
UNLISTED: Final = frozenset(
    """
    broth butter flour garlic herb ice juice liquid oil onion pepper salt sauce spice stock sugar
    vegetable water wine
    """.split()  # noqa: SIM905
)
"""Foods that steps may use without listing them, and words for what they make of others."""


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
    """Words of the listed ingredients, and of every name of their foods."""
    listed: set[str] = set()
    for line in recipe.ingredients:
        listed.update(map(stem, words_of(line)))
        food = find_food(ingredient_name(line))
        if food is not None:  # "spaghetti" is listed for "drain the pasta"
            listed.update(stem(word) for name in food.names for word in words_of(name))
    return listed


def _is_unlisted_food(word: str) -> bool:
    return word not in UNLISTED and word not in _NAMES_DISHES and _is_food(word)


@lru_cache(maxsize=1 << 15)
def _is_food(word: str) -> bool:
    """True if a single word is a name in the food table."""
    return len(word) > 2 and find_food(word) is not None
