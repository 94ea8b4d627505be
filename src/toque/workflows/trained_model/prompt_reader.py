"""Reader of prompts from arguments and from a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from toque.cooking.prompts import Task
from toque.cooking.recipe import Recipe
from toque.cooking.schemas.columns import prompt_of
from toque.errors import ConfigError, DataError, argument
from toque.models.loading.provenance import OwnTask
from toque.sources.documents import fields_in
from toque.user_paths import named_path
from toque.workflows.trained_model.prompt_format import (
    fill_prompt,
    format_prompt,
    format_recipe,
)

Prompts = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
"""One prompt or several. Each is a text or a record of fields."""


class ReadPrompt(NamedTuple):
    """A prompt in the model's training format, and its position in a call or a file."""

    where: str
    text: str
    target: str | None = None
    """Text in the field `target` of a record."""


def read_prompts(
    prompts: Prompts,
    file: str | Path | None,
    *,
    task: Task | OwnTask | None,
    raw: bool,
    recipes: bool = True,
    blanks: bool = False,
) -> list[ReadPrompt]:
    """Read the prompts of a call and of a file, in the model's training format.

    A line of the file is a text or a JSON object. An object has the field `prompt`, or the fields
    `title`, `ingredients` and `steps` of a recipe, or the fields of the user's own task. Its field
    `target` is optional. `prompts` may have the same objects.

    Args:
        prompts: The prompts of the call.
        file: A file with more prompts.
        task: The task that texts are rewritten for, or None to leave them unchanged.
        raw: Leave texts unchanged.
        recipes: Whether the model was trained on recipes.
        blanks: Allow blank prompts, from which the model begins a text.

    Raises:
        ConfigError: `prompts` and `file` are empty, or a prompt is blank or not UTF-8 text.
        DataError: The file cannot be read, or a record has no prompt.
    """
    goal, example = _describe_goal(task)
    # A model that was not trained on recipes does not know the format of their prompts.
    known_task = None if task == "write" and not recipes else task
    lines = chain(
        _list_prompts(prompts), () if file is None else _read_lines(named_path(file))
    )
    read = []
    for where, line in lines:
        if isinstance(line, str):
            content = line
            text = line if raw else _format_text(line, where, known_task)
        elif isinstance(line, Mapping):
            content, text = _read_record(line, where, known_task)
        else:
            raise ConfigError(
                f"{where} must be a text, e.g. {argument(example)}, or a record of named "
                f"fields, not a {type(line).__name__} ({str(line)[:60]!r})."
            )
        # Punctuation of "dish: a, b" alone is blank too.
        is_blank = not content.strip(" \t\r\n:,")
        if is_blank and not blanks:
            raise ConfigError(
                f"The prompt at {where} is blank, so there is nothing to {goal}. Write a prompt "
                f"such as {argument(example)}, or remove this one."
            )
        check_utf8(text, f"The prompt at {where}")
        target = line.get("target") if isinstance(line, Mapping) else None
        read.append(
            ReadPrompt(where, text, target if isinstance(target, str) else None)
        )

    if not read:
        raise ConfigError(
            f"Nothing to {goal}. Give {argument(example)} or {argument('file=prompts.txt')}."
        )
    return read


def _describe_goal(task: Task | OwnTask | None) -> tuple[str, str]:
    """Return what the model does with a prompt, and an example of a prompt, for messages."""
    if isinstance(task, OwnTask):
        return "answer", 'prompts="your text"'
    if task == "write":
        return "generate from", 'prompts="lentil soup"'
    return "answer", 'prompts="lentil soup: 200 g lentils, 1 onion"'


def _list_prompts(prompts: object) -> Iterator[tuple[str, object]]:
    """Yield each prompt of a call with its position."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        prompts = [prompts]
    for number, prompt in enumerate(prompts, start=1):
        yield f"{argument('prompts')}, number {number}", prompt


def _format_text(typed: str, where: str, task: Task | OwnTask | None) -> str:
    if isinstance(task, OwnTask):
        return _fill_prompt_with_text(task, typed, where)
    return format_prompt(typed, task)


def _read_record(
    record: Mapping[str, Any], where: str, task: Task | OwnTask | None
) -> tuple[str, str]:
    """Return the content of a record's prompt, which must not be blank, and the prompt."""
    if isinstance(task, OwnTask):
        has_fields = not record.keys().isdisjoint(fields_in(task.prompt))
        if has_fields or "prompt" not in record:
            text = fill_prompt(task, record, where)
            return text, text
    if isinstance(record.get("prompt"), str):
        return record["prompt"], prompt_of(record)

    title = record.get("title")
    # The task "title" asks for the title, so its records do not need one.
    lacks_title = not isinstance(title, str) and task != "title"
    if task is None or isinstance(task, OwnTask) or lacks_title:
        raise DataError(
            f'{where} has no "prompt", and no "title" for a recipe or a {argument("task")}. Write '
            '{"prompt": "..."} or {"title": "...", "ingredients": ["2 eggs"], "steps": ["..."]} on '
            "each line."
        )
    recipe = Recipe(
        title if isinstance(title, str) else "",
        _read_texts(record, "ingredients", where),
        _read_texts(record, "steps" if "steps" in record else "directions", where),
    )
    content = " ".join((recipe.title, *recipe.ingredients))
    return content, format_recipe(recipe, task)


def _fill_prompt_with_text(task: OwnTask, typed: str, where: str) -> str:
    """Fill the only field of a task's prompt with a text. A blank text stays unchanged.

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
    if not typed.strip():
        return typed
    return fill_prompt(task, dict.fromkeys(fields, typed), where)


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
