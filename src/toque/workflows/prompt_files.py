"""Prompts of a call and of a prompt file: lines of text, or JSON objects, one a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from toque.cooking.examples import question
from toque.cooking.prompts import ASKS_FOR, Task, dish_and_foods, write_prompt
from toque.cooking.recipe import Recipe
from toque.cooking.schemas.columns import prompt_of
from toque.errors import ConfigError, DataError, argument

_DISH: Final = 'prompts="lentil soup"'
_RECIPE: Final = 'prompts="lentil soup: 200 g lentils, 1 onion"'


def read_prompts(
    prompts: str | Sequence[str],
    file: str | Path | None,
    *,
    task: Task | None,
    raw: bool,
    recipes: bool = True,
    blanks: bool = False,
) -> list[str]:
    """Prompts as a model reads them, those of a file after those of the call.

    Args:
        prompts: "dish" or "dish: a, b, c", one or several; without a task, or with `raw`, taken as
            they are.
        file: a prompt a line, or JSON lines with `prompt` (a `system` before and a `context` or
            `input` behind it are parts of it, as in training), or for a task with `title`,
            `ingredients` and `steps`.
        task: write, or the task whose question is asked; None for prompts of one's own.
        raw: take all prompts as they are.
        recipes: whether the model was trained to write recipes; one that was not is sent prompts
            as they are.
        blanks: allow a prompt of nothing, from which a model of whole texts begins one.

    Raises:
        ConfigError: no prompt, or one of nothing.
        DataError: a file that cannot be read.
    """
    wish, example = ("write for", _DISH) if task == "write" else ("answer", _RECIPE)
    if task == "write" and not recipes:
        task = None
    typed = [prompts] if isinstance(prompts, str) else prompts
    asked = [trained_prompt(prompt, None if raw else task) for prompt in typed]
    said = [(f"{argument('prompts')}, number {n}", text) for n, text in enumerate(typed, start=1)]
    for where, line in _lines(Path(file)) if file is not None else ():
        said.append((where, line if isinstance(line, str) else _said(line)))
        if isinstance(line, str):
            asked.append(trained_prompt(line, None if raw else task))
        elif isinstance(line.get("prompt"), str):
            asked.append(prompt_of(line))
        elif task is not None and isinstance(line.get("title"), str):
            steps = line.get("steps", line.get("directions"))
            recipe = Recipe(line["title"], _texts(line.get("ingredients")), _texts(steps))
            asked.append(_trained_form(task, recipe))
        else:
            raise DataError(
                f'{where} has neither "prompt" nor, for a recipe or a {argument("task")}, "title". '
                'Write {"prompt": "..."} or {"title": "...", "ingredients": ["2 eggs"], "steps": '
                '["..."]} on each line.'
            )
    if not asked:
        raise ConfigError(
            f"Nothing to {wish}. Give {argument(example)} or {argument('file=prompts.txt')}."
        )
    blank = next((where for where, text in said if not text.strip(" \t\r\n:,")), None)
    if blank is not None and not blanks:
        raise ConfigError(
            f"The prompt at {blank} is blank, so there is nothing to {wish}. Say what is wanted, "
            f"as in {argument(example)}, or leave it out."
        )
    return asked


def _said(line: dict[str, Any]) -> str:
    """Request of a JSON object, in one text."""
    if isinstance(line.get("prompt"), str):
        return str(line["prompt"])
    return " ".join((str(line.get("title")), *_texts(line.get("ingredients"))))


def trained_prompt(prompt: str, task: Task | None) -> str:
    """The trained form of what a person types: "dish", "dish: a, b, c", "make me a dish".

    >>> trained_prompt("lentil soup: lentils, cumin", "write")
    'Generate recipe for: lentil soup using ingredients: lentils, cumin'
    """
    if task is None or (task == "write" and prompt.startswith(ASKS_FOR)):
        return prompt
    if task == "write":
        return write_prompt(*dish_and_foods(prompt))
    title, _, listed = prompt.partition(":")
    lines = tuple(line.strip() for line in listed.split(",") if line.strip())
    return _trained_form(task, Recipe(title.strip(), lines, ()))


def _trained_form(task: Task, recipe: Recipe) -> str:
    if task == "write":
        return write_prompt(recipe.title, recipe.ingredients)
    return question(task, recipe)


def _texts(value: object) -> tuple[str, ...]:
    value = value.splitlines() if isinstance(value, str) else value
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _lines(file: Path) -> Iterator[tuple[str, str | dict[str, Any]]]:
    """Place of each line, and its text or its JSON object; blank lines are left out."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
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
            raise DataError(f"{where} looks like JSON and is not: {error}.") from error
