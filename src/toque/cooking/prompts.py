"""What a model is asked: the prompts of each task, in one table of wordings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, Literal, get_args

from toque.cooking.ingredients.names import ingredient_name
from toque.cooking.labels.cuisines import CUISINES
from toque.cooking.recipe import DIFFICULTIES, NUTRITION_CLASSES

Task = Literal["write", "request", "nutrition", "difficulty", "cuisine", "next_step", "title"]
TASKS: tuple[Task, ...] = get_args(Task)
"""What a recipe can be turned into; see `tasks`. A task's place is its number in a store's column
`task`, so new ones go to the end."""

CLASSES: Final[dict[Task, tuple[str, ...]]] = {
    "nutrition": NUTRITION_CLASSES,
    "difficulty": DIFFICULTIES,
    "cuisine": CUISINES,
}
"""The answers of the tasks whose answer is one of a few, in the order of their columns' codes."""

ASKS_FOR = "Generate recipe for:"
WITH_INGREDIENTS = " using ingredients: "

QUESTIONS: Final[dict[Task, str]] = {
    "nutrition": "Rate how healthy this recipe is (Healthy, Moderate or Indulgent): ",
    "difficulty": "Rate how difficult this recipe is (easy, medium or hard): ",
    "cuisine": "Name the cuisine of this recipe: ",
    "next_step": "Write the next step of this recipe: ",
    "title": "Name the dish of this recipe: ",
}
"""How the prompt of each of these begins; the recipe follows, as far as the task may see it."""

REQUESTS: Final[tuple[str, ...]] = (
    "How do I make {title}?",
    "Can you give me a recipe for {title}?",
    "I would like to cook {title}. How is it done?",
    "I have {foods}. How do I make {title} with that?",
    "Please tell me how to make {title} with {foods}.",
    "What is a good recipe for {title}? I have {foods} at home.",
    "I need {title} for {servings} people.",
    "Is there a way to make {title} in {minutes} minutes?",
)
"""Free requests. Those that need what a recipe does not say (servings, minutes) are passed over."""

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

_OPENINGS: Final = tuple(form.partition("{title}")[0].partition("{foods}")[0] for form in REQUESTS)


def asks_for_a_recipe(prompt: str) -> bool:
    """Whether the answer to a prompt should be a whole recipe.

    >>> asks_for_a_recipe("How do I make toast?"), asks_for_a_recipe("Once upon a time")
    (True, False)
    """
    return prompt.lstrip().startswith((ASKS_FOR, *_OPENINGS))


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
    names = different(ingredients)
    request = f"{ASKS_FOR} {title}"
    return f"{request}{WITH_INGREDIENTS}{', '.join(names)}" if names else request


def different(names: Iterable[str]) -> list[str]:
    """The first `MAX_PROMPT_INGREDIENTS` names, each once whatever its case."""
    once: dict[str, str] = {}
    for name in names:
        once.setdefault(name.casefold(), name)
    return list(islice(once.values(), MAX_PROMPT_INGREDIENTS))
