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
"""Tokens of an answer beyond the longest class, so that wrong answers can be recognised."""
LENGTHS: Final = (("short", 100), ("medium", 200))
"""Largest number of words per label. Longer texts are labelled long."""


def metrics_of(task: TaskTemplate) -> tuple[str, ...]:
    """Return the separate metrics of a task, or () if its answers are scored with other texts."""
    return task.metrics or (OF_CLASSES if task.classes else ())


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids and as text, and its reference, if any."""

    ids: tuple[int, ...]
    text: str
    """Prompt in the format that the model expects."""
    reference: str | None = None
    slices: Mapping[str, str] = field(default_factory=dict)
    """Label per slicing, such as {"difficulty": "easy"}."""
    typed: str | None = None
    """Prompt that the user typed, if it differs from `text`."""
    task: str = ""
    """Name of the task, if it has separate metrics."""
    max_tokens: int | None = None
    """Limit of tokens of an answer, if answers are short."""


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
    """Error of the recipe metrics. `metrics` is then empty."""
    asked: str | None = None
    """Prompt in the format that the model expects, if the user typed another one."""
    task: str = ""
    """Name of the task, if it has separate metrics."""

    def record(self) -> dict[str, Any]:
        """Return the content of the line in samples.jsonl."""
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


class TimeIsUp(Exception):  # noqa: N818 - control flow, not an error anyone sees
    """Raised by a progress callback to stop generation. Unfinished texts are left out."""


@dataclass(frozen=True)
class Sampler:
    """Greedy generator of one text per prompt."""

    prompts: Sequence[Prompt]
    codec: Codec
    record: Provenance
    """Record of the model, with the maximum length of its texts."""
    on_notice: Callable[[str], object] = lambda _: None

    def __call__(
        self, model: nn.Module, on_progress: Count = uncounted
    ) -> list[Sample]:
        """Generate a sample per prompt, in their order. `on_progress` is passed to `generate`.

        If `on_progress` raises TimeIsUp, only the prompts with a finished text have a sample.
        """
        return [*self.by_number(model, on_progress).values()]

    def by_number(
        self, model: nn.Module, on_progress: Count = uncounted
    ) -> dict[int, Sample]:
        """Generate a sample per prompt, as `__call__` does. Return them by prompt number."""
        longest = self.record.max_new_tokens
        limits = [min(prompt.max_tokens or longest, longest) for prompt in self.prompts]
        written: dict[int, list[int]] = {}
        for max_tokens in dict.fromkeys(
            limits
        ):  # short and long answers in separate batches
            rows = [row for row, limit in enumerate(limits) if limit == max_tokens]

            def count(
                done: int,
                _total: int,
                share: float | None = None,
                before: int = len(written),
            ) -> None:
                on_progress(before + done, len(limits), share)

            written |= self._write_finished(model, rows, max_tokens, count)
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

    def _write_finished(
        self, model: nn.Module, rows: Sequence[int], max_tokens: int, on_progress: Count
    ) -> dict[int, list[int]]:
        """Generate texts for some prompts. Return the finished ones by prompt number."""
        texts: list[list[int]] = [[] for _ in rows]
        finished: list[int] = []

        def take(number: int, token: int | None) -> None:
            if token is None:
                finished.append(number)
            else:
                texts[number].append(token)

        ids = [self.prompts[row].ids for row in rows]
        with suppress(TimeIsUp):
            self.written(model, ids, max_tokens, on_progress, take)
        return {rows[number]: texts[number] for number in finished}

    def written(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        on_progress: Count = uncounted,
        on_token: Callable[[int, int | None], object] | None = None,
    ) -> list[list[int]]:
        """Generate greedily after each prompt. The callbacks are passed to `generate`."""
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


def scored(
    prompt: Prompt, text: str, *, tokens: int = 0, knows_recipes: bool = True
) -> Sample:
    """Score a text by the recipe metrics, or record the error that they raised."""
    result = attempt(text_metrics, prompt.text, text, knows_recipes=knows_recipes)
    return Sample(
        prompt.typed or prompt.text,
        text,
        tokens,
        prompt.reference,
        metrics={} if isinstance(result, str) else dict(result),
        slices=prompt.slices,
        failed=result if isinstance(result, str) else "",
        asked=prompt.text if prompt.typed else None,
        task=prompt.task,
    )


def append_samples(path: Path, samples: Sequence[Sample], *, step: int) -> str | None:
    """Append a JSON line per sample, all or none.

    Return a warning if the file system refused: a run does not stop for its samples.
    """
    lines = [
        json.dumps({"step": step} | s.record(), ensure_ascii=False) for s in samples
    ]
    # A model may write half a surrogate pair, which is not valid UTF-8.
    error = append_json_lines(path, [line.encode("utf-8", "replace") for line in lines])
    if error is None:
        return None
    return (
        f"the {len(lines)} texts of step {step} could not be written to {path}: {error.strerror}. "
        "Only these texts are lost"
    )


def held_out_prompts(store: TokenStore, n: int, data: DataConfig) -> list[Prompt]:
    """Choose the first `n` held-out prompts of each task with separate metrics, and of the rest.

    The prompts of the rest come first. Documents have no prompts.
    """
    table, codec = task_table(data), store.codec()
    separate = {
        name: code for code, name in enumerate(table) if metrics_of(table[name])
    }
    held_out = store.rows("validation")
    codes = np.asarray(store.column("task"))[held_out]

    common = _first_prompts(store, held_out[~np.isin(codes, [*separate.values()])], n)
    references = [prompt.reference or "" for prompt in common.values()]
    slices = slices_of(store, list(common), references, tuple(table))
    prompts = [
        replace(p, slices=labels)
        for p, labels in zip(common.values(), slices, strict=True)
    ]
    for name, code in separate.items():
        sizes = [
            len(codec.encode(codec.normalise(answer))) for answer in table[name].classes
        ]
        max_tokens = max(sizes) + _EXTRA_TOKENS if sizes else None
        task_prompts = _first_prompts(store, held_out[codes == code], n).values()
        prompts += [
            replace(prompt, task=name, max_tokens=max_tokens) for prompt in task_prompts
        ]
    return prompts


def _first_prompts(
    store: TokenStore, rows: NDArray[np.int64], n: int
) -> dict[int, Prompt]:
    """Choose the first `n` prompts in the held-out order, by store row."""
    codec = store.codec()
    prompts: dict[int, Prompt] = {}
    # Most rows of a mixture may be documents, which have no prompts.
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


def slices_of(
    store: TokenStore,
    rows: Sequence[int],
    references: Sequence[str],
    names: Sequence[str],
) -> list[dict[str, str]]:
    """Label each store row by length, difficulty, task and source. `names` are the task names."""
    slices = [{"length": _length_label(reference)} for reference in references]
    if "difficulty" in store.manifest.columns:
        levels = store.column("difficulty")[list(rows)].astype(float).tolist()
        for labels, level in zip(slices, levels, strict=True):
            # The comparison is also false for NaN.
            labels["difficulty"] = (
                DIFFICULTIES[int(level)] if 0 <= level <= 2 else "unknown"
            )
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
