"""Recipe metrics of one generated text and its prompt."""

from __future__ import annotations

from toque.cooking.prompts import (
    MAX_PROMPT_INGREDIENTS,
    WITH_INGREDIENTS,
    asks_for_a_recipe,
)
from toque.cooking.recipe import parse_text
from toque.cooking.scoring.consistency import (
    hallucinated_ingredients,
    ingredients_used,
    quantity_sanity,
    structure_score,
)
from toque.cooking.scoring.form import evaluate_recipe, ingredient_coverage


def text_metrics(prompt: str, text: str) -> dict[str, float]:
    """Every recipe score of a text; empty for prompts that do not ask for a recipe.

    The five of `form.evaluate_recipe`, those of `consistency`, the coverage of the requested
    ingredients, and `recipe_score`: the mean of all but `overall_quality`, with one minus the share
    of hallucinated ingredients.

    >>> text_metrics("Once upon a time", "there was a cook")
    {}
    """
    if not asks_for_a_recipe(prompt):
        return {}
    recipe, asked = parse_text(text), asked_ingredients(prompt)
    found: dict[str, float | None] = dict(evaluate_recipe(text, recipe))
    if asked:
        found["ingredient_coverage"] = ingredient_coverage(asked, text)
        if len(asked) < MAX_PROMPT_INGREDIENTS:  # a longer list was truncated
            found["hallucinated_ingredients"] = hallucinated_ingredients(asked, recipe)
    found["ingredients_used"] = ingredients_used(recipe)
    found["quantity_sanity"] = quantity_sanity(recipe)
    found["structure"] = structure_score(text, recipe)
    scores = {name: score for name, score in found.items() if score is not None}
    return scores | {"recipe_score": recipe_score(scores)}


def recipe_score(scores: dict[str, float]) -> float:
    """One number to rank recipes by; see `text_metrics`."""
    parts = [
        1.0 - score if name == "hallucinated_ingredients" else score
        for name, score in scores.items()
        if name != "overall_quality"
    ]
    return sum(parts) / len(parts)


def asked_ingredients(prompt: str) -> list[str]:
    """The ingredient names in a prompt of `write_prompt`.

    >>> asked_ingredients("Generate recipe for: Toast using ingredients: bread, butter")
    ['bread', 'butter']
    """
    _, _, listed = prompt.partition(WITH_INGREDIENTS)
    return [name.strip() for name in listed.split(",") if name.strip()]
