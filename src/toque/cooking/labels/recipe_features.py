"""Features of a recipe, shared by all labels: facts of its lines and words of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from toque.cooking.labels.ingredient_facts import LineFacts, line_facts
from toque.cooking.recipe import Recipe
from toque.cooking.text_keys import words_of


@dataclass(frozen=True, slots=True)
class Reading:
    """Input of quality, difficulty and nutrition."""

    recipe: Recipe
    lines: tuple[LineFacts, ...]
    title_words: list[str]
    text: str
    """The steps, joined by blanks, in lower case."""
    step_words: list[list[str]]
    """Words of each step; see `text_keys.words_of`."""
    words: list[str]
    """Words of all steps, in order."""
    different: frozenset[str]
    """The distinct ones."""
    n_tokens: int
    """Whitespace-separated tokens in the steps."""


def read(recipe: Recipe) -> Reading:
    """The features of a recipe.

    >>> reading = read(Recipe("Toast", ("1 slice bread",), ("Toast the bread for 2 minutes.",)))
    >>> reading.words, reading.n_tokens
    (['toast', 'the', 'bread', 'for', 'minutes'], 6)
    """
    step_words = [words_of(step) for step in recipe.steps]
    words = [word for step in step_words for word in step]
    text = " ".join(recipe.steps).lower()
    return Reading(
        recipe=recipe,
        lines=tuple(map(line_facts, recipe.ingredients)),
        title_words=words_of(recipe.title),
        text=text,
        step_words=step_words,
        words=words,
        different=frozenset(words),
        n_tokens=len(text.split()),
    )
