"""Sample texts of every evaluation, for the eye: how a run learns to write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn

from toque.evaluation.text_samples import Sample, Sampler, append_samples
from toque.models.lora.layers import is_adapted
from toque.reporter import SILENT, Reporter, counting
from toque.training.callbacks import Callback
from toque.training.runtime import Runtime
from toque.units import Progress

WritingContext = Callable[[], AbstractContextManager[Any]]

MOST_LINES: Final = 30
"""Of a text that are shown; a model that has just begun may write hundreds."""


def writing_in(model: nn.Module, runtime: Runtime) -> WritingContext:
    """The context in which a model in training can write texts.

    Whole models are float32 and need none; frozen weights beside an adapter may be held in the
    format autocast computes in, and then only work with it.
    """
    return runtime.autocast if is_adapted(model) else nullcontext


@dataclass
class SampleWriter(Callback):
    """At every evaluation writes a few texts to samples.jsonl; never changes a training number.

    Args:
        sampler: what to write for, and how.
        model: what writes; its weights are those just evaluated.
        path: samples.jsonl.
        context: in which the model can write.
        reporter: who hears how far it is.
        show: whether the reporter is shown the texts as well.
        warn: called when a text could not be written; the run goes on.
    """

    sampler: Sampler
    model: nn.Module
    path: Path
    context: WritingContext
    reporter: Reporter = SILENT
    show: bool = False
    warn: Callable[[Progress, str], None] = lambda _at, _message: None

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Write texts with the weights just evaluated."""
        with self.context(), counting(self.reporter, "writing", "texts") as count:
            samples = self.sampler(self.model, count)
        refused = append_samples(self.path, samples, step=at.step)
        if refused is not None:
            self.warn(at, refused)
        for sample in samples if self.show else ():
            self.reporter.notice(shown(sample, step=at.step))


def shown(sample: Sample, *, step: int) -> str:
    """A text with its prompt and its recipe score, indented so that it stands apart.

    >>> print(shown(Sample("toast", "Bread.", 2, None, {"recipe_score": 0.5}), step=10))
    step 10  toast  (recipe score 0.50)
        Bread.
    """
    score = sample.metrics.get("recipe_score")
    said = f"  (recipe score {score:.2f})" if score is not None else ""
    lines = [line for line in sample.text.splitlines() if line.strip()] or ["(nothing)"]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"... ({len(lines) - MOST_LINES} more lines in samples.jsonl)"]
    return "\n".join([f"step {step:,}  {sample.prompt}{said}", *(f"    {line}" for line in lines)])
