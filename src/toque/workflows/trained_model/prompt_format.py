"""Prompts in a model's training format, and their description on its card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from toque.config import RunConfig
from toque.cooking.examples import question
from toque.cooking.prompts import (
    ASKS_FOR,
    CLASSES,
    QUESTIONS,
    RECIPE_TASKS,
    TASKS,
    Task,
    asks_for_a_recipe,
    dish_and_foods,
    write_prompt,
)
from toque.cooking.recipe import Recipe
from toque.data.store.store_manifest import form_of
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.chat import prompt_ids
from toque.data.tokenizer.codec import FamilyKind
from toque.errors import ConfigError, DataError, argument
from toque.models.loading.card_usage import Example
from toque.models.loading.provenance import OwnTask, Provenance
from toque.sources.documents import blank_text, fields_in, text_of
from toque.sources.records import is_filled
from toque.workflows.trained_model.training_record import (
    FOREIGN,
    UNKNOWN,
    build_record,
    writes_recipes,
)

if TYPE_CHECKING:
    from toque.evaluation.text_samples import Prompt

_DISH = ("lentil soup", ("lentils", "carrots", "cumin"))
_PROMPT_PATTERNS: Mapping[str, str] = {
    "write": f"`{write_prompt('NAME', ('a', 'b', 'c'))}`",
    "request": "`How do I make NAME?` and other free requests",
    **{task: f"`{QUESTIONS[task]}...`" for task in ("next_step", "title", *CLASSES)},
}
"""Pattern of the prompts of each recipe task, for the model card."""
_DESCRIPTIONS: Mapping[str, str] = {
    "gaps": (
        "It was trained to fill gaps in texts, as a start for further training. It does not "
        "answer prompts or generate texts yet."
    ),
    "documents": (
        "It was trained on complete texts. It continues the text of a prompt."
    ),
    "conversations": (
        "It was trained on conversations in the chat template of this folder. Talk to it with "
        "`toque chat`. A prompt is the first question of a conversation."
    ),
    "pairs": (
        "It was trained on pairs of prompts and answers. Toque sends it each prompt unchanged."
    ),
}
"""Sentence of the model card about the prompts, by the form of the training data."""


def find_task(name: str, record: Provenance, model: str | Path) -> Task | OwnTask:
    """Return the task of this name.

    A model with unknown training accepts every recipe task.

    Raises:
        ConfigError: The model did not learn the task.
    """
    own_tasks = {task.name: task for task in record.own_tasks}
    recipe_tasks = (record.tasks or ["write"]) if record.knows_recipes else []
    if name in own_tasks:
        return own_tasks[name]
    if name in recipe_tasks:
        return cast("Task", name)

    is_unknown = record is FOREIGN or record is UNKNOWN
    if is_unknown and name in TASKS:
        return name
    if is_unknown:
        reason = f"its training is unknown, and the recipe tasks are {', '.join(TASKS)}"
    elif names := [*own_tasks, *recipe_tasks]:
        reason = f"its data.tasks is {', '.join(names)}"
    else:
        reason = f"it was trained on {record.form}, which have no tasks"
    raise ConfigError(
        f"{model} was not trained for {argument(f'task={name}')}: {reason}. Its answers would be "
        "random. Train a model with the task (docs/guides/tasks-and-curriculum.md), or ask in your "
        f"own words, without {argument('task')} or with {argument('choices')}."
    )


def task_classes(task: Task | OwnTask) -> tuple[str, ...]:
    """Return the answers that a task allows, or () if it allows any text."""
    return task.classes if isinstance(task, OwnTask) else RECIPE_TASKS[task].classes


def example_prompt(record: Provenance) -> Example | None:
    """Return a prompt for the model card, or None for a model that answers no prompts."""
    if record.form == "gaps":
        return None
    if record.own_tasks:
        task = record.own_tasks[0]
        fields = dict.fromkeys(fields_in(task.prompt), "Your text")
        return fill_prompt(task, fields, "")
    if record.form == "documents":
        return "Once upon a time"
    if record.form == "pairs":
        return "Your prompt"
    if record.form == "conversations":
        return [{"role": "user", "content": "Your prompt"}]

    dish, foods = _DISH
    if writes_recipes(record):
        return write_prompt(dish, foods)
    if "request" in record.tasks:
        return f"How do I make {dish}?"
    task_name = next(task for task in TASKS if task in record.tasks)
    return f"{QUESTIONS[task_name]}{dish}"


def describe_prompts(record: Provenance) -> str:
    """Return the sentence of the model card about the prompts of the model."""
    has_own_tasks = record.own_tasks and record.form != "gaps"
    if record.form in _DESCRIPTIONS and not has_own_tasks:
        return _DESCRIPTIONS[record.form]
    if has_own_tasks:
        texts = {task.name: blank_text(task.prompt) for task in record.own_tasks}
        patterns = [
            f"{name}: `{text}`".replace("\n", "\\n") for name, text in texts.items()
        ]
    else:
        patterns = [_PROMPT_PATTERNS[task] for task in record.tasks or ["write"]]
    noun = "prompts" if len(patterns) > 1 else "prompt"
    return f"The {noun} it was trained on: {', '.join(patterns)}."


def rewrite_prompt(typed: str, record: Provenance) -> str:
    """Rewrite a typed prompt for a model of recipes in the format of its training prompts.

    >>> rewrite_prompt("Create a simple pasta dish", Provenance(form="recipes", max_new_tokens=9))
    'Generate recipe for: simple pasta dish'
    """
    if not record.knows_recipes or typed.lstrip().startswith(ASKS_FOR):
        return typed
    reads_requests = "request" in record.tasks
    if reads_requests and asks_for_a_recipe(typed):
        return typed
    title, foods = dish_and_foods(typed)
    if writes_recipes(record):
        return write_prompt(title, foods)
    if not reads_requests:
        return typed
    if not foods:
        return f"How do I make {title}?"
    return f"Please tell me how to make {title} with {', '.join(foods)}."


def encode_sample_prompts(
    config: RunConfig, store: TokenStore, *, encoder: bool
) -> list[Prompt]:
    """Encode `evaluation.prompts` in the format that the model is trained on."""
    from toque.evaluation.text_samples import Prompt  # loads torch

    codec = store.codec()
    record = build_record(config, store.manifest)
    kind: FamilyKind = "encoder-decoder" if encoder else "decoder"
    form = form_of(entry.reader for entry in store.manifest.sources)
    prompts = []
    for typed in config.evaluation.prompts:
        text = rewrite_prompt(typed, record)
        ids = tuple(prompt_ids(codec, text, kind, form))
        prompts.append(Prompt(ids, text, typed=None if typed == text else typed))
    return prompts


def format_prompt(prompt: str, task: Task | None) -> str:
    """Format a typed text, e.g. "dish: a, b, c", as the prompt of a recipe task.

    >>> format_prompt("lentil soup: lentils, cumin", "write")
    'Generate recipe for: lentil soup using ingredients: lentils, cumin'
    """
    if task in (None, "request") or (task == "write" and prompt.startswith(ASKS_FOR)):
        return prompt
    if task == "write":
        return write_prompt(*dish_and_foods(prompt))
    title, colon, listed = prompt.partition(":")
    if task == "title" and not colon:
        listed = title  # the ingredients of a dish without a name
    ingredients = tuple(line.strip() for line in listed.split(",") if line.strip())
    return format_recipe(Recipe(title.strip(), ingredients, ()), task)


def format_recipe(recipe: Recipe, task: Task) -> str:
    """Format the known parts of a recipe as the prompt of a recipe task."""
    if task == "write":
        return write_prompt(recipe.title, recipe.ingredients)
    return question(task, recipe)


def fill_prompt(task: OwnTask, record: Mapping[str, Any], where: str) -> str:
    """Fill the prompt of the user's own task with the fields of a record.

    Raises:
        DataError: The record has no text for any field of the prompt.
    """
    fields = fields_in(task.prompt)
    text, unreadable_field = text_of(record, task.prompt, Counter())
    if unreadable_field or not any(is_filled(record.get(field)) for field in fields):
        raise DataError(
            f"{where} has no text in {unreadable_field or ' or '.join(fields)}, but the prompt of "
            f"data.tasks.{task.name} needs it. The fields of the record are "
            f"{', '.join(record) or 'none'}. To send a prompt unchanged, write "
            '{"prompt": "..."}.'
        )
    return text
