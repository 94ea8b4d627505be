"""Own words: what a person types, in the form that a run's model is asked in."""

from __future__ import annotations

from toque.cooking.prompts import asks_for_a_recipe, dish_and_foods, write_prompt
from toque.models.loading.provenance import Provenance
from toque.workflows.asking.provenance import writes_recipes


def in_trained_form(typed: str, record: Provenance) -> str:
    """The prompt a model reads; as it was typed where nothing else is nearer to its training.

    Args:
        typed: in any words.
        record: what the model was trained to be asked.

    >>> in_trained_form("Create a simple pasta dish", Provenance(form="recipes", max_new_tokens=9))
    'Generate recipe for: simple pasta dish'
    """
    if record.form != "recipes" or asks_for_a_recipe(typed):
        return typed
    title, foods = dish_and_foods(typed)
    if writes_recipes(record):
        return write_prompt(title, foods)
    if "request" not in record.tasks:
        return typed
    if not foods:
        return f"How do I make {title}?"
    return f"Please tell me how to make {title} with {', '.join(foods)}."
