"""Samples: texts a model generates for held-out prompts, with the domain's metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import nn

from toque.config.field_types import OF_CLASSES
from toque.config.schema import DataConfig
from toque.cooking.prompts import task_table
from toque.cooking.recipe import DIFFICULTIES
from toque.cooking.recipe_scores import text_metrics
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.codec import Codec
from toque.evaluation.heldout_loss import subset
from toque.models.generation.engine import generate
from toque.models.generation.options import GenerationOptions
from toque.models.loading.provenance import Provenance
from toque.reporter import Count, uncounted
from toque.sources.records import NO_TASK, TaskTemplate, attempted
from toque.storage.json_files import append_json_lines

_BEYOND: Final = 8  # tokens that an answer may have beyond the longest class, to see what it is
LENGTHS: Final = (("short", 100), ("medium", 200))  # up to so many words; above, long


def metrics_of(task: TaskTemplate) -> tuple[str, ...]:
    """The metrics of a task's answers alone; () where they are scored among all other texts."""
    return task.metrics or (OF_CLASSES if task.classes else ())


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids and as text, and its reference, if any."""

    ids: tuple[int, ...]
    text: str  # the prompt as the model reads it
    reference: str | None = None
    slices: Mapping[str, str] = field(default_factory=dict)  # e.g. {"difficulty": "easy"}
    typed: str | None = None  # the prompt in the words of a person, where those are others
    task: str = ""  # the task that it is of, where that has metrics of its own
    most: int | None = None  # most tokens of an answer of use, where they are few


@dataclass(frozen=True)
class Sample:
    """One generated text with its metrics."""

    prompt: str
    text: str
    tokens: int
    reference: str | None
    metrics: Mapping[str, float]
    slices: Mapping[str, str] = field(default_factory=dict)
    failed: str = ""  # error of the domain's metrics on it, in words; `metrics` is then empty
    asked: str | None = None  # the prompt as the model read it, where a person typed another
    task: str = ""  # as of its prompt

    def record(self) -> dict[str, Any]:
        """The content of its line in samples.jsonl."""
        found: dict[str, Any] = {"prompt": self.prompt, "text": self.text, "tokens": self.tokens}
        found["metrics"] = {name: round(score, 4) for name, score in self.metrics.items()}
        found |= {"asked": self.asked, "reference": self.reference, "failed": self.failed or None}
        found["task"] = self.task or None
        return {name: value for name, value in found.items() if value is not None}


class TimeIsUp(Exception):  # noqa: N818 - control flow, not an error anyone sees
    """Raised by a count of texts to end the writing; texts that are not finished are left out."""


@dataclass(frozen=True)
class Sampler:
    """Generates the likeliest text for each of some prompts."""

    prompts: Sequence[Prompt]
    codec: Codec
    record: Provenance  # of the model, which says how long its texts are and what repeats in them
    on_notice: Callable[[str], object] = lambda _: None

    def __call__(self, model: nn.Module, on_progress: Count = uncounted) -> list[Sample]:
        """One sample for each prompt, in their order; `on_progress` is `generate`'s.

        When it raises TimeIsUp, only the prompts with a finished text have a sample.
        """
        return [*self.by_number(model, on_progress).values()]

    def by_number(self, model: nn.Module, on_progress: Count = uncounted) -> dict[int, Sample]:
        """As a call, each sample by the number of its prompt."""
        longest = self.record.max_new_tokens
        limits = [min(p.most or longest, longest) for p in self.prompts]
        written: dict[int, list[int]] = {}
        for most in dict.fromkeys(limits):  # short answers apart from long ones
            rows = [row for row, limit in enumerate(limits) if limit == most]

            def count(
                done: int, _total: int, share: float | None = None, before: int = len(written)
            ) -> None:
                on_progress(before + done, len(limits), share)

            written |= self._finished(model, rows, most, count)
        return {
            row: scored(
                prompt,
                self.codec.decode(written[row], skip_special_tokens=True),
                tokens=len(written[row]),
                knows_recipes=self.record.knows_recipes,
            )
            for row, prompt in enumerate(self.prompts)
            if row in written
        }

    def _finished(
        self, model: nn.Module, rows: Sequence[int], most: int, on_progress: Count
    ) -> dict[int, list[int]]:
        """Texts of the prompts `rows`, by their numbers; the finished ones when time is up."""
        texts: list[list[int]] = [[] for _ in rows]
        finished: list[int] = []

        def take(number: int, token: int | None) -> None:
            if token is None:
                finished.append(number)
            else:
                texts[number].append(token)

        ids = [self.prompts[row].ids for row in rows]
        with suppress(TimeIsUp):
            self.written(model, ids, most, on_progress, take)
        return {rows[number]: texts[number] for number in finished}

    def written(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        most: int,
        on_progress: Count = uncounted,
        on_token: Callable[[int, int | None], object] | None = None,
    ) -> list[list[int]]:
        """The likeliest `most` tokens after each prompt; the callbacks are `generate`'s."""
        return generate(
            model,
            prompts,
            self.record.completed(GenerationOptions(max_new_tokens=most)),
            eos_id=self.codec.end_ids,
            pad_id=self.codec.pad_id,
            on_progress=on_progress,
            on_token=on_token,
            on_notice=self.on_notice,
        )


