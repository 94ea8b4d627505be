"""Form scores of a generated recipe: four rules, their mean, and ingredient coverage.

Definitions (each score in [0, 1]; a recipe without any ingredient or step scores 0 there):

* ingredient_coherence: well-formatted ingredient lines / all. Well formatted means an item of
  the ingredient section that holds a quantity (number, fraction or words) and names something.
* instruction_quality: steps with a cooking verb / all steps.
* completeness: 0.33 for an ingredient section, 0.33 for an instruction section, 0.34 for a
  length of 100 to 2000 characters.
* format_correctness: 0.5 for an "Ingredients" header, 0.5 for "Instructions" or "Steps".
* form: the mean of the four. It is no quality: a step said twelve times is perfect to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toque.cooking.action_verbs import has_action_verb
from toque.cooking.ingredients.names import forms_in_line, has_quantity
from toque.cooking.recipe import ParsedRecipe
from toque.cooking.text_keys import words_of

MIN_CHARS = 100
MAX_CHARS = 2000


def evaluate_recipe(text: str, recipe: ParsedRecipe) -> dict[str, float]:
    r"""All five scores of a recipe's text without its title; `recipe`: the same, parsed.

    >>> from toque.cooking.recipe import parse_text
    >>> text = "Ingredients:\n- 2 eggs\n\nInstructions:\n1. Boil the eggs."
    >>> evaluate_recipe(text, parse_text(text))  # doctest: +NORMALIZE_WHITESPACE
    {'ingredient_coherence': 1.0, 'instruction_quality': 1.0, 'completeness': 0.66,
     'format_correctness': 1.0, 'form': 0.915}
    """
    is_long_enough = MIN_CHARS <= len(text.strip()) <= MAX_CHARS
    parts = 33 * bool(recipe.ingredients) + 33 * bool(recipe.steps) + 34 * is_long_enough
    headers = recipe.has_ingredients_header + recipe.has_instructions_header
    scores = {
        "ingredient_coherence": _share(map(has_quantity, recipe.ingredients)),
        "instruction_quality": _share(map(has_action_verb, recipe.steps)),
        "completeness": parts / 100,
        "format_correctness": headers / 2,
    }
    return scores | {"form": sum(scores.values()) / 4}


def _share(good: Iterable[bool]) -> float:
    found = list(good)
    return sum(found) / len(found) if found else 0.0


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
    """Those of the requested ingredients whose head noun does not occur in the text.

    >>> missed_ingredients(["red lentils", "a carrot"], "Peel the carrots.")
    ['red lentils']
    """
    words = set(words_of(text))
    return [line for line in ingredients if forms_in_line(line).isdisjoint(words)]
