"""Recipe scores of one generated text and its prompt.

Scores of form (each in [0, 1]; a recipe without any ingredient or step scores 0 there):

* ingredient_coherence: well-formatted ingredient lines / all. Well formatted means an item of
  the ingredient section that holds a quantity (number, fraction or words) and names something.
* instruction_quality: steps with a cooking verb / all steps.
* completeness: 0.33 for an ingredient section, 0.33 for an instruction section, 0.34 for a
  length of 100 to 2000 characters.
* format_correctness: 0.5 for an "Ingredients" header, 0.5 for "Instructions" or "Steps".
* form: the mean of the four. It is no quality: a step repeated twelve times is perfect to it.

The scores of `consistency` and `variety` judge the content; `recipe_score` combines them all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from toque.cooking.consistency import (
    hallucinated_ingredients,
    ingredient_coverage,
    ingredients_used,
    quantity_sanity,
    steps_listed,
    structure_score,
    title_kept,
)
from toque.cooking.ingredients.names import has_quantity, ingredient_name
from toque.cooking.prompts import (
    ASKS_FOR,
    MAX_PROMPT_INGREDIENTS,
    REQUESTS,
    WITH_INGREDIENTS,
    asks_for_a_recipe,
)
from toque.cooking.recipe import ParsedRecipe, parse_text
from toque.cooking.text_keys import has_action_verb, share, share_different, words_of

_FIELD: Final = re.compile(r"\{\w+\}")
_AROUND_TITLES: Final = sorted(
    (
        (_FIELD.split(before)[-1], _FIELD.split(after)[0])
        for before, _, after in (form.partition("{title}") for form in REQUESTS)
    ),
    key=lambda around: -len(around[0]) - len(around[1]),
)
"""Text just before and just after the title in each request, the longest first."""


POOR: Final = 0.6
"""Recipe scores below it are poor: of five collections, 97 to 99 % of the recipes have more."""
NAMES: Final = (
    "recipe_score",
    "ingredient_coverage",
    "hallucinated_ingredients",
    "ingredients_used",
    "steps_listed",
    "title_kept",
    "variety",
    "quantity_sanity",
    "structure",
    "ingredient_coherence",
    "instruction_quality",
    "completeness",
    "format_correctness",
    "form",
)
"""Names of the scores in `text_metrics`; a text has those that apply to it."""
_FACTORS: Final = ("variety", "title_kept", "form")
"""Scores that are no part of the mean in `recipe_score`."""

RECIPE_SCORES: Final = frozenset(NAMES)
"""Every name that `text_metrics` may return."""


def text_metrics(prompt: str, text: str) -> dict[str, float]:
    """Every recipe score of a text, `recipe_score` first; empty if no recipe was asked for.

    The five of `form.evaluate_recipe`, those of `consistency`, `dish` and `repetition`, the
    coverage of the requested ingredients, and `recipe_score`.

    >>> text_metrics("Once upon a time", "there was a cook")
    {}
    """
    if not asks_for_a_recipe(prompt):
        return {}
    recipe, asked = parse_text(text), asked_ingredients(prompt)
    found: dict[str, float | None] = {}
    if asked:
        found["ingredient_coverage"] = ingredient_coverage(asked, text)
        if len(asked) < MAX_PROMPT_INGREDIENTS:  # a longer list was truncated
            found["hallucinated_ingredients"] = hallucinated_ingredients(asked, recipe)
    found["ingredients_used"] = ingredients_used(recipe)
    found["steps_listed"] = steps_listed(recipe)
    found["title_kept"] = title_kept(title_of(prompt), recipe)
    found["variety"] = variety(recipe)
    found["quantity_sanity"] = quantity_sanity(recipe)
    found["structure"] = structure_score(text, recipe)
    found |= evaluate_recipe(text, recipe)
    scores = {name: score for name, score in found.items() if score is not None}
    n_parts = bool(recipe.ingredients) + bool(recipe.steps)
    return {"recipe_score": recipe_score(scores, whole=n_parts / 2), **scores}


def recipe_score(scores: Mapping[str, float], *, whole: float = 1.0) -> float:
    """One number to rank recipes by, in [0, 1].

    The mean of the scores, hallucinated ingredients counted as 1 minus the score, times `variety`,
    times (1 + `title_kept`) / 2, times `whole`. Good form cannot make up for a low factor:
    blueberry muffins without blueberries score at most 0.5.

    Args:
        scores: of `text_metrics`; `form`, a mean of others, does not count.
        whole: share of the two parts, ingredients and steps, that the text has.
    """
    parts = [
        1.0 - score if name == "hallucinated_ingredients" else score
        for name, score in scores.items()
        if name not in _FACTORS
    ]
    mean = sum(parts) / len(parts)
    factor = scores.get("variety", 1.0) * (1.0 + scores.get("title_kept", 1.0)) / 2.0
    return mean * factor * whole


def hint(score: float) -> str:
    """A sentence about texts of this mean recipe score and what to do; "" if they are not poor.

    >>> hint(0.9), hint(0.31).partition(":")[0]
    ('', 'The texts are still poor')
    """
    if score >= POOR:
        return ""
    return (
        f"The texts are still poor: their recipe score is {score:.2f} of 1; recipes that people "
        "wrote score about 0.9. Train longer, on more recipes, or start from a pretrained model "
        "(model.start_from), and read a few texts before you trust any single score."
    )


def title_of(prompt: str) -> str:
    """The dish that a prompt of `write_prompt` or one of `REQUESTS` names; "" if none is found.

    >>> title_of("Generate recipe for: Pea Soup using ingredients: peas")
    'Pea Soup'
    >>> title_of("I would like to cook Pea Soup. How is it done?")
    'Pea Soup'
    """
    request = prompt.strip()
    if request.startswith(ASKS_FOR):
        return request.removeprefix(ASKS_FOR).partition(WITH_INGREDIENTS)[0].strip()
    for opening, ending in _AROUND_TITLES:
        _, found, rest = request.partition(opening)
        title, ended, _ = rest.partition(ending)
        if found and ended:
            return title.strip()
    return ""


def asked_ingredients(prompt: str) -> list[str]:
    """The ingredient names in a prompt of `write_prompt`.

    >>> asked_ingredients("Generate recipe for: Toast using ingredients: bread, butter")
    ['bread', 'butter']
    """
    _, _, listed = prompt.partition(WITH_INGREDIENTS)
    return [name.strip() for name in listed.split(",") if name.strip()]


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
        "ingredient_coherence": share(map(has_quantity, recipe.ingredients)),
        "instruction_quality": share(map(has_action_verb, recipe.steps)),
        "completeness": parts / 100,
        "format_correctness": headers / 2,
    }
    return scores | {"form": sum(scores.values()) / 4}


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
        share_different([ingredient_name(line).casefold() for line in recipe.ingredients]),
        share_different([" ".join(words_of(step)) for step in recipe.steps]),
        share_different(runs),
    )
    return min(1.0, min(shares) / (1.0 - FREE_SHARE))
