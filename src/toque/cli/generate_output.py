"""`toque generate`: prompts in, texts or answers out, for people or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from toque.errors import ConfigError
from toque.workflows.classify import Answer, allowed, answers, questions
from toque.workflows.generate import SamplingParams, WrittenText, asked_for, write_texts

__all__ = ["SamplingParams", "run_generation"]


def run_generation(
    path: str,
    *,
    prompts: Sequence[str],
    file: Path | None,
    task: str | None,
    choices: Sequence[str],
    adapters: Sequence[Path],
    manner: SamplingParams,
    raw: bool,
    as_json: bool,
) -> Iterator[str]:
    """What is to be printed, a text or an answer at a time.

    Args:
        path: a run, a model folder or a hub name.
        prompts: as a person types them.
        file: more of them, a line each.
        task: whose classes are chosen from; None for texts, or for `choices`.
        choices: answers to choose from.
        adapters: folders; every text is written with each.
        manner: how texts are written; answers are the likeliest ones.
        raw: send prompts as they are.
        as_json: JSON objects instead of texts for people.

    Raises:
        ConfigError: no prompt, or settings that do not go together.
        DataError: a file that cannot be read.
    """
    found: Iterable[WrittenText | Answer]
    if task is None and not choices:
        found = write_texts(path, asked_for(prompts, file, raw=raw), manner, adapters=adapters)
    elif adapters:
        raise ConfigError(
            "--adapter writes texts with each of several adapters, and --task and --choices ask "
            "one model. Name the adapter's own folder as the model."
        )
    else:
        asked = questions(prompts, file, task=task, raw=raw)
        found = answers(path, asked, allowed(task=task, choices=choices), task=task)
    for each in found:
        yield json.dumps(each.record(), ensure_ascii=False) if as_json else each.shown()
