"""Classification: the likeliest of a few answers, with the probability of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Final, cast

import numpy as np

from toque.cooking.prompts import CLASSES, Task
from toque.cooking.recipe import Recipe
from toque.cooking.tasks import question
from toque.data.prepare.example_rows import prompt_ids
from toque.data.prepare.settings import FamilyKind
from toque.errors import ConfigError, DataError, argument
from toque.evaluation.constrained_choice import Chooser
from toque.models.forward.loss import log_probabilities
from toque.workflows.assembly.task_scores import answer_ids
from toque.workflows.open_model import OpenedModel, open_model
from toque.workflows.prompt_files import lines_of
from toque.workflows.results import Answer

_EXAMPLE: Final = 'prompts="lentil soup: 200 g lentils, 1 onion"'


def classify(
    run_or_model: str | Path,
    prompts: Sequence[str] = (),
    *,
    file: Path | None = None,
    task: str | None = None,
    choices: Sequence[str] = (),
    raw: bool = False,
) -> Iterator[Answer]:
    """Choose the likeliest of a few answers for every prompt, in order.

    Arguments and errors are those of `toque.api.classify`.
    """
    asked = questions(prompts, file, task=task, raw=raw)
    return _answers(str(run_or_model), asked, allowed(task=task, choices=choices), task)


def questions(
    prompts: Sequence[str], file: Path | None, *, task: str | None, raw: bool
) -> list[str]:
    """Prompts as a model reads them, those of a file after those of the command line.

    Args:
        prompts: of a task "dish: a, b, c"; else, or with `raw`, taken as they are.
        file: a prompt a line, or JSON lines with `prompt`, or for a task with `title`,
            `ingredients` and `steps`.
        task: whose question is asked; None for prompts of one's own.
        raw: take all prompts as they are.

    Raises:
        ConfigError: no prompt, or no class task of this name.
        DataError: a file that cannot be read.
    """
    if task is not None and task not in CLASSES:
        raise ConfigError(
            f"{argument('task')} is {task}. Its answer must be one of a few: {', '.join(CLASSES)} "
            f"are. Texts are written without {argument('task')}; answers of your own are "
            f"{argument('choices')}."
        )
    asked = [_asked(p, task, raw=raw) for p in prompts]
    for where, line in lines_of(file) if file is not None else ():
        if isinstance(line, str):
            asked.append(_asked(line, task, raw=raw))
        elif isinstance(line.get("prompt"), str):
            asked.append(line["prompt"])
        elif task is not None and isinstance(line.get("title"), str):
            lines, steps = line.get("ingredients"), line.get("steps", line.get("directions"))
            asked.append(question(task, Recipe(line["title"], _texts(lines), _texts(steps))))
        else:
            raise DataError(
                f'{where} has neither "prompt" nor, for a {argument("task")}, "title". Write '
                '{"prompt": "..."} or {"title": "...", "ingredients": ["2 eggs"], "steps": '
                '["..."]}.'
            )
    if not asked:
        raise ConfigError(f"Nothing to answer. Give {argument(_EXAMPLE)} or {argument('file')}.")
    return asked


def allowed(*, task: str | None, choices: Sequence[str]) -> tuple[str, ...]:
    """The answers a model may give.

    Raises:
        ConfigError: fewer than two, one twice, or a task's classes and others.
    """
    if task is not None and choices:
        raise ConfigError(
            f"{argument(f'task={task}')} has its own classes to choose from, and "
            f"{argument('choices')} gives others. Leave one of them out."
        )
    if task is not None:
        return CLASSES[cast("Task", task)]
    if len(set(choices)) < len(choices) or len(choices) < 2 or not all(map(str.strip, choices)):
        raise ConfigError(
            f"{argument('choices')} are {', '.join(map(repr, choices))}. Give two answers or more, "
            f"each once: {argument('choices=Healthy')} {argument('choices=Indulgent')}."
        )
    return tuple(choices)


def _answers(
    path: str, prompts: Sequence[str], choices: Sequence[str], task: str | None
) -> Iterator[Answer]:
    opened = open_model(path)
    learnt = None if opened.config is None else opened.config.data.tasks
    if task is not None and learnt is not None and task not in learnt:
        raise ConfigError(
            f"{path} did not learn {argument(f'task={task}')}: its data.tasks is "
            f"{', '.join(learnt)}. An answer would be chance. Train with it "
            "(docs/guides/tasks-and-curriculum.md), or ask in your own way with "
            f"{argument('choices')}."
        )
    shares = _probabilities(opened, prompts, choices)
    for prompt, row in zip(prompts, shares, strict=True):
        found = dict(zip(choices, row.tolist(), strict=True))
        yield Answer(prompt, choices[int(row.argmax())], found)


def _probabilities(
    opened: OpenedModel, prompts: Sequence[str], choices: Sequence[str]
) -> np.ndarray:
    """[prompts, choices] shares that sum to 1 over the choices."""
    model, codec = opened.model, opened.codec
    encoder = bool(model.config.is_encoder_decoder)
    kind: FamilyKind = "encoder-decoder" if encoder else "decoder"
    choose = Chooser(
        log_probabilities=log_probabilities,
        autocast=nullcontext,
        device=model.device,
        encoder=encoder,
        pad_id=codec.pad_id,
        start_id=getattr(model.config, "decoder_start_token_id", None) or 0,
    )
    ids = [np.array(prompt_ids(codec, prompt, kind), np.int64) for prompt in prompts]
    return choose(model, ids, [answer_ids(codec, choice) for choice in choices])


def _asked(prompt: str, task: str | None, *, raw: bool) -> str:
    """What is asked of "dish" or "dish: a, b, c", as a person types it."""
    if raw or task not in CLASSES:
        return prompt
    title, _, listed = prompt.partition(":")
    lines = tuple(line.strip() for line in listed.split(",") if line.strip())
    return question(task, Recipe(title.strip(), lines, ()))


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()
