"""Functions of `toque` that give a workflow what a command gives it; the others are workflows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from toque.models.generation.options import GenerationOptions, Precision
from toque.reporter import SILENT, Reporter
from toque.workflows.configure import Configured, configure, with_origins
from toque.workflows.generate import OnText
from toque.workflows.generate import generate as write_texts
from toque.workflows.prepare import prepare_before_torch
from toque.workflows.results import Model, TrainedRun, Written


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
    device: str = "auto",
    on_text: OnText | None = None,
    precision: Precision = "float32",
    must_use: bool = False,
    reporter: Reporter = SILENT,
) -> list[Written]:
    """Write texts for prompts.

    Args:
        run_or_model: what writes.
        prompts: "dish" or "dish: a, b, c" for a model of recipes; one trained on prompts, texts or
            tokens of your own gets them as they are. One or several.
        file: more prompts, one a line or as JSON lines.
        adapters: adapter folders; each writes every text.
        n: texts for each prompt; they follow each other.
        temperature: 0 takes the likeliest token every time.
        top_p: sample from the likeliest tokens that together have this probability.
        max_new_tokens: longest text; what the model was trained on when None.
        seed: the same seed writes the same texts.
        raw: send prompts as they are, not in the form the model was trained on.
        device: auto, the GPU where there is one; or cpu, cuda, cuda:N.
        on_text: called with the number of a text and the text so far whenever it has grown, one
            text after the other in their order.
        precision: of the matrix products. bf16 is faster where the processor has it; where two
            tokens are about equally likely, a text may then part from float32's, and depend on
            what is written beside it. auto: bf16 there, float32 elsewhere.
        must_use: hold recipes to their form and to the ingredients of their prompts.
        reporter: hears of progress, where nobody hears of the texts themselves.

    Raises:
        ConfigError: no prompt, a number out of range, no such device, or `must_use` where it cannot
            be.
        DataError: a file that cannot be read.
        CheckpointError: a run without a checkpoint, or a damaged record of how it was trained.
    """
    options = GenerationOptions(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        precision=precision,
    )
    return write_texts(
        run_or_model,
        prompts,
        options,
        file=file,
        adapters=adapters,
        n=n,
        raw=raw,
        device=device,
        must_use=must_use,
        on_text=on_text,
        reporter=reporter,
    )


def train(
    config: Configured,
    *,
    start: Model | None = None,
    resume: str | None = None,
    callbacks: Sequence[object] = (),
    upload: bool = True,
    prepare: bool = True,
    trust_code: bool = False,
    reporter: Reporter = SILENT,
) -> TrainedRun:
    """Train, or continue a run; prepare its data first where that was not done.

    Args:
        config: what `configure` takes.
        start: a run or checkpoint whose weights a new run begins with.
        resume: continue exactly from this older checkpoint of the run, e.g. "step-00000200"; newer
            ones are set aside, and nothing is deleted.
        callbacks: objects that watch the run, besides those of observe.callbacks.
        upload: fetch from checkpoint.upload and copy to it, if there is one.
        prepare: prepare the store where it is absent; otherwise that is an error.
        trust_code: where `config` is a run's own config.yaml, import the metrics and callbacks it
            names.
        reporter: hears of progress.

    Raises:
        ConfigError: the configuration cannot be used.
        DataError: the data cannot, or the store was prepared from other data or settings.
        CheckpointError: the run folder belongs to another run, or is in use.
        NonFiniteError: the loss is not a number.
    """
    began = time.monotonic()
    settings = configure(config)
    if trust_code:
        settings = settings.with_foreign_code({})
    if prepare:
        prepare_before_torch(settings, start=start, reporter=reporter)
    from toque.training.stopping import CommandClock
    from toque.workflows.train import train as workflow

    return workflow(
        with_origins(settings),
        start=start,
        resume=resume,
        callbacks=callbacks,
        upload=upload,
        prepare=prepare,
        clock=CommandClock(began=began),
        reporter=reporter,
    )
