"""What a model is asked: the prompts of each task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal, get_args

from toque.cooking.ingredients import ingredient_name

Task = Literal["write"]
TASKS: tuple[Task, ...] = get_args(Task)
"""`write`: from a title and ingredient names to the whole recipe."""

ASKS_FOR = "Generate recipe for:"
WITH_INGREDIENTS = " using ingredients: "

MAX_PROMPT_INGREDIENTS = 20
"""More names than this make a prompt longer than the recipes people ask for."""

PROMPT_FORMATS: tuple[str, ...] = (
    "Create a recipe: {text}",
    "Generate a detailed recipe: {text}",
    "Make a dish with: {text}",
    "Recipe for: {text}",
    "How to prepare: {text}",
    "Cooking instructions: {text}",
    "{text}",
)
"""Other wordings of a request, for augmentation; `text` names the dish."""


def write_prompt(title: str, ingredients: Sequence[str]) -> str:
    """The request for a whole recipe. Names only: choosing the amounts is the model's work.

    Args:
        title: name of the dish.
        ingredients: ingredient lines, or bare names; each name is written once, at most
            `MAX_PROMPT_INGREDIENTS` of them. Without any, the request ends after the title.

    >>> write_prompt("Toast", ["2 slices bread", "1 tablespoon butter, softened"])
    'Generate recipe for: Toast using ingredients: bread, butter'
    """
    return prompt_of_names(title, [ingredient_name(line) for line in ingredients])


def prompt_of_names(title: str, ingredients: Iterable[str]) -> str:
    """`write_prompt` of names that hold no comma."""
    names: dict[str, str] = {}
    for name in ingredients:
        names.setdefault(name.casefold(), name)
    request = f"{ASKS_FOR} {title}"
    if not names:
        return request
    listed = ", ".join(islice(names.values(), MAX_PROMPT_INGREDIENTS))
    return f"{request}{WITH_INGREDIENTS}{listed}"
