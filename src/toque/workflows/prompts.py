"""Prompts of a call or a file, in the format that a model was trained on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

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
from toque.cooking.schemas.columns import prompt_of
from toque.data.store.store_manifest import form_of
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.chat import prompt_ids
from toque.data.tokenizer.codec import FamilyKind
from toque.errors import ConfigError, DataError, argument
from toque.models.loading.card_usage import Example
from toque.models.loading.provenance import OwnTask, Provenance
from toque.sources.documents import blank_text, fields_in, text_of
from toque.sources.records import is_filled
from toque.user_paths import named_path
from toque.workflows.model_record import (
    FOREIGN,
    UNKNOWN,
    build_record,
    writes_recipes,
)

if TYPE_CHECKING:
    from toque.evaluation.text_samples import Prompt

_DISH: Final = ("lentil soup", ("lentils", "carrots", "cumin"))
_PROMPT_PATTERNS: Final[Mapping[str, str]] = {
    "write": f"`{write_prompt('NAME', ('a', 'b', 'c'))}`",
    "request": "`How do I make NAME?` and other free requests",
    **{task: f"`{QUESTIONS[task]}...`" for task in ("next_step", "title", *CLASSES)},
}
"""Pattern of the prompts of each recipe task, for the model card."""


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
        f"{model} did not learn {argument(f'task={name}')}: {reason}. Its answers would be random. "
        "Train a model with the task (docs/guides/tasks-and-curriculum.md), or ask in your own "
        f"words, without {argument('task')} or with {argument('choices')}."
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
        return _fill_prompt(
            task, dict.fromkeys(fields_in(task.prompt), "Your text"), ""
        )
    if record.form == "documents":
        return "Once upon a time"
    if record.form == "pairs":
        return "Your prompt"
    if record.form == "conversations":
        return [{"role": "user", "content": "Your prompt"}]
    if writes_recipes(record):
        return write_prompt(*_DISH)
    if "request" in record.tasks:
        return f"How do I make {_DISH[0]}?"
    task_name = next(task for task in TASKS if task in record.tasks)
    return f"{QUESTIONS[task_name]}{_DISH[0]}"


def describe_prompts(record: Provenance) -> str:
    """Return the sentence of the model card about the prompts of the model."""
    if record.form == "gaps":
        return (
            "It was trained to fill gaps in texts, as a start for further training. It does not "
            "answer prompts or write texts yet."
        )
    if record.own_tasks:
        texts = {task.name: blank_text(task.prompt) for task in record.own_tasks}
        patterns = [
            f"{name}: `{text}`".replace("\n", "\\n") for name, text in texts.items()
        ]
    elif record.form == "documents":
        return "It was trained on complete texts. It continues the text of a prompt."
    elif record.form == "conversations":
        return (
            "It was trained on conversations in the chat template of this folder. Talk to it with "
            "`toque chat`. A prompt is the first question of a conversation."
        )
    elif record.form == "pairs":
        return (
            "It was trained on pairs of prompts and answers. Toque sends it each "
            "prompt unchanged."
        )
    else:
        patterns = [_PROMPT_PATTERNS[task] for task in record.tasks or ["write"]]
    noun = "prompts" if len(patterns) > 1 else "prompt"
    return f"The {noun} it was trained on: {', '.join(patterns)}."


def rewrite_prompt(typed: str, record: Provenance) -> str:
    """Rewrite a typed prompt in the model's training format, if a rewritten form is closer to it.

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
    """Encode `evaluation.prompts` in the format that the model was trained on."""
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


class ReadPrompt(NamedTuple):
    """A prompt in the model's training format, and its position in a call or a file."""

    where: str
    text: str


def read_prompts(
    prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
    file: str | Path | None,
    *,
    task: Task | OwnTask | None,
    raw: bool,
    recipes: bool = True,
    blanks: bool = False,
) -> list[ReadPrompt]:
    """Read the prompts of a call and of a file, in the model's training format.

    A line of the file is a text or a JSON object. An object has the field `prompt`, or the fields
    `title`, `ingredients` and `steps` of a recipe, or the fields of the user's own task. `prompts`
    may have the same objects.

    Args:
        prompts: The prompts of the call.
        file: A file with more prompts.
        task: The task that texts are rewritten for, or None to leave them unchanged.
        raw: Leave texts unchanged.
        recipes: Whether the model writes recipes.
        blanks: Allow blank prompts, from which the model begins a text.

    Raises:
        ConfigError: `prompts` and `file` are empty, or a prompt is blank or not UTF-8 text.
        DataError: The file cannot be read, or a record has no prompt.
    """
    goal, example = "write for", 'prompts="lentil soup"'
    own_task = None
    if isinstance(task, OwnTask):
        goal, example = "answer", 'prompts="your text"'
        own_task, task = task, None
    elif task != "write":
        goal, example = "answer", 'prompts="lentil soup: 200 g lentils, 1 onion"'
    if task == "write" and not recipes:
        task = None

    is_single = isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable)
    listed = enumerate([prompts] if is_single else prompts, start=1)
    lines = chain(
        ((f"{argument('prompts')}, number {n}", line) for n, line in listed),
        () if file is None else _read_lines(named_path(file)),
    )
    read = []
    for where, line in lines:
        if isinstance(line, str):
            content, text = line, line
            if own_task is not None and not raw:
                text = _fill_prompt_with_text(own_task, line, where)
            elif not raw:
                text = format_prompt(line, task)
        elif isinstance(line, Mapping):
            content, text = _read_record(line, where, task, own_task)
        else:
            raise ConfigError(
                f"{where} must be a text, e.g. {argument(example)}, or a record of fields by their "
                f"names, not a {type(line).__name__} ({str(line)[:60]!r})."
            )
        if not blanks and not content.strip(" \t\r\n:,"):
            raise ConfigError(
                f"The prompt at {where} is blank, so there is nothing to {goal}. Write a prompt "
                f"such as {argument(example)}, or remove this one."
            )
        check_utf8(text, f"The prompt at {where}")
        read.append(ReadPrompt(where, text))

    if not read:
        raise ConfigError(
            f"Nothing to {goal}. Give {argument(example)} or {argument('file=prompts.txt')}."
        )
    return read