def scored(prompt: Prompt, text: str, *, tokens: int = 0, knows_recipes: bool = True) -> Sample:
    """A text with the domain's metrics of it, or with what they raised: it may be anything."""
    found = attempted(text_metrics, prompt.text, text, knows_recipes=knows_recipes)
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
        task=prompt.task,
    )


def append_samples(path: Path, samples: Sequence[Sample], *, step: int) -> str | None:
    """Append a JSON line per sample, all or none; a sentence when the file system refused."""
    lines = [json.dumps({"step": step} | s.record(), ensure_ascii=False) for s in samples]
    # A model may write half a surrogate pair, which is no UTF-8.
    refused = append_json_lines(path, [line.encode("utf-8", "replace") for line in lines])
    if refused is None:
        return None  # texts to look at are not worth a run
    return (
        f"{path} did not take the {len(lines)} texts of step {step}: {refused.strerror}. They are "
        "lost; nothing else is"
    )


def held_out_prompts(store: TokenStore, n: int, data: DataConfig) -> list[Prompt]:
    """The first `n` prompts of the held-out order, then as many of each task with own metrics.

    The first are those of all other tasks. Texts without a prompt, as documents are, have none.
    """
    table, codec = task_table(data), store.codec()
    apart = {name: code for code, name in enumerate(table) if metrics_of(table[name])}
    held_out = store.rows("validation")
    codes = np.asarray(store.column("task"))[held_out]
    found = _first_prompts(store, held_out[~np.isin(codes, [*apart.values()])], n)
    references = [prompt.reference or "" for prompt in found.values()]
    slices = slices_of(store, list(found), references, tuple(table))
    prompts = [replace(p, slices=labels) for p, labels in zip(found.values(), slices, strict=True)]
    for name, code in apart.items():
        classes = [len(codec.encode(codec.normalise(answer))) for answer in table[name].classes]
        most = max(classes) + _BEYOND if classes else None
        own = _first_prompts(store, held_out[codes == code], n)
        prompts += [replace(prompt, task=name, most=most) for prompt in own.values()]
    return prompts


def _first_prompts(store: TokenStore, rows: NDArray[np.int64], n: int) -> dict[int, Prompt]:
    """Prompts of the first of some rows that have one, in the held-out order, by row."""
    codec = store.codec()
    found: dict[int, Prompt] = {}
    # Documents have none, and may be nearly all of a mixture.
    for row in subset(rows[store.prompt_lengths[rows] > 0], None).tolist():
        if len(found) == n:
            break
        asked, answer = store.prompt_and_answer(row)
        ids = tuple(int(i) for i in asked)
        text = codec.decode(ids)
        if text.strip():
            found[row] = Prompt(ids, text, codec.decode(answer))
    return found


def slices_of(
    store: TokenStore, rows: Sequence[int], references: Sequence[str], names: Sequence[str]
) -> list[dict[str, str]]:
    """Labels of each store row: its length, difficulty, task by its code's name, and source."""
    sizes = [len(reference.split()) for reference in references]
    slices = [
        {"length": next((name for name, most in LENGTHS if n <= most), "long")} for n in sizes
    ]
    if "difficulty" in store.manifest.columns:
        levels = store.column("difficulty")[list(rows)].astype(float).tolist()
        for labels, level in zip(slices, levels, strict=True):
            # Comparing keeps NaN out, too.
            labels["difficulty"] = DIFFICULTIES[int(level)] if 0 <= level <= 2 else "unknown"
    tasks = store.column("task")[list(rows)].astype(int).tolist()
    if len(set(tasks)) > 1:
        for labels, task in zip(slices, tasks, strict=True):
            labels["task"] = names[task] if task != NO_TASK else "none"
    files: dict[int, str] = {}
    for entry in store.manifest.sources:
        files.setdefault(entry.source, Path(entry.path).name)
    if len(files) > 1:
        sources = store.column("source")[list(rows)].astype(int).tolist()
        for labels, source in zip(slices, sources, strict=True):
            labels["source"] = f"{source + 1} {files.get(source, '')}".strip()
    return slices
