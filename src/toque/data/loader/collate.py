"""Collation of token ids to the tensors of a batch, packed or with one example per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from toque.batch import IGNORE, Batch, DecoderBatch, EncoderDecoderBatch
from toque.data.array_types import Ints
from toque.data.loader.packing import RowShape
from toque.data.store.token_column import Ids, Pieces
from toque.data.store.token_store import TokenStore, unlearnt_spans

Rows = Sequence[Sequence[int]]
"""Store rows of each packed row."""


class Examples(Protocol):
    """Source of token ids by store row, such as a `TokenStore`."""

    def prompt(self, row: int, /) -> Ids:
        """Return the prompt ids of a row."""

    def target(self, row: int, /) -> Ids:
        """Return the target ids of a row."""


def decoder_batch(
    examples: Examples,
    rows: Rows,
    *,
    length: int,
    pad_id: int,
    store: TokenStore | None = None,
    keys: Ints | None = None,
) -> DecoderBatch:
    """Collate packed rows for a decoder.

    The inputs are prompts and targets without the last target token, which is predicted but not
    read.

    Args:
        examples: The token ids.
        rows: The store rows of each packed row. They must fit into it.
        length: Number of tokens per packed row.
        pad_id: Id of the padding token.
        store: Store with the spans of conversations that have no loss. None: every target token
            has a loss.
        keys: Random keys of the examples in row order.
    """
    shape = (len(rows), length)
    prompts, targets = _read_sides(examples, rows)
    inputs = prompts.followed_by(targets.without_last())
    side = _PackedSide(_PackedRows(rows), inputs.lengths, length)
    tokens = side.pad(inputs).astype(np.int64)
    segments = side.segments()

    # The last token of a prompt predicts the first token of its target.
    first_label = np.maximum(prompts.lengths - 1, 0)
    labels = _decoder_labels(tokens, side, first_label, targets.last())
    if store is not None and store.has_spans:
        _ignore_unlearnt(labels, store, rows, side.starts + first_label)

    padding = segments == 0
    positions = side.positions()
    np.copyto(positions, 0, where=padding)
    if pad_id:
        np.copyto(tokens, pad_id, where=padding)
    return DecoderBatch(
        labels=_tensor(labels, shape),
        example_ids=tuple(map(tuple, rows)),
        tokens=_tensor(tokens, shape),
        segments=_tensor(segments, shape),
        positions=_tensor(positions, shape),
        keys=None if keys is None else _tensor(side.token_keys(keys), shape),
    )


def _decoder_labels(
    tokens: Ints,
    side: _PackedSide,
    first_label: Ints,
    last_targets: Ids,
) -> Ints:
    """Compute the label of each input token: the next token of a target, or IGNORE.

    Args:
        tokens: Input tokens of all rows.
        side: Positions of the examples.
        first_label: Index of each example's first token with a label, [examples].
        last_targets: Last target token of each example, [examples].
    """
    lengths = side.lengths
    labels = np.full(tokens.shape, IGNORE, np.int64)
    labels[:-1] = tokens[1:]
    # A target of one token without a prompt has no input.
    has_input = lengths > 0
    last_positions = side.starts + lengths - 1
    labels[last_positions[has_input]] = last_targets[has_input]

    # Each example has tokens without labels, tokens with labels, and the padding after it.
    parts = np.empty((len(lengths), 3), np.int64)
    parts[:, 0] = first_label
    parts[:, 1] = lengths - first_label
    parts[:, 2] = side.spans[1::2]
    has_label = np.repeat(np.tile([False, True, False], len(parts)), parts.ravel())
    np.copyto(labels, IGNORE, where=~has_label)
    return labels


def _ignore_unlearnt(
    labels: Ints,
    store: TokenStore,
    rows: Rows,
    first_labels: Ints,
) -> None:
    """Remove the labels of spans without loss.

    `first_labels` are the positions of each example's first label, [examples].
    """
    ids = chain.from_iterable(rows)
    for row, first in zip(ids, first_labels.tolist(), strict=True):
        for start, stop in unlearnt_spans(store.spans(row)):
            labels[first + start : first + stop] = IGNORE


def encoder_decoder_batch(
    examples: Examples,
    rows: Rows,
    *,
    shape: RowShape,
    pad_id: int,
    start_id: int,
    keys: Ints | None = None,
) -> EncoderDecoderBatch:
    """Collate packed rows for an encoder-decoder.

    The prompts are the sources, and the targets are the labels. The decoder's inputs are the
    targets shifted right, with `start_id` first.

    Args:
        examples: The token ids.
        rows: The store rows of each packed row. They must fit into it.
        shape: Number of tokens per packed row on both sides.
        pad_id: Id of the padding token.
        start_id: First input of the decoder.
        keys: Random keys of the examples in row order.
    """
    source_shape = (len(rows), shape.source)
    target_shape = (len(rows), shape.target)
    prompts, targets = _read_sides(examples, rows)
    packed_rows = _PackedRows(rows)
    source_side = _PackedSide(packed_rows, prompts.lengths, shape.source)
    target_side = _PackedSide(packed_rows, targets.lengths, shape.target)
    source_segments = source_side.segments()
    target_segments = target_side.segments()

    padding = target_segments == 0
    ids = target_side.pad(targets)
    # Keep the small type of the store as long as possible, to save memory.
    shifted = np.empty_like(ids)
    shifted[1:] = ids[:-1]
    shifted[target_side.starts] = start_id
    np.copyto(shifted, pad_id, where=padding)
    labels = ids.astype(np.int64)
    np.copyto(labels, IGNORE, where=padding)

    source = source_side.pad(prompts).astype(np.int64)
    if pad_id:
        np.copyto(source, pad_id, where=source_segments == 0)

    source_keys = target_keys = None
    if keys is not None:
        source_keys = _tensor(source_side.token_keys(keys), source_shape)
        # The complement gives the targets other keys than the sources.
        target_keys = _tensor(target_side.token_keys(~keys), target_shape)
    return EncoderDecoderBatch(
        labels=_tensor(labels, target_shape),
        example_ids=tuple(map(tuple, rows)),
        source_tokens=_tensor(source, source_shape),
        source_segments=_tensor(source_segments, source_shape),
        target_tokens=_tensor(shifted.astype(np.int64), target_shape),
        target_segments=_tensor(target_segments, target_shape),
        source_keys=source_keys,
        target_keys=target_keys,
    )


def _read_sides(examples: Examples, rows: Rows) -> tuple[Pieces, Pieces]:
    """Read prompts and targets in row order. A store reads all of them in one call."""
    ids = list(chain.from_iterable(rows))
    if isinstance(examples, TokenStore):
        return examples.sides(np.array(ids, np.int64))
    prompts = Pieces.from_arrays([examples.prompt(row) for row in ids])
    return prompts, Pieces.from_arrays([examples.target(row) for row in ids])


class _PackedRows:
    """Indices of the first and last examples of packed rows. No row may be empty."""

    def __init__(self, rows: Rows) -> None:
        counts = np.array(list(map(len, rows)), np.int64)
        ends = counts.cumsum()
        self.first_examples = ends - counts
        self.last_examples = ends - 1
        self.n_examples = n = int(counts.sum())
        # [2 examples] segment of each example, and 0 for the padding after it
        self.segments = np.zeros(2 * n, np.int32)
        self.segments[::2] = np.arange(1, n + 1) - np.repeat(
            self.first_examples, counts
        )


class _PackedSide:
    """Positions of examples on one side of packed rows, from their `lengths` [examples]."""

    def __init__(self, rows: _PackedRows, lengths: Ints, row_length: int) -> None:
        self._rows = rows
        self._padding = row_length - np.add.reduceat(lengths, rows.first_examples)
        self.lengths = lengths
        # [2 examples] number of tokens of each example, and of the padding after it
        self.spans = np.zeros(2 * rows.n_examples, np.int64)
        self.spans[::2] = lengths
        self.spans[2 * rows.last_examples + 1] = self._padding
        self.starts = self.spans.cumsum()[::2] - lengths  # [examples] first positions

    def pad(self, pieces: Pieces) -> Ids:
        """Concatenate all rows in the stored type, each padded with 0 to the row length."""
        last_examples = self._rows.last_examples.tolist()
        gaps = zip(last_examples, self._padding.tolist(), strict=True)
        return pieces.joined(gaps)

    def positions(self) -> Ints:
        """Number the tokens of each example from 0. The numbers of padding have no meaning."""
        starts = np.zeros(len(self.spans), np.int64)
        starts[::2] = self.starts
        return np.arange(int(self.spans.sum())) - np.repeat(starts, self.spans)

    def token_keys(self, keys: Ints) -> Ints:
        """Compute a key per token from the keys of the examples."""
        return np.repeat(np.repeat(keys, 2), self.spans) + self.positions()

    def segments(self) -> NDArray[np.int32]:
        """Compute each token's segment: its example's index in the row from 1, or 0 for padding."""
        return np.repeat(self._rows.segments, self.spans)


def _tensor(flat: NDArray[np.integer], shape: tuple[int, int]) -> Tensor:
    return torch.from_numpy(flat.reshape(shape))


@dataclass(frozen=True)
class Layout:
    """Shape and special ids of a model's batches."""

    examples: Examples
    shape: RowShape  # shape of a packed row; a decoder-only model has no source
    pad_id: int
    start_id: int = 0  # first input of an encoder-decoder's decoder
    packed: bool = True
    """False for one group per row. All rows are then as long as the longest group."""
    group: int = 1
    """Examples that follow each other and share a row: 2 for the answers of a pair."""

    @classmethod
    def for_model(
        cls,
        examples: Examples,
        model: PretrainedConfig,
        shape: RowShape,
        *,
        packed: bool,
    ) -> Self:
        """Create the layout for a model with this configuration."""
        # Segments mark the padding, so a model without a padding token can use any id.
        pad_id = getattr(model, "pad_token_id", None) or 0
        start_id = getattr(model, "decoder_start_token_id", None) or 0
        return cls(examples, shape, pad_id, start_id, packed)

    def batch(
        self,
        rows: Rows,
        examples: Examples | None = None,
        keys: Ints | None = None,
    ) -> Batch:
        """Collate packed rows into a batch.

        Args:
            rows: The store rows of each packed row.
            examples: Examples that replace the layout's examples, such as augmented examples.
            keys: Random keys of the examples in row order, for dropout.
        """
        shape = self.shape
        examples = examples or self.examples
        if not self.packed:
            rows = [group for row in rows for group in self._groups_in(row)]
            shape = self._unpacked_shape(examples, rows)
        if self.shape.source == 0:
            store = self.examples if isinstance(self.examples, TokenStore) else None
            return decoder_batch(
                examples,
                rows,
                length=shape.target,
                pad_id=self.pad_id,
                store=store,
                keys=keys,
            )
        return encoder_decoder_batch(
            examples,
            rows,
            shape=shape,
            pad_id=self.pad_id,
            start_id=self.start_id,
            keys=keys,
        )

    def _groups_in(self, row: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the groups of a packed row."""
        for start in range(0, len(row), self.group):
            yield row[start : start + self.group]

    def _unpacked_shape(self, examples: Examples, rows: Rows) -> RowShape:
        """Compute the shape of rows that are as long as the longest group, at least 1 token."""
        prompts, targets = _read_sides(examples, rows)
        if self.shape.source == 0:
            return RowShape(0, self._longest(prompts.lengths + targets.lengths - 1))
        return RowShape(self._longest(prompts.lengths), self._longest(targets.lengths))

    def _longest(self, lengths: Ints) -> int:
        """Return the most tokens of a group, at least 1. The lengths are of its examples."""
        by_group = lengths.reshape(-1, self.group).sum(1)
        return int(by_group.max(initial=1))