def _read_record(
    record: Mapping[str, Any], where: str, task: Task | None, own_task: OwnTask | None
) -> tuple[str, str]:
    """Return the content of a record's prompt, which must not be blank, and the prompt."""
    if own_task is not None and (
        "prompt" not in record
        or not record.keys().isdisjoint(fields_in(own_task.prompt))
    ):
        text = _fill_prompt(own_task, record, where)
        return text, text
    if isinstance(record.get("prompt"), str):
        return record["prompt"], prompt_of(record)
    title = record.get("title")
    has_title = isinstance(title, str)
    if task is None or (not has_title and task != "title"):
        raise DataError(
            f'{where} has no "prompt" and, for a recipe or a {argument("task")}, no "title". '
            'Write {"prompt": "..."} or {"title": "...", "ingredients": ["2 eggs"], "steps": '
            '["..."]} on each line.'
        )
    recipe = Recipe(
        title if isinstance(title, str) else "",
        _read_texts(record, "ingredients", where),
        _read_texts(record, "steps" if "steps" in record else "directions", where),
    )
    return " ".join((recipe.title, *recipe.ingredients)), _format_recipe(task, recipe)


def _fill_prompt(task: OwnTask, record: Mapping[str, Any], where: str) -> str:
    """Return the task's prompt with the fields of a record.

    Raises:
        DataError: The record has no text for any field of the prompt.
    """
    fields = fields_in(task.prompt)
    text, unread = text_of(record, task.prompt, Counter())
    if unread or not any(is_filled(record.get(field)) for field in fields):
        raise DataError(
            f"{where} has no text in {unread or ' or '.join(fields)}, but the prompt of "
            f"data.tasks.{task.name} needs it. The fields of the record are "
            f"{', '.join(record) or 'none'}. To send a prompt unchanged, write "
            '{"prompt": "..."}.'
        )
    return text


def _fill_prompt_with_text(task: OwnTask, typed: str, where: str) -> str:
    """Return the task's prompt with a text in its only field.

    Raises:
        ConfigError: The prompt has several fields.
    """
    fields = fields_in(task.prompt)
    if len(fields) > 1:
        raise ConfigError(
            f"{where} is one text, but the prompt of data.tasks.{task.name} has {len(fields)} "
            f"fields, {', '.join(fields)}. Give records with these fields, one JSON object per "
            f"line, with {argument('file=rows.jsonl')}."
        )
    return (
        _fill_prompt(task, dict.fromkeys(fields, typed), where)
        if typed.strip()
        else typed
    )


def check_utf8(text: str, subject: str) -> None:
    """Raise a ConfigError for a text with bytes that are not UTF-8, or half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.end + 20]
        raise ConfigError(
            f"{subject} is not UTF-8 text: {around!a} contains a byte of another encoding, or half "
            "of a surrogate pair. Convert the text to UTF-8, e.g. a file with `iconv -t UTF-8`."
        ) from error


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
    lines = tuple(line.strip() for line in listed.split(",") if line.strip())
    return _format_recipe(task, Recipe(title.strip(), lines, ()))


def _format_recipe(task: Task, recipe: Recipe) -> str:
    if task == "write":
        return write_prompt(recipe.title, recipe.ingredients)
    return question(task, recipe)


def _read_texts(record: Mapping[str, Any], field: str, where: str) -> tuple[str, ...]:
    """Return a record's list of texts, or the lines of a single text.

    Raises:
        DataError: A value is not a text.
    """
    value = record.get(field)
    if value is None or isinstance(value, str):
        return tuple((value or "").splitlines())
    is_list = isinstance(value, list | tuple)
    for number, item in enumerate(value if is_list else [value], start=1):
        if not isinstance(item, str):
            subject = f"item {number} of {field}" if is_list else field
            raise DataError(
                f"{where}: {subject} is {str(item)[:100]}, which is not a text. Write {field} as a "
                'list of texts, e.g. ["2 eggs", "salt"], or leave the field out.'
            )
    return tuple(value)


def _read_lines(file: Path) -> Iterator[tuple[str, str | dict[str, Any]]]:
    """Yield the position of each line and its text or JSON object. Skip blank lines."""
    try:
        # `splitlines` would also end lines at U+2028 and other characters that texts may contain.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{argument(f'file={file}')} cannot be read as UTF-8 text: {error}."
        ) from error
    for number, line in enumerate(map(str.strip, lines), start=1):
        where = f"{file}:{number}"
        try:
            if line:
                yield where, json.loads(line) if line.startswith("{") else line
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where} starts like JSON but is not valid JSON: {error}."
            ) from error
