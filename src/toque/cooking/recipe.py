"""Recipes and their text format, which models learn to generate.

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
    """Estimate the difficulty: easy up to 6 ingredients and 6 steps, medium up to 12 of each."""
    if n_ingredients <= 6 and n_steps <= 6:
        return "easy"
    return "medium" if n_ingredients <= 12 and n_steps <= 12 else "hard"


def to_text(recipe: Recipe) -> str:
    r"""Format a recipe as a training target: two lists with headers, without the title.

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
_HEADERS = _INGREDIENT_HEADERS | _STEP_HEADERS
_INLINE_HEADER = re.compile(
    r"\W*(ingredients|instructions|steps|directions|method|preparation)\s*:\W*(?=\w)",
    re.IGNORECASE,
)
# Also "--", because small models repeat characters.
_BULLET = re.compile(r"\s*(?:[-*•·–]\s*)+")
_NUMBER = re.compile(r"\s*(?:step\s*)?\d{1,3}\s*[.):](?!\d)\s*", re.IGNORECASE)


def parse_text(text: str) -> ParsedRecipe:
    """Parse a generated recipe. For well-formed text, it is the inverse of `to_text`.

    Headers may be decorated, and their first item may be on the same line. Without headers, lines
    with bullets are ingredients, and lines with numbers are steps.
    """
    ingredients: list[str] = []
    steps: list[str] = []
    headers: set[str] = set()
    section: list[str] | None = None  # the list below the last header
    has_bullets = False  # true after an ingredient with a bullet
    for line in text.splitlines():
        if not line.strip(_DECORATION).strip():
            continue
        header, rest = _split_header(line)
        if header:
            headers.add(header)
            section = ingredients if header in _INGREDIENT_HEADERS else steps

        bullet, number = _BULLET.match(rest), _NUMBER.match(rest)
        if section is ingredients and number and has_bullets:
            section = steps  # numbers after bullets: the header is missing
        items = section
        if items is None:
            if not (bullet or number):
                continue
            items = ingredients if bullet else steps

        mark = bullet if items is ingredients else number or bullet
        item = (rest[mark.end() :] if mark else rest).strip()
        has_bullets |= items is ingredients and bullet is not None
        if item:
            items.append(item)
    return ParsedRecipe(
        ingredients=tuple(ingredients),
        steps=tuple(steps),
        has_ingredients_header=not headers.isdisjoint(_INGREDIENT_HEADERS),
        has_instructions_header=not headers.isdisjoint(_FORM_HEADERS),
    )


def _split_header(line: str) -> tuple[str, str]:
    """Return the header of a line in lower case, or "", and the rest of the line."""
    if inline := _INLINE_HEADER.match(line):
        return inline[1].casefold(), line[inline.end() :]
    content = line.strip(_DECORATION).strip()
    if len(content) <= LONGEST_HEADER:
        header = " ".join(content.casefold().split())
        if header in _HEADERS:
            return header, ""
    return "", line
