"""Samples: texts that a model generates for held-out prompts, with their metrics."""

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
from toque.sources.records import NO_TASK, TaskTemplate, attempt
from toque.storage.json_files import append_json_lines

_EXTRA_TOKENS: Final = 8
"""Maximum number of tokens beyond the longest class, so that a wrong answer is recognised."""
LENGTHS: Final = (("short", 100), ("medium", 200))
"""Length labels, each with its maximum number of words. Longer texts have the label long."""


def metrics_of(task: TaskTemplate) -> tuple[str, ...]:
    """Return a task's separate metrics, or () if its answers are scored with all other texts."""
    if task.metrics:
        return task.metrics
    return OF_CLASSES if task.classes else ()


@dataclass(frozen=True)
class Prompt:
    """Prompt as token ids and as text, with its reference if one exists."""

    ids: tuple[int, ...]
    text: str
    """Prompt in the format that the model expects."""
    reference: str | None = None
    slices: Mapping[str, str] = field(default_factory=dict)
    """Label per slicing, e.g. {"difficulty": "easy"}."""
    typed: str | None = None
    """Prompt that the user typed, if it differs from `text`."""
    task: str = ""
    """Name of the task, if it has separate metrics."""
    max_tokens: int | None = None
    """Maximum length of an answer in tokens, if the task has short answers."""


