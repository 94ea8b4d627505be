"""Prompts of each task, and the dish and ingredients in what a person types, however worded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from toque.config.field_types import TaskName
from toque.cooking.ingredients.names import ingredient_name
from toque.cooking.labels.origins import CUISINES
from toque.cooking.recipe import DIFFICULTIES, NUTRITION_CLASSES
from toque.sources.records import TaskTemplate

if TYPE_CHECKING:
    from toque.config.schema import DataConfig

Task = TaskName
ASKS_FOR = "Generate recipe for:"
WITH_INGREDIENTS = " using ingredients: "

RECIPE_TASKS: Final[dict[Task, TaskTemplate]] = {
    "write": TaskTemplate(f"{ASKS_FOR} {{title}}{{using}}", "{recipe}"),
    "request": TaskTemplate("{request}", "{recipe}"),
    "nutrition": TaskTemplate(
        "Rate how healthy this recipe is (Healthy, Moderate or Indulgent): {title}{lines}",
        "{nutrition}",
        NUTRITION_CLASSES,
    ),
    "difficulty": TaskTemplate(
        "Rate how difficult this recipe is (easy, medium or hard): {title}\n"
        "Ingredients: {foods}\n{steps}",
        "{difficulty}",
        DIFFICULTIES,
    ),
    "cuisine": TaskTemplate(
        "Name the cuisine of this recipe: {title}\nIngredients: {foods}", "{cuisine}", CUISINES
    ),
    "next_step": TaskTemplate(
        "Write the next step of this recipe: {title}\nIngredients: {foods}\n{steps_before}",
        "{next_step}",
    ),
    "title": TaskTemplate(
        "Name the dish of this recipe:\nIngredients: {foods}\n{steps}", "{title}"
    ),
}
"""The tasks of a recipe; a place in the table is a code of the column `task`.

The fields are those of `toque.cooking.examples`, the classes in the order of their columns' codes.
"""
TASKS: Final = tuple(RECIPE_TASKS)
CLASSES: Final = {name: task.classes for name, task in RECIPE_TASKS.items() if task.classes}
QUESTIONS: Final[dict[Task, str]] = {
    name: f"{str(task.prompt).partition('{')[0].splitlines()[0].rstrip()} "
    for name, task in RECIPE_TASKS.items()
    if name not in ("write", "request")
}  # beginning of each question about a recipe

REQUESTS: Final[tuple[str, ...]] = (
    "How do I make {title}?",
    "Can you give me a recipe for {title}?",
    "I would like to cook {title}. How is it done?",
    "I have {foods}. How do I make {title} with that?",
    "Please tell me how to make {title} with {foods}.",
    "What is a good recipe for {title}? I have {foods} at home.",
    "I need {title} for {servings} people.",
    "Is there a way to make {title} in {minutes} minutes?",
)  # Open-ended requests. Those that need a missing field (servings, minutes) are skipped

MAX_PROMPT_INGREDIENTS = 20  # most ingredient names in a prompt; real requests are shorter

PROMPT_FORMATS: tuple[str, ...] = (
    "Create a recipe: {text}",
    "Generate a detailed recipe: {text}",
    "Make a dish with: {text}",
    "Recipe for: {text}",
    "How to prepare: {text}",
    "Cooking instructions: {text}",
    "{text}",
)  # paraphrased requests for augmentation; `text` names the dish


def own_templates(data: DataConfig) -> dict[str, TaskTemplate]:
    """The tasks of a user's own, by name."""
    return {
        name: TaskTemplate(task.prompt, task.target, task.classes, task.metrics)
        for name, task in data.own_tasks.items()
    }


def task_table(data: DataConfig) -> dict[str, TaskTemplate]:
    """Every task that the data's store may hold, a recipe's and the user's own, by their codes."""
    table: dict[str, TaskTemplate] = {**dict(RECIPE_TASKS.items()), **own_templates(data)}
    return table


FIELD: Final = re.compile(r"\{\w+\}")
_PARTS: Final = tuple(FIELD.split(form) for form in REQUESTS)


