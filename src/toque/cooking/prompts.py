"""Prompts of the recipe tasks, and a parser of requests in any wording."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

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

RECIPE_TASKS: dict[Task, TaskTemplate] = {
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
        "Name the cuisine of this recipe: {title}\nIngredients: {foods}",
        "{cuisine}",
        CUISINES,
    ),
    "next_step": TaskTemplate(
        "Write the next step of this recipe: {title}\nIngredients: {foods}\n{steps_before}",
        "{next_step}",
    ),
    "title": TaskTemplate(
        "Name the dish of this recipe:\nIngredients: {foods}\n{steps}", "{title}"
    ),
}
"""Templates of the recipe tasks, with the fields of `toque.cooking.examples`.

The index of a task is its code in the store's column `task`. The index of a class is its code in
the column of its label.
"""
TASKS = tuple(RECIPE_TASKS)
CLASSES = {name: task.classes for name, task in RECIPE_TASKS.items() if task.classes}


def _beginning_of(template: str) -> str:
    """Return the first line of a template up to its first field, with a space at the end."""
    text, _, _ = template.partition("{")
    return f"{text.splitlines()[0].rstrip()} "


QUESTIONS: dict[Task, str] = {
    name: _beginning_of(str(task.prompt))
    for name, task in RECIPE_TASKS.items()
    if name not in ("write", "request")
}
"""Beginning of each question about a recipe."""

REQUESTS: tuple[str, ...] = (
    "How do I make {title}?",
    "Can you give me a recipe for {title}?",
    "I would like to cook {title}. How is it done?",
    "I have {foods}. How do I make {title} with that?",
    "Please tell me how to make {title} with {foods}.",
    "What is a good recipe for {title}? I have {foods} at home.",
    "I need {title} for {servings} people.",
    "Is there a way to make {title} in {minutes} minutes?",
)
"""Prompts for the task `request`. Prompts with servings or minutes are skipped if the recipe does
not state them.
"""

MAX_PROMPT_INGREDIENTS = 20
"""Maximum number of ingredient names in a prompt. Real requests are shorter."""

PROMPT_FORMATS: tuple[str, ...] = (
    "Create a recipe: {text}",
    "Generate a detailed recipe: {text}",
    "Make a dish with: {text}",
    "Recipe for: {text}",
    "How to prepare: {text}",
    "Cooking instructions: {text}",
    "{text}",
)
"""Alternative prompts for the task `write`, used for augmentation. `text` is the dish."""


def own_templates(data: DataConfig) -> dict[str, TaskTemplate]:
    """Return the templates of the tasks that the user defines, by name."""
    return {
        name: TaskTemplate(task.prompt, task.target, task.classes, task.metrics)
        for name, task in data.own_tasks.items()
    }


def task_table(data: DataConfig) -> dict[str, TaskTemplate]:
    """Return the templates of all tasks of a store, in the order of their codes."""
    return {**dict(RECIPE_TASKS.items()), **own_templates(data)}


FIELD = re.compile(r"\{\w+\}")
"""Pattern of a field in a template."""
_PARTS = tuple(FIELD.split(form) for form in REQUESTS)


def asks_for_a_recipe(prompt: str, *, knows_recipes: bool = True) -> bool:
    """Check whether a prompt requests a recipe.

    Args:
        prompt: The model's prompt.
        knows_recipes: True if the model was trained on recipes. For other models, a prompt in the
            form of `REQUESTS` can be about anything ("How do I make a payment?").
    """
    prompt = prompt.strip()
    if prompt.startswith(ASKS_FOR):
        return True
    if not knows_recipes:
        return False
    return any(
        prompt.startswith(parts[0])
        and prompt.endswith(parts[-1])
        and all(part in prompt for part in parts)
        for parts in _PARTS
    )


def write_prompt(title: str, ingredients: Sequence[str]) -> str:
    """Format the prompt for a recipe from its title and ingredient lines, without amounts."""
    return prompt_of_names(title, [ingredient_name(line) for line in ingredients])


def prompt_of_names(title: str, ingredients: Iterable[str]) -> str:
    """Format the prompt for a recipe from its title and ingredient names without commas."""
    names = distinct_names(ingredients)
    request = f"{ASKS_FOR} {title}"
    return f"{request}{WITH_INGREDIENTS}{', '.join(names)}" if names else request


def distinct_names(names: Iterable[str]) -> list[str]:
    """Return the first `MAX_PROMPT_INGREDIENTS` distinct names, ignoring case."""
    distinct: dict[str, str] = {}
    for name in names:
        distinct.setdefault(name.casefold(), name)
    return list(distinct.values())[:MAX_PROMPT_INGREDIENTS]


_POLITE = r"(?:please |can you |could you |would you |will you |kindly ){0,4}"
_VERB = (
    r"(?:create|make|write|generate|cook|prepare|bake|give|show|suggest|invent"
    r"|design|tell|find)"
)
_FOR_WHOM = r"(?: me| us)?"
_WISH = (
    r"i(?: want| need| would like|'d like)(?: to (?:make|cook|bake|prepare|eat|have))?"
)
_ARTICLE = r"(?:an?|the|some)"
_DETAIL = r"(?:(?:simple|detailed|good|easy|quick|complete|full|new) ){0,4}"
_FREE_FORMS = tuple(
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
_END = " .!?"
_SENTENCE = re.compile(r"[.!?] ")


def dish_and_foods(request: str) -> tuple[str, tuple[str, ...]]:
    """Extract the dish of a request, and the foods after a colon.

    If the request has an unknown form, all its text before the colon is the dish.
    """
    one_line = " ".join(request.split())
    matches = (form.fullmatch(one_line) for form in _FREE_FORMS)
    match = next(filter(None, matches), None)
    if match is None:
        dish, _, food_list = request.strip().partition(":")
    else:
        dish, _, food_list = match["dish"].rstrip(_END).partition(":")
        dish = _SENTENCE.split(dish)[0]  # "How do I make pancakes? I have eggs."
    foods = tuple(food.strip() for food in food_list.split(",") if food.strip())
    return dish.strip(), foods
