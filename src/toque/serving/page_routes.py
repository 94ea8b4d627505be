"""Requests of the web page about models and recipes, under /api/.

The page gets completions from /v1/completions, like any other client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from toque.cooking.examples import question
from toque.cooking.labels.difficulty import estimate_difficulty
from toque.cooking.labels.features import read_features
from toque.cooking.labels.nutrition import nutrition_of
from toque.cooking.labels.origins import language_of
from toque.cooking.prompts import CLASSES, Task
from toque.cooking.recipe import Recipe, parse_text
from toque.cooking.recipe_scores import (
    POOR,
    missing_ingredients,
    requested_ingredients,
    text_metrics,
    unlisted_ingredients,
)
from toque.cooking.shopping_list import (
    MAX_SERVINGS,
    estimated_servings,
    shopping_list,
    unlisted_item,
)
from toque.evaluation.constrained_choice import choose
from toque.models.loading.provenance import Provenance
from toque.serving.batcher import Batcher, ServedModel, ServedModels
from toque.serving.gate import Limits
from toque.serving.request_body import post_route
from toque.sources.documents import blank_text

Words = Annotated[str, Field(max_length=300)]
Foods = Annotated[list[Words], Field(max_length=50)]
# None of 90,000 real recipes is longer.
RecipeText = Annotated[str, Field(max_length=20_000)]
Servings = Annotated[int, Field(ge=1, le=MAX_SERVINGS)]
Json = dict[str, Any]

_POOR_TEXT: Final = (
    "This text is still poor. Train the model longer or on more recipes, or start from a "
    "pretrained model."
)
_CLASS_TOKENS: Final = 16
"""Number of tokens of the context length that a question must leave free for a class."""


class _PageRequest(BaseModel, ABC):
    """Request from the page."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @abstractmethod
    def answer(self, models: ServedModels, batcher: Batcher) -> Json:
        """Compute the answer. It runs in another thread, so that the event loop can send texts."""


class _Wish(_PageRequest):
    """Request for the prompt of a dish, in the form of the training prompts."""

    model: str
    dish: Annotated[Words, Field(min_length=1)]
    style: Words = ""
    """Adjective before the dish, such as "Italian" or "Quick"."""
    ingredients: Foods = []

    def answer(self, models: ServedModels, _: Batcher) -> Json:
        served = models.get_model(self.model)
        title = f"{self.style} {self.dish}".strip()
        if self.ingredients:
            # A colon in the user's text separates the title from the ingredients.
            title = f"{title.replace(':', ',')}: {', '.join(self.ingredients)}"
        return {"prompt": served.to_prompt(title)}


class _GeneratedText(_PageRequest):
    """Request for the scores of a generated text."""

    prompt: RecipeText
    text: RecipeText
    avoid: Foods = []
    """Foods that the recipe must not have."""

    def answer(self, *_: object) -> Json:
        """Score a recipe.

        The answer also lists requested ingredients that are missing from the text or from its list
        of ingredients, and foods to avoid that are in the text.
        """
        scores = text_metrics(self.prompt, self.text)
        requested = requested_ingredients(self.prompt)
        absent = missing_ingredients(self.avoid, self.text)
        return {
            "scores": scores,
            "requested": requested,
            "missing": missing_ingredients(requested, self.text),
            "unlisted": unlisted_ingredients(requested, parse_text(self.text)),
            "avoided": [food for food in self.avoid if food not in absent],
            "hint": _POOR_TEXT if scores.get("recipe_score", 1.0) < POOR else "",
        }


class _RecipeRequest(_PageRequest, ABC):
    """Request about a recipe with a title and a text."""

    title: Annotated[str, Field(max_length=700)]
    text: RecipeText

    @property
    def recipe(self) -> Recipe:
        """Recipe with the parts of the text."""
        parsed = parse_text(self.text)
        return Recipe(self.title, parsed.ingredients, parsed.steps)


