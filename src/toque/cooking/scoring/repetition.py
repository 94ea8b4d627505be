"""Repetition in a generated recipe: a text that says the same again and again is no recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from toque.cooking.ingredients.names import ingredient_name
from toque.cooking.recipe import ParsedRecipe
from toque.cooking.text_keys import words_of

FREE_SHARE: Final = 0.3
"""Share that may repeat: salt and butter stand twice in a cake with its frosting."""
RUN_WORDS: Final = 4
"""Words of a sequence, as in the metric `repetition`."""


def variety(recipe: ParsedRecipe) -> float:
    """The least share of different ingredients, of different steps and of different sequences.

    1 as long as at most `FREE_SHARE` repeats, then in proportion to what does not.

    >>> variety(ParsedRecipe(("1 egg",) * 10, ("Boil it.",)))
    0.14285714285714288
    """
    words = [word for text in (*recipe.ingredients, *recipe.steps) for word in words_of(text)]
    runs = list(zip(*(words[at:] for at in range(RUN_WORDS)), strict=False))
    shares = (
        _share_different([ingredient_name(line).casefold() for line in recipe.ingredients]),
        _share_different([" ".join(words_of(step)) for step in recipe.steps]),
        _share_different(runs),
    )
    return min(1.0, min(shares) / (1.0 - FREE_SHARE))


def _share_different(items: Sequence[object]) -> float:
    return len(set(items)) / len(items) if items else 1.0
