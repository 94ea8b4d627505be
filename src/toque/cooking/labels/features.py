"""Features of a recipe for all labels: facts about its lines, and the words of its steps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from toque.cooking.ingredients.amounts import IngredientLine
from toque.cooking.ingredients.names import ingredient_name, is_clean_name, stem
from toque.cooking.ingredients.parser import parse_line
from toque.cooking.labels.foods import NUTRIENTS, Food, find_food, grams_of, is_food
from toque.cooking.normalised_words import words_of
from toque.cooking.recipe import Recipe

Nutrients = tuple[float, ...]  # values in the order of `foods.NUTRIENTS`

_FAT = NUTRIENTS.index("fat_g")
_SODIUM = NUTRIENTS.index("sodium_mg")
_PURE_FAT = 95.0
"""Minimum grams of fat per 100 g of an oil or fat."""
_PURE_SALT = 30_000.0
"""Minimum milligrams of sodium per 100 g of a salt."""
_FRYING_FAT_G = 180.0
"""Grams of fat above which the fat is for frying."""
_BRINE_SALT_G = 50.0
"""Grams of salt above which the salt is for a brine or a crust."""
TAKEN_UP = 0.1
"""Fraction of frying fat, and of salt in a brine or crust, that is eaten. A guess."""

_NEEDS_NO_AMOUNT = re.compile(
    r"\bto (?:taste|serve|garnish|decorate|season|finish)\b|\bas (?:needed|required|desired)\b"
    r"|\bfor \w+ing\b|\bfor (?:the )?(?:pan|garnish|deep|serving)|optional|\bsalt\b|\bpepper\b"
    r"|\bcooking spray\b|\boil spray\b|\bwater\b",
    re.IGNORECASE,
)


class LineFacts(NamedTuple):
    """Features of one ingredient line."""

    line: IngredientLine
    name: str  # name of the food in a prompt, see `ingredient_name`
    has_clean_name: bool  # False if prompts omit the name
    # The food in the table, or None for an unknown food, a skewer or foil.
    food: Food | None
    is_food: bool
    is_named: bool  # True if the name, including a skewer, is in the table
    has_amount: bool  # True also if the line needs no amount ("salt to taste")
    # Stems of the line's words and its food's last word, to match steps.
    stems: frozenset[str]
    words: str  # the line's words, joined. Lines with the same words are duplicates.
    grams: float  # grams eaten; 0.0 if the line gives no amount or the food is unknown
    nutrients: Nutrients  # nutrients of `grams` of the food
    is_frying_fat: bool  # True if the line has enough fat for frying, see `TAKEN_UP`
    usual: Nutrients  # nutrients of the food's usual weight per serving, or () without a food


@lru_cache(maxsize=1 << 16)
def line_facts(text: str) -> LineFacts:
    """Return the features of an ingredient line."""
    line = parse_line(text)
    named = find_food(line.name)
    food = named if is_food(line.name) else None
    grams, is_frying_fat = 0.0, False
    if food is not None:
        grams, is_frying_fat = _eaten_grams(line, food)

    stems = {stem(word) for word in words_of(line.name)}
    if named is not None:  # the step "cook the pasta" uses "spaghetti"
        stems.add(stem(named.name.rpartition(" ")[2]))
    name = ingredient_name(text)

    return LineFacts(
        line=line,
        name=name,
        has_clean_name=is_clean_name(name),
        food=food,
        is_food=is_food(line.name),
        is_named=named is not None,
        has_amount=bool(line.amounts) or _NEEDS_NO_AMOUNT.search(text) is not None,
        stems=frozenset(stems),
        words=" ".join(words_of(text)),
        grams=grams,
        nutrients=nutrients_in(food, grams) if food is not None else (),
        is_frying_fat=is_frying_fat,
        usual=nutrients_in(named, named.serving_g) if named is not None else (),
    )


def _eaten_grams(line: IngredientLine, food: Food) -> tuple[float, bool]:
    """Return the eaten grams of a food. Also return whether it may be fat for frying.

    If a line with much fat does not mention frying, only the steps show whether it is for frying.
    """
    grams = grams_of(line, food) or 0.0
    is_much_fat = food.per_100_g[_FAT] >= _PURE_FAT and grams > _FRYING_FAT_G
    is_brine = food.per_100_g[_SODIUM] >= _PURE_SALT and grams > _BRINE_SALT_G
    if is_much_fat and "fry" not in line.purpose:
        return grams, True
    if is_much_fat or is_brine:
        grams *= TAKEN_UP
    return grams, False


def nutrients_in(food: Food, grams: float) -> Nutrients:
    """Return the nutrients of `grams` of a food."""
    share = grams / 100.0
    return tuple(share * figure for figure in food.per_100_g)


@dataclass(frozen=True, slots=True)
class Reading:
    """Features of a recipe, the input for quality, difficulty and nutrition labels."""

    recipe: Recipe
    lines: tuple[LineFacts, ...]
    text: str  # the steps in lower case, joined by spaces
    step_words: list[list[str]]  # words per step, see `normalised_words.words_of`
    words: list[str]  # words of all steps, in order
    distinct_words: frozenset[str]  # distinct words of all steps
    n_tokens: int  # whitespace-separated tokens in the steps


def read_features(recipe: Recipe) -> Reading:
    """Return the features of a recipe."""
    step_words = [words_of(step) for step in recipe.steps]
    words = [word for step in step_words for word in step]
    text = " ".join(recipe.steps).lower()
    lines = tuple(map(line_facts, recipe.ingredients))
    return Reading(
        recipe, lines, text, step_words, words, frozenset(words), len(text.split())
    )
