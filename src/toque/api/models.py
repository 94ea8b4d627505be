"""Models from Python: generate, classify, export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toque.workflows.results import Answer, Model, Written, folder_of

if TYPE_CHECKING:
    from toque.models.loading.verify_export import Exported


def generate(
    run_or_model: Model,
    prompts: str | Sequence[str] = (),
    *,
    file: str | Path | None = None,
    adapters: Sequence[str | Path] = (),
    n: int = 1,
    temperature: float = 0.7,
    top_p: float = 0.95,
    max_new_tokens: int | None = None,
    seed: int = 0,
    raw: bool = False,
) -> list[Written]:
    """Write texts for prompts.

    Args:
        run_or_model: what writes.
        prompts: "dish" or "dish: a, b, c", one or several.
        file: more prompts, one a line or as JSON lines.
        adapters: adapter folders; each writes every text.
        n: texts for each prompt; they follow each other.
        temperature: 0 takes the likeliest token every time.
        top_p: sample from the likeliest tokens that together have this probability.
        max_new_tokens: longest text; what the model was trained on when None.
        seed: the same seed writes the same texts.
        raw: send prompts as they are, not in the form the model was trained on.

    Raises:
        ConfigError: no prompt, or a number out of range.
        DataError: a file that cannot be read.
        CheckpointError: a run without a checkpoint.
    """
    from toque.workflows.generate import generate as workflow

    texts = workflow(
        folder_of(run_or_model),
        _several(prompts),
        file=None if file is None else Path(file),
        adapters=[Path(folder) for folder in adapters],
        n=n,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        raw=raw,
    )
    return list(texts)


def classify(
    run_or_model: Model,
    prompts: str | Sequence[str] = (),
    *,
    file: str | Path | None = None,
    task: str | None = None,
    choices: Sequence[str] = (),
    raw: bool = False,
) -> list[Answer]:
    """Choose one of a few answers for each prompt, with the probability of each.

    Args:
        run_or_model: what chooses.
        prompts: "dish: a, b, c" for a task; a question as it is for choices.
        file: more prompts, one a line or as JSON lines.
        task: nutrition, difficulty or cuisine.
        choices: answers of your own instead, two or more.
        raw: send prompts as they are, not in the form the model was trained on.

    Raises:
        ConfigError: no prompt, a task the run did not learn, or fewer than two choices.
        DataError: a file that cannot be read.
    """
    from toque.workflows.classify import classify as workflow

    asked, lines = _several(prompts), None if file is None else Path(file)
    folder = folder_of(run_or_model)
    return list(workflow(folder, asked, file=lines, task=task, choices=choices, raw=raw))


def export(run_or_model: Model, to: str | Path, *, form: str = "hf") -> Exported:
    """Write a model for use elsewhere, an adapter merged; read it back and compare.

    Args:
        run_or_model: a run, a model or an adapter folder.
        to: the folder to write; nothing may lie there.
        form: hf, a Hugging Face folder.

    Raises:
        ConfigError: neither a run nor a model, or a format that is not known.
        CheckpointError: the run is not finished, or what was written is not the same model.
    """
    from toque.workflows.export import export as workflow

    return workflow(folder_of(run_or_model), to=Path(to), form=form)


def _several(prompts: str | Sequence[str]) -> Sequence[str]:
    return [prompts] if isinstance(prompts, str) else prompts
