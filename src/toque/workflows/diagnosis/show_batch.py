"""Batch of an update as text, unpacked and augmented."""

from __future__ import annotations

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
    """Return the first examples of update `step`, counted from 1, after augmentation."""
    if step < 1:
        raise ConfigError(f"{argument('step')} must be at least 1, not {step}.")
    store = open_store(config)
    stream = outline_stream(config, store)
    cursor = Cursor()
    for _ in range(step - 1):  # only the plan advances, no batch is built
        cursor = stream.plan.at(cursor).cursor
    update = stream.at(cursor)
    rows = [row for packed in update.batch.example_ids for row in packed]
    heading = _heading(step, update, n_examples=len(rows))
    if config.curriculum is not None:
        heading += f"; stage {cursor.stage + 1}"

    task_names = dict(enumerate(config.data.task_names)) | {NO_TASK: "none"}
    tasks = store.column("task")
    labels = {row: f"task {task_names[int(tasks[row])]}" for row in rows[:max_examples]}
    if store.has_pairs:
        preferred = store.column(PREFERRED)
        labels = {row: CHOSEN if preferred[row] else REJECTED for row in labels}
    examples = tuple(
        _describe_example(store, stream, cursor, row, label)
        for row, label in labels.items()
    )
    return ShownBatch(heading, examples, max(0, len(rows) - max_examples))


def _heading(step: int, update: Step, *, n_examples: int) -> str:
    return (
        f"step {step}: {n_examples:,} examples in {update.batch.n_rows:,} rows, "
        f"{update.n_tokens:,} tokens with {update.n_targets:,} targets; epoch {update.epoch:.2f} "
        "after it"
    )


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
