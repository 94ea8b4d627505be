"""The recipe metrics of one generated text, against the prompt that asked for it."""

from __future__ import annotations

from toque.cooking.metrics import evaluate_recipe, ingredient_coverage
from toque.cooking.templates import ASKS_FOR, WITH_INGREDIENTS


def text_metrics(prompt: str, text: str) -> dict[str, float]:
    """The five recipe scores and the coverage of the asked ingredients; none for other prompts.

    >>> text_metrics("Once upon a time", "there was a cook")
    {}
    """
    if not prompt.lstrip().startswith(ASKS_FOR):
        return {}
    scores = evaluate_recipe(text)
    asked = asked_ingredients(prompt)
    return scores | ({"ingredient_coverage": ingredient_coverage(asked, text)} if asked else {})


def asked_ingredients(prompt: str) -> list[str]:
    """The ingredient names that `write_prompt` put into a prompt.

    >>> asked_ingredients("Generate recipe for: Toast using ingredients: bread, butter")
    ['bread', 'butter']
    """
    _, _, listed = prompt.partition(WITH_INGREDIENTS)
    return [name.strip() for name in listed.split(",") if name.strip()]
