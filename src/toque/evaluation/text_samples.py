"""Samples: texts a model generates for held-out prompts, with the domain's metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from toque.data.tokenizer.codec import Codec
from toque.reporter import Count, uncounted
from toque.sources.records import attempted
from toque.storage.json_files import append_json_lines

TextMetrics = Callable[[str, str], Mapping[str, float]]
"""(prompt, text) -> {name: score}; a score that does not apply is left out."""
Generate = Callable[..., list[list[int]]]


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids and as text, and its reference, if any."""

    ids: tuple[int, ...]
    text: str
    """As the model reads it."""
    reference: str | None = None
    slices: Mapping[str, str] = field(default_factory=dict)
    """Its place in each slicing, e.g. {"difficulty": "easy"}; all prompts have the same keys."""
    typed: str | None = None
    """In the words of a person, where those are others."""


@dataclass(frozen=True)
class Sample:
    """One generated text with its metrics."""

    prompt: str
    text: str
    tokens: int
    reference: str | None
    metrics: Mapping[str, float]
    slices: Mapping[str, str] = field(default_factory=dict)
    failed: str = ""
    """What the domain's metrics raised on it, in words; `metrics` is then empty."""
    asked: str | None = None
    """What the model read, where `prompt` is in a person's own words."""

    def record(self) -> dict[str, Any]:
        """As written to samples.jsonl."""
        return {
            "prompt": self.prompt,
            "text": self.text,
            "tokens": self.tokens,
            "metrics": {name: round(score, 4) for name, score in self.metrics.items()},
        } | {
            name: value
            for name, value in (
                ("asked", self.asked),
                ("reference", self.reference),
                ("failed", self.failed or None),
            )
            if value is not None
        }


@dataclass(frozen=True)
class Sampler:
    """Generates for a fixed list of prompts.

    Args:
        prompts: one text is generated for each.
        codec: turns ids into text.
        generate: the model package's `generate`, its options bound.
        metrics: the domain's metrics of one text.
    """

    prompts: Sequence[Prompt]
    codec: Codec
    generate: Generate
    metrics: TextMetrics

    def __call__(self, model: nn.Module, on_progress: Count = uncounted) -> list[Sample]:
        """One sample for each prompt, in their order; `on_progress` is `generate`'s."""
        if not self.prompts:
            return []
        ids = [prompt.ids for prompt in self.prompts]
        written = self.generate(model, ids, on_progress=on_progress)
        return [
            scored(prompt, self.codec.decode(ids), self.metrics, tokens=len(ids))
            for prompt, ids in zip(self.prompts, written, strict=True)
        ]


def scored(prompt: Prompt, text: str, of_text: TextMetrics, *, tokens: int = 0) -> Sample:
    """A text with the domain's metrics of it, or with what they raised: it may be anything."""
    found = attempted(of_text, prompt.text, text)
    metrics, failed = ({}, found) if isinstance(found, str) else (dict(found), "")
    return Sample(
        prompt.typed or prompt.text,
        text,
        tokens,
        prompt.reference,
        metrics,
        prompt.slices,
        failed,
        asked=prompt.text if prompt.typed else None,
    )


def append_samples(path: Path, samples: Sequence[Sample], *, step: int) -> str | None:
    """Append a JSON line per sample, all or none.

    Returns:
        A sentence for the user when the file system refused: texts to look at are not worth a run.
    """
    lines = [json.dumps({"step": step} | s.record(), ensure_ascii=False) for s in samples]
    # A model may write half a surrogate pair, which is no UTF-8.
    refused = append_json_lines(path, [line.encode("utf-8", "replace") for line in lines])
    if refused is None:
        return None
    return (
        f"{path} did not take the {len(lines)} texts of step {step}: {refused.strerror}. They are "
        "lost; nothing else is"
    )
