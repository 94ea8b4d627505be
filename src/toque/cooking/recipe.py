"""Recipes and their text format, which models are trained to write.

Ingredients:
- 2 large eggs
- 1 tablespoon butter

Instructions:
1. Whisk the eggs.
2. Melt the butter in a skillet, pour in the eggs and stir until just set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Difficulty = Literal["easy", "medium", "hard"]
NutritionClass = Literal["Healthy", "Moderate", "Indulgent"]

DIFFICULTIES: tuple[Difficulty, ...] = ("easy", "medium", "hard")
NUTRITION_CLASSES: tuple[NutritionClass, ...] = ("Healthy", "Moderate", "Indulgent")


@dataclass(frozen=True)
class Recipe:
    """Recipe of a dish. `ingredients` are lines of text. `steps` have no numbers."""

    title: str
    ingredients: tuple[str, ...]
    steps: tuple[str, ...]
    tags: tuple[str, ...] = ()
    servings: int | None = None
    minutes: int | None = None
    source: str = ""
    nutrition: Mapping[str, float] | None = None
    """Nutrients per serving: energy_kcal, fat_g, sugar_g, salt_g, protein_g, sodium_mg."""
    difficulty: Difficulty | None = None
    nutrition_class: NutritionClass | None = None


@dataclass(frozen=True)
class ParsedRecipe:
    """Recipe parsed from text. Missing parts are empty."""

    ingredients: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    has_ingredients_header: bool = False
    has_instructions_header: bool = False
    """True for the header "Instructions" or "Steps". Other headers such as "Method" are parsed, but
    are not the requested format."""


def difficulty_of(n_ingredients: int, n_steps: int) -> Difficulty:
    """Estimate the difficulty: easy up to 6 ingredients and steps, medium up to 12."""
    if n_ingredients <= 6 and n_steps <= 6:
        return "easy"
    return "medium" if n_ingredients <= 12 and n_steps <= 12 else "hard"


def to_text(recipe: Recipe) -> str:
    r"""Format a recipe as the target of training: two lists with headers, without the title.

    >>> to_text(Recipe("Toast", ("1 slice bread",), ("Toast the bread.",)))
    'Ingredients:\n- 1 slice bread\n\nInstructions:\n1. Toast the bread.'
    """
    ingredients = "\n".join(f"- {line}" for line in recipe.ingredients)
    steps = "\n".join(f"{n}. {step}" for n, step in enumerate(recipe.steps, start=1))
    return f"Ingredients:\n{ingredients}\n\nInstructions:\n{steps}"


LONGEST_HEADER = 40
"""Maximum length of a header in characters, without decoration."""
_DECORATION = " \t#*_=:"
_INGREDIENT_HEADERS = frozenset({"ingredients", "ingredient list"})
_FORM_HEADERS = frozenset({"instructions", "steps"})
_STEP_HEADERS = _FORM_HEADERS | {
    "directions",
    "method",
    "preparation",
    "cooking instructions",
}
_INLINE_HEADER = re.compile(
    r"\W*(ingredients|instructions|steps|directions|method|preparation)\s*:\W*(?=\w)",
    re.IGNORECASE,
)
# Also "--", because small models repeat characters.
_BULLET = re.compile(r"\s*(?:[-*•·–]\s*)+")
_NUMBER = re.compile(r"\s*(?:step\s*)?\d{1,3}\s*[.):](?!\d)\s*", re.IGNORECASE)


def parse_text(text: str) -> ParsedRecipe:
    """Parse the output of a model. For well-formed text, it is the inverse of `to_text`.

    Headers may be decorated, and their first item may be on the same line. Without headers, lines
    with bullets are ingredients, and lines with numbers are steps.
    """
    ingredients: list[str] = []
    steps: list[str] = []
    headers: set[str] = set()
    section: list[str] | None = None
    has_bullets = False
    for full_line in text.splitlines():
        content = full_line.strip(_DECORATION).strip()
        if not content:
            continue
        line = full_line
        header = (
            " ".join(content.casefold().split())
            if len(content) <= LONGEST_HEADER
            else ""
        )
        first_item = ""
        if inline := _INLINE_HEADER.match(line):
            header = inline[1].casefold()
            first_item = line[inline.end() :]
        if header in _INGREDIENT_HEADERS or header in _STEP_HEADERS:
            headers.add(header)
            section = ingredients if header in _INGREDIENT_HEADERS else steps
            line = first_item

        bullet, number = _BULLET.match(line), _NUMBER.match(line)
        if section is ingredients and number and has_bullets:
            section = steps  # numbers after bullets: the header is missing
        items = section
        if items is None:
            items = ingredients if bullet else steps if number else None
        if items is None:
            continue
        mark = bullet if items is ingredients else number or bullet
        item = (line[mark.end() :] if mark else line).strip()
        has_bullets |= items is ingredients and bullet is not None
        if item:
            items.append(item)
    return ParsedRecipe(
        ingredients=tuple(ingredients),
        steps=tuple(steps),
        has_ingredients_header=not headers.isdisjoint(_INGREDIENT_HEADERS),
        has_instructions_header=not headers.isdisjoint(_FORM_HEADERS),
    )