class _ShoppingList(_RecipeRequest):
    """Request for the shopping list of a recipe, for a number of servings."""

    servings: Servings
    makes: Servings | None = None
    """Servings of the recipe's amounts; None to estimate them."""
    requested: Foods = []
    """Requested ingredients. The shopping list includes them even if only the steps name them."""

    def answer(self, *_: object) -> Json:
        recipe = self.recipe
        makes = self.makes or estimated_servings(recipe)
        items = shopping_list(recipe.ingredients, factor=self.servings / makes)
        unlisted = unlisted_ingredients(self.requested, parse_text(self.text))
        items += map(unlisted_item, unlisted)
        return {"makes": makes, "items": [asdict(item) for item in items]}


class _Classes(_RecipeRequest):
    """Request for the classes of a recipe."""

    model: str

    def answer(self, models: ServedModels, batcher: Batcher) -> Json:
        """Return the class of each task, from the model if it learned the task, or from rules.

        Only classes from the model have probabilities.
        """
        served = models.get_model(self.model)
        recipe = self.recipe
        from_rules = _classify_by_rules(recipe)
        classes = from_rules | _classify_by_model(served, recipe, batcher)
        return {
            "classes": [
                {"task": task, **classes[task]} for task in CLASSES if task in classes
            ]
        }


def _classify_by_model(
    served: ServedModel, recipe: Recipe, batcher: Batcher
) -> dict[Task, Json]:
    """Classify a recipe by the tasks that the model learned. Block until the batch pauses."""
    questions = _find_questions(served, recipe)

    def classify() -> dict[Task, Json]:
        classes: dict[Task, Json] = {}
        for task, ids in questions.items():
            names = CLASSES[task]
            (shares,) = choose(served.model, served.codec, [ids], names).tolist()
            answer = names[shares.index(max(shares))]
            probabilities = dict(zip(names, shares, strict=True))
            classes[task] = {"answer": answer, "probabilities": probabilities}
        return classes

    return batcher.run_between_steps(served, classify)


def _classify_by_rules(recipe: Recipe) -> dict[Task, Json]:
    """Classify a recipe by rules if it is in English, the language of the rules."""
    classes: dict[Task, Json] = {}
    reading = read_features(recipe)
    if reading.lines and reading.words and language_of(reading) == "English":
        level = estimate_difficulty(reading).level
        classes["difficulty"] = {"answer": level, "probabilities": None}
        if nutrition := nutrition_of(reading).klass:
            classes["nutrition"] = {"answer": nutrition, "probabilities": None}
    return classes


def _find_questions(served: ServedModel, recipe: Recipe) -> dict[Task, list[int]]:
    """Return the prompts of the model's tasks with classes. Leave out prompts that are too long."""
    questions: dict[Task, list[int]] = {}
    if not recipe.ingredients or not recipe.steps:
        return questions
    for task in CLASSES:
        if task in served.record.tasks:
            ids = served.prompt_ids(question(task, recipe))
            if len(ids) <= served.context_tokens - _CLASS_TOKENS:
                questions[task] = ids
    return questions


def describe_model(name: str, record: Provenance, form: str) -> Json:
    """Describe a model and its tasks for the page. The prompts of tasks have fields in braces."""
    tasks = [
        {"name": task.name, "prompt": blank_text(task.prompt)}
        for task in record.own_tasks
    ]
    return {"name": name, "form": form, "tasks": tasks}


def _describe_served(served: ServedModel) -> Json:
    # A chat template is enough for a conversation, even if the model's training is unknown.
    form = served.record.form if served.chat is None else "conversations"
    return describe_model(served.name, served.record, form)


def page_routes(models: ServedModels, batcher: Batcher, limits: Limits) -> list[Route]:
    """Build the routes of the page's requests."""

    async def list_models(_: Request) -> Response:
        return JSONResponse(
            {"models": [_describe_served(served) for served in models.values()]}
        )

    def answer(request: _PageRequest) -> Json:
        return request.answer(models, batcher)

    kinds: dict[str, type[_PageRequest]] = {
        "prompt": _Wish,
        "score": _GeneratedText,
        "classes": _Classes,
        "shopping-list": _ShoppingList,
    }
    return [
        Route("/api/models", list_models),
        *(
            post_route(f"/api/{name}", kind, limits, answer)
            for name, kind in kinds.items()
        ),
    ]
