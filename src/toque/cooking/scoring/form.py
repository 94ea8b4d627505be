"""Form scores of a generated recipe: four rules, their mean, and ingredient coverage.

Definitions (each score in [0, 1]; a recipe without any ingredient or step scores 0 there):

* ingredient_coherence: well-formatted ingredient lines / all. Well formatted means an item of
  the ingredient section that holds a quantity (number, fraction or words) and names something.
* instruction_quality: steps with a cooking verb / all steps.
* completeness: 0.33 for an ingredient section, 0.33 for an instruction section, 0.34 for a
  length of 100 to 2000 characters.
* format_correctness: 0.5 for an "Ingredients" header, 0.5 for "Instructions" or "Steps".
* overall_quality: the mean of the four.
"""

from __future__ import annotations

from collections.abc import Sequence

from toque.cooking.action_verbs import has_action_verb
from toque.cooking.ingredients.names import forms_in_line, has_quantity
from toque.cooking.recipe import ParsedRecipe, parse_text
from toque.cooking.text_keys import words_of

MIN_CHARS = 100
MAX_CHARS = 2000


def _share(items: Sequence[str], good: Sequence[bool]) -> float:
    return sum(good) / len(items) if items else 0.0


def ingredient_coherence(recipe: ParsedRecipe) -> float:
    """Share of ingredient lines that hold a quantity and name something."""
    lines = recipe.ingredients
    return _share(lines, [has_quantity(line) for line in lines])


def instruction_quality(recipe: ParsedRecipe) -> float:
    """Share of steps that hold a cooking verb."""
    return _share(recipe.steps, [has_action_verb(step) for step in recipe.steps])


def completeness(recipe: ParsedRecipe, n_chars: int) -> float:
    """0.33 with ingredients, 0.33 with steps, 0.34 when the text has 100 to 2000 characters."""
    whole = 33 * bool(recipe.ingredients) + 33 * bool(recipe.steps)
    return (whole + 34 * (MIN_CHARS <= n_chars <= MAX_CHARS)) / 100


def format_correctness(recipe: ParsedRecipe) -> float:
    """0.5 for each of the two headers."""
    return 0.5 * recipe.has_ingredients_header + 0.5 * recipe.has_instructions_header


def evaluate_recipe(text: str) -> dict[str, float]:
    r"""All five scores of a recipe's text, title not included.

    >>> evaluate_recipe("Ingredients:\n- 2 eggs\n\nInstructions:\n1. Boil the eggs.")
    ... # doctest: +NORMALIZE_WHITESPACE
    {'ingredient_coherence': 1.0, 'instruction_quality': 1.0, 'completeness': 0.66,
     'format_correctness': 1.0, 'overall_quality': 0.915}
    """
    return evaluate_parsed(parse_text(text), len(text.strip()))


def evaluate_parsed(recipe: ParsedRecipe, n_chars: int) -> dict[str, float]:
    """The same scores of a parsed recipe; `n_chars` is the length of its text."""
    scores = {
        "ingredient_coherence": ingredient_coherence(recipe),
        "instruction_quality": instruction_quality(recipe),
        "completeness": completeness(recipe, n_chars),
        "format_correctness": format_correctness(recipe),
    }
    return scores | {"overall_quality": sum(scores.values()) / 4}


def ingredient_coverage(ingredients: Sequence[str], text: str) -> float:
    """Share of the requested ingredients whose head noun occurs in the text, singular or plural.

    Args:
        ingredients: names or whole ingredient lines, as in the prompt.
        text: the model's output.

    Returns:
        1.0 if none was requested.
    """
    if not ingredients:
        return 1.0
    return share_named(ingredients, text)


def share_named(ingredients: Sequence[str], text: str) -> float:
    """Share of ingredient lines whose head noun occurs in a text; at least one line."""
    words = set(words_of(text))
    return sum(not forms_in_line(line).isdisjoint(words) for line in ingredients) / len(ingredients)
