"""Batch of an update as text, unpacked and augmented."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toque.config import RunConfig
from toque.data.loader.batch_stream import BatchStream, Step
from toque.data.store.token_column import Ids
from toque.data.store.token_store import TokenStore, span_bounds
from toque.data.tokenizer.codec import Codec
from toque.errors import ConfigError, argument
from toque.sources.preference_pairs import CHOSEN, PREFERRED, REJECTED
from toque.sources.records import NO_TASK
from toque.units import Cursor
from toque.workflows.plan.outlined_model import outline_stream
from toque.workflows.prepared_store import open_store


@dataclass(frozen=True)
class ShownBatch:
    """Batch of an update as text."""

    heading: str
    examples: tuple[str, ...]
    left: int
    """Number of further examples in the update."""

    def __str__(self) -> str:
        """Return the heading and the examples."""
        return "\n".join([self.heading, *self.examples])


def show_batch(
    config: RunConfig, *, step: int = 1, max_examples: int = 4
) -> ShownBatch:
    """Return the first examples of update `step`, counted from 1, after augmentation.

    A preference pair is one example. Objectives with rewards have only prompts.
    """
    if step < 1:
        raise ConfigError(f"{argument('step')} must be at least 1, not {step}.")
    store = open_store(config)
    stream = outline_stream(config, store)
    cursor = Cursor()
    for _ in range(step - 1):  # only the plan advances, no batch is built
        cursor = stream.plan.at(cursor).cursor
    update = stream.at(cursor)
    rows = [row for packed in update.batch.example_ids for row in packed]
    heading = _heading(config, store, step, update)
    if config.curriculum is not None:
        heading += f"; stage {cursor.stage + 1}"

    rows_per_example = stream.layout.group
    shown_rows = rows[: rows_per_example * max_examples]
    if config.objective.learns_from_rewards:
        examples = [_describe_prompt(store, row) for row in shown_rows]
    else:
        labels = _label_rows(config, store, shown_rows)
        examples = [
            _describe_example(store, stream, cursor, row, label)
            for row, label in zip(shown_rows, labels, strict=True)
        ]
    left = len(rows) // rows_per_example - max_examples
    return ShownBatch(heading, tuple(examples), max(0, left))


def _heading(config: RunConfig, store: TokenStore, step: int, update: Step) -> str:
    """Describe the update: its examples, pairs or prompts, and its tokens."""
    objective = config.objective
    if objective.learns_from_rewards:
        n = update.n_examples
        limit = store.manifest.settings["max_target_tokens"]
        rewards = ", ".join(f"{r} x {w:g}" for r, w in objective.rewards.items())
        learnt = "all texts"
        if objective.kind == "best_of":
            learnt = "the best text of each prompt"
        return (
            f"step {step}: {n:,} prompts. The run generates {objective.samples} texts of at most "
            f"{limit:,} tokens for each prompt with its current weights, {n * objective.samples:,} "
            f"in all, and learns from {learnt} by their rewards: {rewards}. The texts of the store "
            f"are only references for the rewards; epoch {update.epoch:.2f} after it"
        )
    noun = "pairs" if store.has_pairs else "examples"
    return (
        f"step {step}: {update.n_examples:,} {noun} in {update.batch.n_rows:,} rows, "
        f"{update.n_tokens:,} tokens with {update.n_targets:,} targets; epoch {update.epoch:.2f} "
        "after it"
    )


def _label_rows(config: RunConfig, store: TokenStore, rows: Sequence[int]) -> list[str]:
    """Return the task of each row, or whether it is a chosen answer."""
    if store.has_pairs:
        preferred = store.column(PREFERRED)
        return [CHOSEN if preferred[row] else REJECTED for row in rows]
    task_names = dict(enumerate(config.data.task_names)) | {NO_TASK: "none"}
    tasks = store.column("task")
    return [f"task {task_names[int(tasks[row])]}" for row in rows]


def _describe_prompt(store: TokenStore, row: int) -> str:
    """Return the prompt of a store row as text."""
    prompt, _ = store.prompt_and_answer(row)
    return f"\n--- store row {row}, prompt\n{_decode(store.codec(), prompt)}"


def _describe_example(
    store: TokenStore, stream: BatchStream, cursor: Cursor, row: int, label: str
) -> str:
    """Return a store row's prompt and target as text, after the augmentation of the epoch."""
    stored = [store.prompt(row), store.target(row)]
    sides = stored
    change = ""
    if stream.varied is not None:
        sides = [*stream.varied.sides(row, stream.plan.epoch_key(cursor))]
        is_same = all(map(np.array_equal, sides, stored))
        change = ", as stored" if is_same else ", augmented"
    codec = store.codec()
    prompt = _decode(codec, sides[0])
    target = _decode_target(codec, sides[1], store.spans(row))
    return f"\n--- store row {row}, {label}{change}\n{prompt}\n>>>\n{target}"


def _decode_target(codec: Codec, target: Ids, spans: list[int]) -> str:
    """Decode a target. Turns without loss are in brackets."""
    parts = [
        _decode(codec, target[a:b]) for a, b in span_bounds(spans or [len(target)])
    ]
    parts[1::2] = [f"\n[{text.strip()}]\n" for text in parts[1::2]]
    return "".join(parts)


def _decode(codec: Codec, ids: Ids) -> str:
    return codec.decode(ids.tolist()).rstrip("\n")
