"""Classification of prompts: the most likely of a few answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toque.errors import ConfigError, argument
from toque.reporter import SILENT, Reporter, counting
from toque.workflows.results import Answer, Model
from toque.workflows.trained_model.folders import check_model
from toque.workflows.trained_model.prompt_format import find_task, task_classes
from toque.workflows.trained_model.prompt_reader import check_utf8, read_prompts
from toque.workflows.trained_model.training_record import read_record

if TYPE_CHECKING:
    from toque.workflows.inference.open_model import OpenedModel


def classify(
    run_or_model: Model,
    prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = (),
    *,
    file: str | Path | None = None,
    task: str | None = None,
    choices: Sequence[str] = (),
    raw: bool = False,
    device: str = "auto",
    reporter: Reporter = SILENT,
) -> list[Answer]:
    """Choose one of a few answers for each prompt, with the probability of each answer.

    Args:
        run_or_model: The run or model that chooses.
        prompts: "dish: a, b, c" for a task, or a complete question for choices. For a task of the
            run, a prompt is the text that the task is about, or a record with the fields of the
            task's prompt.
        file: A file with more prompts, one per line or as JSON lines.
        task: A task with classes that the model learned: nutrition, difficulty, cuisine, or a
            task of the run.
        choices: Two or more answers of your own, in place of a task.
        raw: Send prompts unchanged, not in the training format.
        device: auto (the GPU, if present), cpu, cuda or cuda:N.
        reporter: Receives the progress.

    Raises:
        ConfigError: A prompt is missing, a prompt leaves no context for an answer, the run did
            not learn the task, or there are fewer than two choices.
        DataError: A file cannot be read.
    """
    folder = check_model(run_or_model)
    if task is None:
        known_task = None
        answers = _check_choices(choices)
    else:
        known_task = find_task(task, read_record(folder), folder)
        answers = _check_classes(task, task_classes(known_task), choices)
    parsed_prompts = read_prompts(prompts, file, task=known_task, raw=raw)
    with reporter.working(f"reading {folder}"):
        # Torch is loaded only after all arguments are checked.
        from toque.evaluation.constrained_choice import choose
        from toque.workflows.inference.open_model import open_model

        opened = open_model(folder, device=device, reporter=reporter)
    ids = [opened.prompt_ids(prompt.text, raw=raw) for prompt in parsed_prompts]
    places = [prompt.where for prompt in parsed_prompts]
    _check_context_length(ids, answers, opened, places=places)

    with counting(reporter, "choosing for", "prompts") as count:
        probabilities = choose(opened.model, opened.codec, ids, answers, count)
    return [
        Answer(
            prompt.text,
            answers[int(row.argmax())],
            dict(zip(answers, row.tolist(), strict=True)),
        )
        for prompt, row in zip(parsed_prompts, probabilities, strict=True)
    ]


def _check_context_length(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[str],
    opened: OpenedModel,
    *,
    places: Sequence[str],
) -> None:
    """Check that every prompt leaves enough context for the longest answer.

    Raises:
        ConfigError: A prompt is too long.
    """
    from toque.models.config_values import max_positions

    codec = opened.codec
    context_length = max_positions(opened.model.config)
    if context_length is None or opened.model.config.is_encoder_decoder:
        return
    longest = max(len(codec.encode(codec.normalise(answer))) for answer in answers)
    for where, prompt in zip(places, prompts, strict=True):
        # The model never reads the end token, so it needs no position.
        if len(prompt) + longest > context_length:
            raise ConfigError(
                f"The prompt at {where} has {len(prompt)} tokens and the longest answer {longest}, "
                f"but this model's context length is only {context_length}. Shorten the prompt."
            )


def _check_classes(
    task: str, classes: tuple[str, ...], choices: Sequence[str]
) -> tuple[str, ...]:
    """Return the classes of a task, or raise a ConfigError without classes or with choices."""
    if not classes:
        raise ConfigError(
            f"{argument(f'task={task}')} has no classes. Use toque.generate to generate its "
            f"answers, or name your own answers with {argument('choices')}."
        )
    if choices:
        raise ConfigError(
            f"{argument('choices')} and {argument(f'task={task}')} cannot be combined, because "
            "the task has its own classes. Use one of them."
        )
    return classes


def _check_choices(choices: Sequence[str]) -> tuple[str, ...]:
    """Return the choices, or raise a ConfigError if they are not two or more different texts."""
    example = argument("choices=['Healthy', 'Indulgent']")
    allowed = f"Give two or more different answers, e.g. {example}."
    # A single text is a sequence of characters.
    is_list = not isinstance(choices, str)
    if not is_list or not all(isinstance(choice, str) for choice in choices):
        raise ConfigError(
            f"{argument('choices')} must be a list of texts, not {choices!r}. {allowed}"
        )
    for choice in choices:
        check_utf8(choice, argument(f"choices={choice}"))
    has_blank = not all(choice.strip() for choice in choices)
    if has_blank or len(choices) < 2 or len(set(choices)) < len(choices):
        raise ConfigError(
            f"{argument('choices')} must not be {', '.join(map(repr, choices))}. {allowed}"
        )
    return tuple(choices)
