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
from dataclasses import dataclass, field
from typing import Final, Literal

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
    """Difficulty by the curriculum's bounds on ingredients and steps: 6 and 6, then 12 and 12.

    >>> difficulty_of(6, 6), difficulty_of(7, 3), difficulty_of(5, 13)
    ('easy', 'medium', 'hard')
    """
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


LONGEST_HEADER = 40
"""Longest header line in characters, without decoration."""
_DECORATION = " \t#*_=:"
_INGREDIENT_HEADERS = frozenset({"ingredients", "ingredient list"})
_FORM_HEADERS = frozenset({"instructions", "steps"})
_STEP_HEADERS = _FORM_HEADERS | {"directions", "method", "preparation", "cooking instructions"}
_INLINE_HEADER = re.compile(
    r"\W*(ingredients|instructions|steps|directions|method|preparation)\s*:\W*(?=\w)",
    re.IGNORECASE,
)
_BULLETS: Final = frozenset("-*•·–")
_BULLET = re.compile(r"\s*(?:[-*•·–]\s*)+")  # "--" too: a small model may stutter
_NUMBER = re.compile(r"\s*(?:step\s*)?\d{1,3}\s*[.):](?!\d)\s*", re.IGNORECASE)


@dataclass
class _Reading:
    """Parser state of a text."""

    section: Literal["none", "ingredients", "steps"] = "none"
    ingredients: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    has_ingredients_header: bool = False
    has_instructions_header: bool = False
    bulleted: bool = False

    def header(self, words: str) -> bool:
        """Enter the section that `words` names; False if it names none."""
        if words in _INGREDIENT_HEADERS:
            self.section, self.has_ingredients_header = "ingredients", True
        elif words in _STEP_HEADERS:
            self.section = "steps"
            self.has_instructions_header |= words in _FORM_HEADERS
        else:
            return False
        return True

    def item(self, line: str) -> None:
        """Add a line that is not a header to its section."""
        first = line.lstrip()[:1]
        bullet = _BULLET.match(line) if first in _BULLETS else None
        number = _NUMBER.match(line) if first in "sS" or first.isdigit() else None
        if self.section == "ingredients":
            # A numbered line after bulleted ones is a step whose header is missing.
            if number and self.bulleted and not bullet:
                self.section = "steps"
            else:
                self.bulleted |= bool(bullet)
                _append(self.ingredients, line[bullet.end() :] if bullet else line)
                return
        if self.section == "none" and bullet and not number:
            self.bulleted = True
            _append(self.ingredients, line[bullet.end() :])
        elif self.section == "steps" or number:
            mark = number or bullet
            _append(self.steps, line[mark.end() :] if mark else line)


def _append(items: list[str], text: str) -> None:
    if text.strip():
        items.append(text.strip())


def parse_text(text: str) -> ParsedRecipe:
    """Parse a model's output, however odd; the inverse of `to_text` on well-formed text.

    Headers may be decorated ("## Ingredients", "**Steps:**") or carry their first item on the
    same line. Without headers, bulleted lines are ingredients and numbered lines steps; other
    lines outside a section are ignored.
    """
    reading = _Reading()
    for line in text.splitlines():
        bare = line.strip(_DECORATION).strip()
        # Most lines are long, or begin with a mark or a number, and so are no headers.
        if len(bare) <= LONGEST_HEADER and (not bare or bare[0].isalpha()):
            words = " ".join(bare.casefold().split())
            if not words or reading.header(words):
                continue
        inline = _INLINE_HEADER.match(line) if ":" in line else None
        if inline and reading.header(inline.group(1).casefold()):
            line = line[inline.end() :]  # noqa: PLW2901  # the rest of the line is an item
        reading.item(line)
    return ParsedRecipe(
        ingredients=tuple(reading.ingredients),
        steps=tuple(reading.steps),
        has_ingredients_header=reading.has_ingredients_header,
        has_instructions_header=reading.has_instructions_header,
    )
