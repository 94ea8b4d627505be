"""Generation of texts from prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from toque.errors import ConfigError, argument
from toque.reporter import SILENT, Reporter, counting
from toque.workflows.prompt_files import read_prompts
from toque.workflows.results import Model, Written, existing_folder

_DEFAULT_NEW_TOKENS: Final = 256
"""Longest text of a model that is not a run's."""


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
    reporter: Reporter = SILENT,
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
        reporter: hears of progress.

    Raises:
        ConfigError: no prompt, or a number out of range.
        DataError: a file that cannot be read.
        CheckpointError: a run without a checkpoint.
    """
    if n < 1 or temperature < 0 or not 0 < top_p <= 1:
        name_n, name_t, name_p = map(argument, ("n", "temperature", "top_p"))
        raise ConfigError(
            f"{name_n} is {n}, {name_t} {temperature:g} and {name_p} {top_p:g}. "
            f"Allowed: {name_n} from 1, {name_t} from 0, {name_p} above 0 and up to 1."
        )
    model = existing_folder(run_or_model)
    asked = read_prompts(prompts, file, task="write", raw=raw)
    each = [text for text in asked for _ in range(n)]
    with reporter.working(f"reading {model}"):
        # With torch, which answering a mistake does without.
        from toque.models.generation.engine import generate as generate_ids
        from toque.models.lora.files import load_adapter
        from toque.workflows.open_model import open_model

        opened = open_model(model)
    usual = _DEFAULT_NEW_TOKENS if opened.config is None else opened.config.data.max_target_tokens
    ids = [opened.prompt_ids(text) for text in each]
    texts = []
    for i, adapter in enumerate(adapters or [None]):
        if adapter is not None:
            load_adapter(opened.model, Path(adapter), name=f"adapter_{i}")
        with counting(reporter, "writing", "texts") as count:
            written = generate_ids(
                opened.model,
                ids,
                max_new_tokens=max_new_tokens or usual,
                eos_id=opened.codec.eos_id,
                pad_id=opened.codec.pad_id,
                strategy="sample" if temperature > 0 else "greedy",
                temperature=temperature or 1.0,
                top_p=top_p,
                seed=seed,
                on_progress=count,
            )
        own = None if adapter is None else str(adapter)
        texts += [
            Written(prompt, opened.codec.decode(found), len(found), own)
            for prompt, found in zip(each, written, strict=True)
        ]
    return texts