@dataclass(frozen=True)
class Sample:
    """Generated text with its metrics."""

    prompt: str
    """Prompt that the user typed, or the prompt of a held-out example."""
    text: str
    tokens: int
    """Number of generated tokens."""
    reference: str | None
    metrics: Mapping[str, float]
    """Recipe metrics by name."""
    slices: Mapping[str, str] = field(default_factory=dict)
    failed: str = ""
    """Error raised by the recipe metrics. `metrics` is then empty."""
    asked: str | None = None
    """Prompt in the format that the model expects, if the user typed a different prompt."""
    task: str = ""
    """Name of the task, if it has separate metrics."""

    def record(self) -> dict[str, Any]:
        """Return the fields of the line in samples.jsonl."""
        fields = {
            "prompt": self.prompt,
            "text": self.text,
            "tokens": self.tokens,
            "metrics": {name: round(score, 4) for name, score in self.metrics.items()},
            "asked": self.asked,
            "reference": self.reference,
            "failed": self.failed or None,
            "task": self.task or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


class TimeIsUp(Exception):  # noqa: N818 - control flow, not an error that users see
    """Raised by a progress callback to stop generation. Unfinished texts are left out."""


@dataclass(frozen=True)
class Sampler:
    """Greedy generator of one text per prompt."""

    prompts: Sequence[Prompt]
    codec: Codec
    record: Provenance
    """Model's record, with the maximum length of its texts."""
    on_notice: Callable[[str], object] = lambda _: None

    def generate_samples(
        self, model: nn.Module, on_progress: Count = uncounted
    ) -> dict[int, Sample]:
        """Generate one sample per prompt. Return the samples by prompt index.

        If `on_progress` raises TimeIsUp, only the prompts with a finished text have a sample.
        """
        longest = self.record.max_new_tokens
        limits = [min(prompt.max_tokens or longest, longest) for prompt in self.prompts]
        token_ids: dict[int, list[int]] = {}
        # Short and long answers are generated in separate batches.
        for max_tokens in dict.fromkeys(limits):
            rows = [row for row, limit in enumerate(limits) if limit == max_tokens]
            count = _count_after(len(token_ids), len(limits), on_progress)
            token_ids |= self._generate_finished(model, rows, max_tokens, count)

        return {
            row: score_text(
                self.prompts[row],
                self.codec.decode(ids, skip_special_tokens=True),
                tokens=len(ids),
                knows_recipes=self.record.knows_recipes,
            )
            for row, ids in sorted(token_ids.items())
        }

    def _generate_finished(
        self, model: nn.Module, rows: Sequence[int], max_tokens: int, on_progress: Count
    ) -> dict[int, list[int]]:
        """Generate texts for some prompts. Return the finished texts by prompt index."""
        texts: list[list[int]] = [[] for _ in rows]
        finished: list[int] = []

        def on_token(number: int, token: int | None) -> None:
            if token is None:  # the end of the text
                finished.append(number)
            else:
                texts[number].append(token)

        ids = [self.prompts[row].ids for row in rows]
        with suppress(TimeIsUp):
            self.generate(model, ids, max_tokens, on_progress, on_token)
        return {rows[number]: texts[number] for number in finished}

    def generate(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        on_progress: Count = uncounted,
        on_token: Callable[[int, int | None], object] | None = None,
    ) -> list[list[int]]:
        """Generate greedily from token ids. The callbacks are passed to the engine."""
        return generate(
            model,
            prompts,
            self.record.completed(GenerationOptions(max_new_tokens=max_tokens)),
            eos_id=self.codec.end_ids,
            pad_id=self.codec.pad_id,
            on_progress=on_progress,
            on_token=on_token,
            on_notice=self.on_notice,
        )


def _count_after(n_before: int, n_total: int, on_progress: Count) -> Count:
    """Wrap a progress callback for a part of the texts, after the first `n_before` texts."""

    def count(done: int, _total: int, share: float | None = None, /) -> None:
        on_progress(n_before + done, n_total, share)

    return count


def score_text(
    prompt: Prompt, text: str, *, tokens: int = 0, knows_recipes: bool = True
) -> Sample:
    """Score a text by the recipe metrics, or record the error that they raised."""
    result = attempt(text_metrics, prompt.text, text, knows_recipes=knows_recipes)
    metrics: dict[str, float] = {}
    failed = ""
    if isinstance(result, str):
        failed = result
    else:
        metrics = result
    return Sample(
        prompt.typed or prompt.text,
        text,
        tokens,
        prompt.reference,
        metrics=metrics,
        slices=prompt.slices,
        failed=failed,
        asked=prompt.text if prompt.typed else None,
        task=prompt.task,
    )


def append_samples(path: Path, samples: Sequence[Sample], *, step: int) -> str | None:
    """Append one JSON line per sample. Write all lines or none.

    Return a warning if writing fails. The run continues without its samples.
    """
    records = [{"step": step} | sample.record() for sample in samples]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    # A model may generate half a surrogate pair, which is not valid UTF-8.
    error = append_json_lines(path, [line.encode("utf-8", "replace") for line in lines])
    if error is None:
        return None
    return (
        f"the {len(lines)} texts of step {step} could not be written to {path}: {error.strerror}. "
        "Only these texts are lost"
    )


def held_out_prompts(store: TokenStore, n: int, data: DataConfig) -> list[Prompt]:
    """Choose `n` held-out prompts for each task with separate metrics, and `n` for other examples.

    The prompts of other examples come first. Documents have no prompts.
    """
    table = task_table(data)
    separate = {
        name: code for code, name in enumerate(table) if metrics_of(table[name])
    }
    held_out = store.wanted_rows("validation")
    codes = np.asarray(store.column("task"))[held_out]

    is_common = ~np.isin(codes, [*separate.values()])
    common = _first_prompts(store, held_out[is_common], n)
    references = [prompt.reference or "" for prompt in common.values()]
    slices = label_slices(store, list(common), references, tuple(table))
    prompts = [
        replace(prompt, slices=labels)
        for prompt, labels in zip(common.values(), slices, strict=True)
    ]
    for name, code in separate.items():
        max_tokens = _max_answer_tokens(table[name], store.codec())
        task_prompts = _first_prompts(store, held_out[codes == code], n)
        prompts += [
            replace(prompt, task=name, max_tokens=max_tokens)
            for prompt in task_prompts.values()
        ]
    return prompts


def _max_answer_tokens(task: TaskTemplate, codec: Codec) -> int | None:
    """Return the maximum tokens of an answer, or None if the task has no classes."""
    sizes = [len(codec.encode(codec.normalise(name))) for name in task.classes]
    return max(sizes) + _EXTRA_TOKENS if sizes else None


def _first_prompts(
    store: TokenStore, rows: NDArray[np.int64], n: int
) -> dict[int, Prompt]:
    """Choose the first `n` prompts that are not empty, in the held-out order, by store row."""
    codec = store.codec()
    prompts: dict[int, Prompt] = {}
    # A mixture may consist mostly of documents, which have no prompts.
    for row in subset(rows[store.prompt_lengths[rows] > 0], None).tolist():
        if len(prompts) == n:
            break
        prompt, answer = store.prompt_and_answer(row)
        ids = tuple(int(i) for i in prompt)
        text = codec.decode(ids)
        if text.strip():
            prompts[row] = Prompt(ids, text, codec.decode(answer))
    return prompts


def _length_label(reference: str) -> str:
    n_words = len(reference.split())
    return next((label for label, max_words in LENGTHS if n_words <= max_words), "long")


def label_slices(
    store: TokenStore,
    rows: Sequence[int],
    references: Sequence[str],
    task_names: Sequence[str],
) -> list[dict[str, str]]:
    """Label each store row by length, difficulty, task and source.

    The difficulty is left out if the store does not have it, the task if all rows have the same
    one, and the source if the store has a single source.
    """
    columns = {
        "length": [_length_label(reference) for reference in references],
        "difficulty": _difficulty_labels(store, rows),
        "task": _task_labels(store, rows, task_names),
        "source": source_labels(store, rows),
    }
    columns = {name: labels for name, labels in columns.items() if labels}
    return [
        dict(zip(columns, labels, strict=True))
        for labels in zip(*columns.values(), strict=True)
    ]


def _difficulty_labels(store: TokenStore, rows: Sequence[int]) -> list[str]:
    """Return the difficulty of each row, or nothing if the store does not have it."""
    if "difficulty" not in store.manifest.columns:
        return []
    levels = store.column("difficulty")[list(rows)].astype(float).tolist()
    # The comparison is also false for NaN.
    return [
        DIFFICULTIES[int(level)] if 0 <= level <= 2 else "unknown" for level in levels
    ]


def _task_labels(
    store: TokenStore, rows: Sequence[int], task_names: Sequence[str]
) -> list[str]:
    """Return the task of each row, or nothing if all rows have the same task."""
    tasks = store.column("task")[list(rows)].astype(int).tolist()
    if len(set(tasks)) <= 1:
        return []
    return [task_names[task] if task != NO_TASK else "none" for task in tasks]


def source_labels(store: TokenStore, rows: Sequence[int]) -> list[str]:
    """Return the number and first file name of each row's source, or nothing for one source.

    A label is, for example, "source 1 (a.jsonl)".
    """
    first_files: dict[int, str] = {}
    for entry in store.manifest.sources:
        first_files.setdefault(entry.source, Path(entry.path).name)
    if len(first_files) <= 1:
        return []
    sources = store.column("source")[list(rows)].astype(int).tolist()
    return [f"source {source + 1} ({first_files[source]})" for source in sources]
