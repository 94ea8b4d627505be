"""Classification: the likeliest of a few answers, with the probability of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from toque.cooking.prompts import CLASSES, Task
from toque.errors import ConfigError, argument
from toque.reporter import SILENT, Reporter, counting
from toque.workflows.prompt_files import read_prompts
from toque.workflows.results import Answer, Model, existing_folder, folder_of


def classify(
    run_or_model: Model,
    prompts: str | Sequence[str] = (),
    *,
    file: str | Path | None = None,
    task: str | None = None,
    choices: Sequence[str] = (),
    raw: bool = False,
    device: str = "auto",
    reporter: Reporter = SILENT,
) -> list[Answer]:
    """Choose one of a few answers for each prompt, with the probability of each.

    Args:
        run_or_model: what chooses.
        prompts: "dish: a, b, c" for a task; a question as it is for choices.
        file: more prompts, one a line or as JSON lines.
        task: nutrition, difficulty or cuisine.
        choices: answers of your own instead, two or more.
        raw: send prompts as they are, not in the form the model was trained on.
        device: auto, the GPU where there is one; or cpu, cuda, cuda:N.
        reporter: hears of progress.

    Raises:
        ConfigError: no prompt, a task the run did not learn, or fewer than two choices.
        DataError: a file that cannot be read.
    """
    answers = _allowed(task, choices)
    asked = read_prompts(prompts, file, task=cast("Task | None", task), raw=raw)
    with reporter.working(f"reading {folder_of(run_or_model)}"):
        # With torch, which answering a mistake does without.
        from toque.evaluation.constrained_choice import choose
        from toque.workflows.open_model import open_model

        opened = open_model(existing_folder(run_or_model), device=device, reporter=reporter)
    learnt = None if opened.config is None else opened.config.data.tasks
    if task is not None and learnt is not None and task not in learnt:
        raise ConfigError(
            f"{folder_of(run_or_model)} did not learn {argument(f'task={task}')}: its data.tasks "
            f"is {', '.join(learnt)}. An answer would be chance. Train with it "
            "(docs/guides/tasks-and-curriculum.md), or ask in your own way with "
            f"{argument('choices')}."
        )
    ids = [opened.prompt_ids(prompt) for prompt in asked]
    with counting(reporter, "choosing for", "prompts") as count:
        shares = choose(opened.model, opened.codec, ids, answers, count)
    return [
        Answer(prompt, answers[int(row.argmax())], dict(zip(answers, row.tolist(), strict=True)))
        for prompt, row in zip(asked, shares, strict=True)
    ]


def _allowed(task: str | None, choices: Sequence[str]) -> tuple[str, ...]:
    """The answers a model may give.

    Raises:
        ConfigError: no such task, fewer than two choices, one twice, or choices beside a task.
    """
    if task is not None and task not in CLASSES:
        raise ConfigError(
            f"{argument('task')} is {task}. Its answer must be one of a few: {', '.join(CLASSES)} "
            f"are. Texts are written without {argument('task')}; answers of your own are "
            f"{argument('choices')}."
        )
    if task is not None and choices:
        raise ConfigError(
            f"{argument(f'task={task}')} has its own classes to choose from, and "
            f"{argument('choices')} gives others. Leave one of them out."
        )
    if task is not None:
        return CLASSES[task]
    if len(set(choices)) < len(choices) or len(choices) < 2 or not all(map(str.strip, choices)):
        raise ConfigError(
            f"{argument('choices')} are {', '.join(map(repr, choices))}. Give two answers or more, "
            f"each once: {argument('choices=Healthy')} {argument('choices=Indulgent')}."
        )
    return tuple(choices)
