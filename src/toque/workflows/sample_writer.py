"""Texts written at every evaluation, for the eye: how a run learns to write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text
from torch import nn

from toque.evaluation.text_samples import Sample, Sampler, append_samples
from toque.training.callbacks import Callback
from toque.units import Progress
from toque.workflows.final_model import WritingContext

MOST_LINES: Final = 30
"""Of a text that are shown; a model that has just begun may write hundreds."""


class SampleWriter(Callback):
    """At every evaluation writes a few texts to samples.jsonl; never changes a training number.

    Args:
        sampler: what to write for, and how.
        model: what writes; its weights are those just evaluated.
        path: samples.jsonl.
        context: in which the model can write.
        console: where the texts are shown as well; None for nowhere.
    """

    def __init__(
        self,
        sampler: Sampler,
        model: nn.Module,
        path: Path,
        context: WritingContext,
        *,
        console: Console | None = None,
    ) -> None:
        self.sampler, self.model, self.path, self.context = sampler, model, path, context
        self.console = console

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Write texts with the weights just evaluated."""
        with self.context():
            samples = self.sampler(self.model)
        append_samples(self.path, samples, step=at.step)
        if self.console is not None:
            for sample in samples:
                self.console.print(Text(shown(sample, step=at.step)), soft_wrap=True)


def shown(sample: Sample, *, step: int) -> str:
    """A text with its prompt and its quality, indented so that it stands apart.

    >>> print(shown(Sample("toast", "Bread.", 2, None, {"overall_quality": 0.5}), step=10))
    step 10  toast  (overall quality 0.50)
        Bread.
    """
    quality = sample.metrics.get("overall_quality")
    said = f"  (overall quality {quality:.2f})" if quality is not None else ""
    lines = [line for line in sample.text.splitlines() if line.strip()] or ["(nothing)"]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"... ({len(lines) - MOST_LINES} more lines in samples.jsonl)"]
    return "\n".join([f"step {step:,}  {sample.prompt}{said}", *(f"    {line}" for line in lines)])
