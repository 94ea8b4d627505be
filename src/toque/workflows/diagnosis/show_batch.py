"""Batch of one update as text: what the model reads, unpacked and augmented."""

from __future__ import annotations

from dataclasses import dataclass

from toque.config import RunConfig
from toque.data.loader.batch_stream import BatchStream
from toque.data.store.token_column import Ids
from toque.data.store.token_store import span_bounds
from toque.data.tokenizer.codec import Codec
from toque.errors import ConfigError, argument
from toque.sources.records import NO_TASK
from toque.units import Cursor
from toque.workflows.plan.outlined_model import outlined_stream
from toque.workflows.prepared_store import open_store


@dataclass(frozen=True)
class ShownBatch:
    """Batch of one update as text."""

    heading: str
    examples: tuple[str, ...]
    left: int  # examples of the update that are not among these

    def __str__(self) -> str:
        """The heading and the examples, a line each."""
        return "\n".join([self.heading, *self.examples])


def show_batch(config: RunConfig, *, step: int = 1, most: int = 4) -> ShownBatch:
    """The first `most` examples of update `step` (from 1), as augmentation leaves them."""
    if step < 1:
        raise ConfigError(f"{argument('step')} is {step}; steps are counted from 1.")
    store = open_store(config)
    stream = outlined_stream(config, store)
    cursor = Cursor()
    for _ in range(step - 1):  # plans are walked, not batches: only the last one is laid out
        cursor = stream.plan.at(cursor).cursor
    found = stream.at(cursor)
    rows = [row for packed in found.batch.example_ids for row in packed]
    heading = (
        f"step {step}: {len(rows):,} examples in {found.batch.n_rows:,} rows, "
        f"{found.n_tokens:,} tokens, {found.n_targets:,} of them targets; epoch "
        f"{found.epoch:.2f} after it"
        + (f"; stage {cursor.stage + 1}" if config.curriculum is not None else "")
    )
    read = stream.varied.at(stream.plan.epoch_key(cursor)) if stream.varied else store
    tasks, codec = store.column("task"), store.codec()
    names = dict(enumerate(config.data.task_names)) | {NO_TASK: "none"}
    examples = tuple(
        f"\n--- store row {row}, task {names[int(tasks[row])]}{_changed(stream, row, cursor)}\n"
        f"{_text(codec, read.prompt(row))}\n>>>\n"
        f"{_learnt(codec, read.target(row), store.spans(row))}"
        for row in rows[:most]
    )
    return ShownBatch(heading, examples, max(0, len(rows) - most))


def _changed(stream: BatchStream, row: int, cursor: Cursor) -> str:
    if stream.varied is None:
        return ""
    prompt, target = stream.varied.sides(row, stream.plan.epoch_key(cursor))
    own = stream.layout.examples
    same = prompt.tolist() == own.prompt(row).tolist()
    same &= target.tolist() == own.target(row).tolist()
    return ", as stored" if same else ", augmented"


def _learnt(codec: Codec, target: Ids, spans: list[int]) -> str:
    """A target; what is only read of a conversation stands in brackets."""
    parts = [_text(codec, target[a:b]) for a, b in span_bounds(spans or [len(target)])]
    parts[1::2] = [f"\n[{text.strip()}]\n" for text in parts[1::2]]
    return "".join(parts)


def _text(codec: Codec, ids: Ids) -> str:
    return codec.decode(ids.tolist()).rstrip("\n")
