"""Recipes and their plain-text form, which the models read and write.

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
    """One dish. `ingredients` are lines as written; `steps` are not numbered."""

    title: str
    ingredients: tuple[str, ...]
    steps: tuple[str, ...]
    tags: tuple[str, ...] = ()
    servings: int | None = None
    minutes: int | None = None
    source: str = ""
    nutrition: Mapping[str, float] | None = None
    """Known nutrients per serving: energy_kcal, fat_g, sugar_g, salt_g, protein_g, sodium_mg."""
    difficulty: Difficulty | None = None
    nutrition_class: NutritionClass | None = None


@dataclass(frozen=True)
class ParsedRecipe:
    """Result of `parse_text`; empty tuples and False for missing parts."""

    ingredients: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    has_ingredients_header: bool = False
    has_instructions_header: bool = False
    """True if a line reads "Instructions" or "Steps"; a "Directions" or "Method" section is
    parsed as well but is not the requested form."""


def difficulty_of(n_ingredients: int, n_steps: int) -> Difficulty:
    """Difficulty by the curriculum's bounds on ingredients and steps: 6 and 6, then 12 and 12."""
    if n_ingredients <= 6 and n_steps <= 6:
        return "easy"
    return "medium" if n_ingredients <= 12 and n_steps <= 12 else "hard"


def to_text(recipe: Recipe) -> str:
    r"""The text a model learns to write: two headed lists, without the title.

    >>> to_text(Recipe("Toast", ("1 slice bread",), ("Toast the bread.",)))
    'Ingredients:\n- 1 slice bread\n\nInstructions:\n1. Toast the bread.'
    """
    ingredients = "\n".join(f"- {line}" for line in recipe.ingredients)
    steps = "\n".join(f"{n}. {step}" for n, step in enumerate(recipe.steps, start=1))
    return f"Ingredients:\n{ingredients}\n\nInstructions:\n{steps}"


LONGEST_HEADER = 40  # longest header line in characters, without decoration
_DECORATION = " \t#*_=:"
_INGREDIENT_HEADERS = frozenset({"ingredients", "ingredient list"})
_FORM_HEADERS = frozenset({"instructions", "steps"})
_STEP_HEADERS = _FORM_HEADERS | {"directions", "method", "preparation", "cooking instructions"}
_INLINE_HEADER = re.compile(
    r"\W*(ingredients|instructions|steps|directions|method|preparation)\s*:\W*(?=\w)", re.IGNORECASE
)
_BULLET = re.compile(r"\s*(?:[-*•·–]\s*)+")  # "--" too: a small model may stutter
_NUMBER = re.compile(r"\s*(?:step\s*)?\d{1,3}\s*[.):](?!\d)\s*", re.IGNORECASE)


def parse_text(text: str) -> ParsedRecipe:
    """Parse a model's output, however odd; the inverse of `to_text` on well-formed text.

    Headers may be decorated or carry their first item. Without headers, bulleted lines are
    ingredients and numbered ones steps.
    """
    ingredients: list[str] = []
    steps: list[str] = []
    headers: set[str] = set()
    items: list[str] | None = None
    bulleted = False
    for line in text.splitlines():
        bare = line.strip(_DECORATION).strip()
        header = " ".join(bare.casefold().split()) if len(bare) <= LONGEST_HEADER else ""
        rest = ""
        if inline := _INLINE_HEADER.match(line):
            header, rest = inline[1].casefold(), line[inline.end() :]
        if header in _INGREDIENT_HEADERS or header in _STEP_HEADERS:
            headers.add(header)
            items, line = ingredients if header in _INGREDIENT_HEADERS else steps, rest  # noqa: PLW2901
        bullet, number = _BULLET.match(line), _NUMBER.match(line)
        if items is ingredients and number and bulleted:
            items = steps  # a numbered line after bulleted ones: the header is missing
        unheaded = ingredients if bullet else steps if number else None
        into = items if items is not None else unheaded
        mark = bullet if into is ingredients else number or bullet
        item = (line[mark.end() :] if mark else line).strip()
        if bare and into is not None:
            bulleted |= into is ingredients and bullet is not None
            into += [item] if item else []
    return ParsedRecipe(
        ingredients=tuple(ingredients),
        steps=tuple(steps),
        has_ingredients_header=not headers.isdisjoint(_INGREDIENT_HEADERS),
        has_instructions_header=not headers.isdisjoint(_FORM_HEADERS),
    )
