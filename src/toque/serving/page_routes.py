"""Routes of the server's web page: its files, and its requests below /api/.

The page gets texts from /v1/completions, as any other client does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
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
    advice_on_score,
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
from toque.serving.batcher import Batcher, ServedModel, ServedModels
from toque.serving.gate import Limits, read_body
from toque.serving.protocol import parse_request
from toque.serving.static_files import PAGE, page_files
from toque.sources.documents import blank_text

Words = Annotated[str, Field(max_length=300)]
Foods = Annotated[list[Words], Field(max_length=50)]
# Longer than all of 90,000 real recipes.
RecipeText = Annotated[str, Field(max_length=20_000)]
Servings = Annotated[int, Field(ge=1, le=MAX_SERVINGS)]
Json = dict[str, Any]

TALK: Final = PAGE.parent / "talk"
_SHARED: Final = (
    "base.css",
    "request.css",
    "dom.js",
    "models.js",
    "requests.js",
    "stream.js",
    "toque.svg",
)
_CLASS_TOKENS: Final = 16
"""Positions that a question leaves free for the tokens of a class."""


class _PageRequest(BaseModel, ABC):
    """Request of the page."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @abstractmethod
    def answer(self, models: ServedModels, batcher: Batcher) -> Json:
        """Compute the answer in another thread, so that the event loop can send other texts."""


class _Wish(_PageRequest):
    """Request for the prompt of a dish, in the form of the training prompts."""

    model: str
    dish: Annotated[Words, Field(min_length=1)]
    style: Words = ""  # an adjective before the dish, such as "Italian" or "Quick"
    ingredients: Foods = []

    def answer(self, models: ServedModels, _: Batcher) -> Json:
        served = models.get_model(self.model)
        title = f"{self.style} {self.dish}".strip()
        if self.ingredients:
            # A colon in the user's text separates the title from the ingredients.
            title = f"{title.replace(':', ',')}: {', '.join(self.ingredients)}"
        return {"prompt": served.to_prompt(title)}


class _WrittenText(_PageRequest):
    """Written text and its prompt."""

    prompt: RecipeText
    text: RecipeText
    avoid: Foods = []

    def answer(self, *_: object) -> Json:
        """Score a requested recipe.

        The answer also lists requested ingredients that are missing from the text or from its list
        of ingredients, and foods to avoid that the text has.
        """
        scores = text_metrics(self.prompt, self.text)
        requested = requested_ingredients(self.prompt)
        absent = missing_ingredients(self.avoid, self.text)
        return {
            "scores": scores,
            "asked": requested,
            "missed": missing_ingredients(requested, self.text),
            "unlisted": unlisted_ingredients(requested, parse_text(self.text)),
            "avoided": [food for food in self.avoid if food not in absent],
            "hint": advice_on_score(scores.get("recipe_score", 1.0)),
        }


class _WrittenRecipe(_PageRequest, ABC):
    """Title and text of a recipe."""

    title: Annotated[str, Field(max_length=700)]
    text: RecipeText

    @property
    def recipe(self) -> Recipe:
        parsed = parse_text(self.text)
        return Recipe(self.title, parsed.ingredients, parsed.steps)


class _Purchase(_WrittenRecipe):
    """Request for the shopping list of a recipe, for a number of servings."""

    servings: Servings
    makes: Servings | None = None
    """Servings of the recipe as written. None: estimate them."""
    asked: Foods = []
    """Requested ingredients. The shopping list includes them even if only the steps name them."""

    def answer(self, *_: object) -> Json:
        recipe = self.recipe
        makes = self.makes or estimated_servings(recipe)
        items = shopping_list(recipe.ingredients, factor=self.servings / makes)
        unlisted = unlisted_ingredients(self.asked, parse_text(self.text))
        items += map(unlisted_item, unlisted)
        return {"makes": makes, "items": [asdict(item) for item in items]}


class _Classified(_WrittenRecipe):
    """Request for the classes of a recipe."""

    model: str

    def answer(self, models: ServedModels, batcher: Batcher) -> Json:
        """Return the class of each task: from the model if it can classify, else from rules.

        Classes of the model have probabilities.
        """
        served = models.get_model(self.model)
        recipe = self.recipe
        reading = read_features(recipe)
        classes: dict[Task, Json] = {}

        if reading.lines and reading.words and language_of(reading) == "English":
            # The rules are for English words.
            level = estimate_difficulty(reading).level
            classes["difficulty"] = {"answer": level, "probabilities": None}
            if nutrition := nutrition_of(reading).klass:
                classes["nutrition"] = {"answer": nutrition, "probabilities": None}

        questions: dict[Task, list[int]] = {}
        for task in CLASSES:
            if task in served.record.tasks and recipe.ingredients and recipe.steps:
                ids = served.prompt_ids(question(task, recipe))
                if len(ids) <= served.context_tokens - _CLASS_TOKENS:
                    questions[task] = ids

        def classify() -> dict[Task, list[float]]:
            return {
                task: choose(served.model, served.codec, [ids], CLASSES[task])[
                    0
                ].tolist()
                for task, ids in questions.items()
            }

        for task, shares in batcher.run(served, classify).items():
            probabilities = dict(zip(CLASSES[task], shares, strict=True))
            answer = max(probabilities, key=probabilities.__getitem__)
            classes[task] = {"answer": answer, "probabilities": probabilities}
        return {
            "classes": [
                {"task": task, **classes[task]} for task in CLASSES if task in classes
            ]
        }


def _describe(served: ServedModel) -> Json:
    """Describe a model for the page, including prompts of its tasks with fields in braces."""
    tasks = [
        {"name": task.name, "prompt": blank_text(task.prompt)}
        for task in served.record.own_tasks
    ]
    # A chat template is enough for a conversation, even if the training of the model is unknown.
    form = served.record.form if served.chat is None else "conversations"
    return {"name": served.name, "form": form, "tasks": tasks}


def page_routes(models: ServedModels, batcher: Batcher, limits: Limits) -> list[Route]:
    """Build the routes of the page's files and of its requests."""

    async def list_models(_: Request) -> Response:
        return JSONResponse(
            {"models": [_describe(served) for served in models.values()]}
        )

    def answer_route(path: str, kind: type[_PageRequest]) -> Route:
        async def answer(http_request: Request) -> Response:
            request = parse_request(kind, await read_body(http_request, limits))
            return JSONResponse(
                await run_in_threadpool(request.answer, models, batcher)
            )

        return Route(path, answer, methods=["POST"])

    # Without a model of recipes, the page is a conversation built from the same files.
    has_recipes = any(served.record.knows_recipes for served in models.values())
    pages = (
        page_files()
        if has_recipes
        else page_files(TALK, (PAGE / name for name in _SHARED))
    )
    return [
        *pages,
        Route("/api/models", list_models),
        answer_route("/api/prompt", _Wish),
        answer_route("/api/score", _WrittenText),
        answer_route("/api/classes", _Classified),
        answer_route("/api/shopping-list", _Purchase),
    ]
