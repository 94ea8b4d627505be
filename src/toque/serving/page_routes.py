"""Routes of the page that a server shows to people: its files, and what it asks below /api/.

The recipe itself is written by /v1/completions, as for any other client.
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
from toque.cooking.labels.difficulty import judged_difficulty
from toque.cooking.labels.features import read
from toque.cooking.labels.nutrition import nutrition_of
from toque.cooking.labels.origins import language_of
from toque.cooking.prompts import CLASSES, Task
from toque.cooking.recipe import Recipe, parse_text
from toque.cooking.recipe_scores import (
    asked_ingredients,
    hint,
    missed_ingredients,
    text_metrics,
    unlisted_ingredients,
)
from toque.cooking.shopping_list import (
    MOST_SERVINGS,
    estimated_servings,
    shopping_list,
    unlisted_item,
)
from toque.evaluation.constrained_choice import choose
from toque.serving.batcher import Batcher, ServedModel, ServedModels
from toque.serving.protocol import parsed
from toque.serving.server import PAGE, Limits, page_files, read_body
from toque.sources.documents import blank_text

Words = Annotated[str, Field(max_length=300)]
Foods = Annotated[list[Words], Field(max_length=50)]
RecipeText = Annotated[str, Field(max_length=20_000)]  # more than any of 90,000 real recipes has
Servings = Annotated[int, Field(ge=1, le=MOST_SERVINGS)]
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
_LONGEST_ANSWER: Final = 16  # tokens that a class may take, and so positions a question leaves free


class _PageRequest(BaseModel, ABC):
    """A question of the page."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @abstractmethod
    def answer(self, models: ServedModels, batcher: Batcher) -> Json:
        """The answer, made in another thread: nobody waits for a text that is read."""


class _Wish(_PageRequest):
    """A wish for a dish, answered with the prompt that the model was trained on."""

    model: str
    dish: Annotated[Words, Field(min_length=1)]
    style: Words = ""  # "Italian", "Quick": put before the dish
    ingredients: Foods = []

    def answer(self, models: ServedModels, _: Batcher) -> Json:
        served, title = models.named(self.model), f"{self.style} {self.dish}".strip()
        if self.ingredients:
            # A colon ends the title of what a person types.
            title = f"{title.replace(':', ',')}: {', '.join(self.ingredients)}"
        return {"prompt": served.asked(title)}


class _WrittenText(_PageRequest):
    """A text and the prompt it answers."""

    prompt: RecipeText
    text: RecipeText
    avoid: Foods = []

    def answer(self, *_: object) -> Json:
        """Scores, if a recipe is requested; requested ingredients that it misses or does not list.

        Foods to avoid that the text names are listed, too.
        """
        scores = text_metrics(self.prompt, self.text)
        asked = asked_ingredients(self.prompt)
        absent = missed_ingredients(self.avoid, self.text)
        return {
            "scores": scores,
            "asked": asked,
            "missed": missed_ingredients(asked, self.text),
            "unlisted": unlisted_ingredients(asked, parse_text(self.text)),
            "avoided": [food for food in self.avoid if food not in absent],
            "hint": hint(scores.get("recipe_score", 1.0)),
        }


class _WrittenRecipe(_PageRequest, ABC):
    """A recipe's text under its title."""

    title: Annotated[str, Field(max_length=700)]
    text: RecipeText

    @property
    def recipe(self) -> Recipe:
        found = parse_text(self.text)
        return Recipe(self.title, found.ingredients, found.steps)


class _Purchase(_WrittenRecipe):
    """A recipe whose ingredients are bought for a number of people: its shopping list."""

    servings: Servings
    makes: Servings | None = None  # servings as it is written; estimated when left out
    asked: Foods = []  # requested ingredients; those that only the steps name are bought, too

    def answer(self, *_: object) -> Json:
        recipe = self.recipe
        makes = self.makes or estimated_servings(recipe)
        items = shopping_list(recipe.ingredients, factor=self.servings / makes)
        unlisted = unlisted_ingredients(self.asked, parse_text(self.text))
        items += map(unlisted_item, unlisted)
        return {"makes": makes, "items": [asdict(item) for item in items]}


class _Classified(_WrittenRecipe):
    """A recipe whose classes a model is asked for."""

    model: str

    def answer(self, models: ServedModels, batcher: Batcher) -> Json:
        """The class of each task: the model's, with the probability of each, else the rules'."""
        served, recipe, found = models.named(self.model), self.recipe, dict[Task, Json]()
        reading = read(recipe)
        # The rules know English words.
        if reading.lines and reading.words and language_of(reading) == "English":
            level = judged_difficulty(reading).level
            found["difficulty"] = {"answer": level, "probabilities": None}
            if nutrition := nutrition_of(reading).klass:
                found["nutrition"] = {"answer": nutrition, "probabilities": None}
        questions: dict[Task, list[int]] = {}
        for task in CLASSES:
            if task in served.record.tasks and recipe.ingredients and recipe.steps:
                ids = served.prompt_ids(question(task, recipe))
                if len(ids) <= served.context_tokens - _LONGEST_ANSWER:
                    questions[task] = ids

        def chosen() -> dict[Task, list[float]]:
            return {
                task: choose(served.model, served.codec, [ids], CLASSES[task])[0].tolist()
                for task, ids in questions.items()
            }

        for task, shares in batcher.run(served, chosen).items():
            own = dict(zip(CLASSES[task], shares, strict=True))
            found[task] = {"answer": max(own, key=own.__getitem__), "probabilities": own}
        return {"classes": [{"task": task, **found[task]} for task in CLASSES if task in found]}


def _described(served: ServedModel) -> Json:
    """Description of a model for the page, its tasks' prompts with their fields in braces."""
    tasks = [
        {"name": one.name, "prompt": blank_text(one.prompt)} for one in served.record.own_tasks
    ]
    # One of others that has a chat template is talked to, though nothing is known of its training.
    form = served.record.form if served.chat is None else "conversations"
    return {"name": served.name, "form": form, "tasks": tasks}


def page_routes(models: ServedModels, batcher: Batcher, limits: Limits) -> list[Route]:
    """The page's files, and the answers to its own questions."""

    async def names(_: Request) -> Response:
        return JSONResponse({"models": [_described(served) for served in models.values()]})

    def answering(path: str, kind: type[_PageRequest]) -> Route:
        async def answer(request: Request) -> Response:
            asked = parsed(kind, await read_body(request, limits))
            return JSONResponse(await run_in_threadpool(asked.answer, models, batcher))

        return Route(path, answer, methods=["POST"])

    # Where nobody writes recipes, the page is a conversation, of the same parts.
    cooks = any(served.record.knows_recipes for served in models.values())
    pages = page_files() if cooks else page_files(TALK, (PAGE / name for name in _SHARED))
    return [
        *pages,
        Route("/api/models", names),
        answering("/api/prompt", _Wish),
        answering("/api/score", _WrittenText),
        answering("/api/classes", _Classified),
        answering("/api/shopping-list", _Purchase),
    ]