def asks_for_a_recipe(prompt: str, *, knows_recipes: bool = True) -> bool:
    """True if the answer to a prompt should be a whole recipe.

    Args:
        prompt: as the model reads it.
        knows_recipes: the model was trained on recipes. What another is asked in the words of
            `REQUESTS` ("How do I make a payment?") may be anything.
    """
    prompt = prompt.strip()
    if prompt.startswith(ASKS_FOR):
        return True
    return knows_recipes and any(
        prompt.startswith(parts[0])
        and prompt.endswith(parts[-1])
        and all(part in prompt for part in parts)
        for parts in _PARTS
    )


def write_prompt(title: str, ingredients: Sequence[str]) -> str:
    """The request for a whole recipe; names only, each once: the model chooses the amounts."""
    return prompt_of_names(title, [ingredient_name(line) for line in ingredients])


def prompt_of_names(title: str, ingredients: Iterable[str]) -> str:
    """`write_prompt` for names without commas."""
    names = different(ingredients)
    request = f"{ASKS_FOR} {title}"
    return f"{request}{WITH_INGREDIENTS}{', '.join(names)}" if names else request


def different(names: Iterable[str]) -> list[str]:
    """The first `MAX_PROMPT_INGREDIENTS` distinct names, ignoring case."""
    once: dict[str, str] = {}
    for name in names:
        once.setdefault(name.casefold(), name)
    return list(islice(once.values(), MAX_PROMPT_INGREDIENTS))


_POLITE: Final = r"(?:please |can you |could you |would you |will you |kindly ){0,4}"
_VERB: Final = (
    r"(?:create|make|write|generate|cook|prepare|bake|give|show|suggest|invent|design|tell|find)"
)
_FOR_WHOM: Final = r"(?: me| us)?"
_WISH: Final = r"i(?: want| need| would like|'d like)(?: to (?:make|cook|bake|prepare|eat|have))?"
_ARTICLE: Final = r"(?:an?|the|some)"
_DETAIL: Final = r"(?:(?:simple|detailed|good|easy|quick|complete|full|new) ){0,4}"
_FREE_FORMS: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # "Write me a detailed recipe for pancakes", "Recipe: pancakes"
        (
            rf"{_POLITE}(?:(?:{_VERB}{_FOR_WHOM}|{_WISH}|what is) )?(?:{_ARTICLE} )?{_DETAIL}"
            rf"recipe(?: for:?|:)(?: {_ARTICLE})? (?P<dish>.+)"
        ),
        r"(?:make a dish with|cooking instructions): (?P<dish>.+)",
        # "How do I make pancakes", "Tell me how to cook a simple pasta dish"
        (
            rf"{_POLITE}(?:tell{_FOR_WHOM} |show{_FOR_WHOM} )?how (?:do (?:i|you|we)|to|can i) "
            rf"(?:make|cook|bake|prepare)(?: {_ARTICLE})?:? (?P<dish>.+)"
        ),
        # "Create a simple pasta dish". Without an article it may be a name: "Make-Ahead Lasagna"
        rf"{_POLITE}(?:{_VERB}{_FOR_WHOM}|{_WISH}) {_ARTICLE} (?P<dish>.+)",
        rf"(?:please |(?:can|could|would|will) you ){_POLITE}{_VERB}{_FOR_WHOM} (?P<dish>.+)",
        rf"{_WISH} (?P<dish>.+)",
    )
)
_END: Final = " .!?"
_SENTENCE: Final = re.compile(r"[.!?] ")


def dish_and_foods(request: str) -> tuple[str, tuple[str, ...]]:
    """The dish that a request names, or the whole of what is no request; foods after a colon."""
    words = " ".join(request.split())
    found = next(filter(None, (opening.fullmatch(words) for opening in _FREE_FORMS)), None)
    words = request.strip() if found is None else found["dish"].rstrip(_END)
    title, _, listed = words.partition(":")
    if found is not None:
        title = _SENTENCE.split(title)[0]  # "How do I make pancakes? I have eggs."
    foods = tuple(food.strip() for food in listed.split(",") if food.strip())
    return title.strip(), foods
