"""Collate: token ids of examples to the tensors of a batch, packed or one example per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from toque.batch import IGNORE, Batch, DecoderBatch, EncoderDecoderBatch
from toque.data.loader.packing import RowShape
from toque.data.store.token_column import Ids, Pieces
from toque.data.store.token_store import TokenStore, only_read


class Examples(Protocol):
    """Token ids by row; a `TokenStore` is one."""

    def prompt(self, row: int, /) -> Ids:
        """Prompt ids of a store row."""

    def target(self, row: int, /) -> Ids:
        """Target ids of a store row."""


def decoder_batch(
    examples: Examples,
    rows: Sequence[Sequence[int]],
    *,
    length: int,
    pad_id: int,
    store: TokenStore | None = None,
    keys: NDArray[np.int64] | None = None,
) -> DecoderBatch:
    """Prompts and targets joined, each without its last token, which is only predicted.

    `rows` are the store rows that share a packed row of `length`; none may need more. The `store`
    says what of a conversation is only read. `keys` are the examples', in row order.
    """
    shape = (len(rows), length)
    prompts, targets = _sides(examples, rows)
    inputs = prompts.followed_by(targets.without_last())
    runs = _Runs(_Grid(rows), inputs.lengths, length)
    tokens = runs.laid_out(inputs).astype(np.int64)
    segments = runs.segments()
    padding = segments == 0
    labels = np.full(tokens.shape, IGNORE, np.int64)
    labels[:-1] = tokens[1:]
    some = inputs.lengths > 0  # a target of one token without a prompt has no input
    labels[(runs.starts + inputs.lengths - 1)[some]] = targets.last()[some]
    # Position p - 1 (the prompt's last token) predicts the target's first.
    parts = np.empty((len(inputs.lengths), 3), np.int64)
    parts[:, 0] = np.maximum(prompts.lengths - 1, 0)
    parts[:, 1] = inputs.lengths - parts[:, 0]
    parts[:, 2] = runs.spans[1::2]
    predicted = np.repeat(np.tile([False, True, False], len(parts)), parts.ravel())
    np.copyto(labels, IGNORE, where=~predicted)
    if store is not None and store.has_spans:
        _leave_read(labels, store, rows, runs.starts + parts[:, 0])
    positions = runs.positions()
    np.copyto(positions, 0, where=padding)
    if pad_id:
        np.copyto(tokens, pad_id, where=padding)
    return DecoderBatch(
        labels=_tensor(labels, shape),
        example_ids=tuple(map(tuple, rows)),
        tokens=_tensor(tokens, shape),
        segments=_tensor(segments, shape),
        positions=_tensor(positions, shape),
        keys=None if keys is None else _tensor(runs.token_keys(keys), shape),
    )


def _leave_read(
    labels: NDArray[np.int64],
    store: TokenStore,
    rows: Sequence[Sequence[int]],
    firsts: NDArray[np.int64],
) -> None:
    """Ignore what targets hold beside answers; `firsts` are places that predict their first ids."""
    for row, at in zip(chain.from_iterable(rows), firsts.tolist(), strict=True):
        for first, behind in only_read(store.spans(row)):
            labels[at + first : at + behind] = IGNORE


def encoder_decoder_batch(
    examples: Examples,
    rows: Sequence[Sequence[int]],
    *,
    shape: RowShape,
    pad_id: int,
    start_id: int,
    keys: NDArray[np.int64] | None = None,
) -> EncoderDecoderBatch:
    """Prompts as the source side and targets as the target side, shifted right from `start_id`.

    `rows` are the store rows that share a packed row of `shape`; none may need more. `keys` are the
    examples', in row order.
    """
    source_shape, target_shape = (len(rows), shape.source), (len(rows), shape.target)
    prompts, targets = _sides(examples, rows)
    grid = _Grid(rows)
    sources = _Runs(grid, prompts.lengths, shape.source)
    runs = _Runs(grid, targets.lengths, shape.target)
    source_segments, target_segments = sources.segments(), runs.segments()
    padding = target_segments == 0
    ids = runs.laid_out(targets)
    shifted = np.empty_like(ids)  # in the stored type, a quarter of the memory
    shifted[1:] = ids[:-1]
    shifted[runs.starts] = start_id
    np.copyto(shifted, pad_id, where=padding)
    target, labels = shifted.astype(np.int64), ids.astype(np.int64)
    np.copyto(labels, IGNORE, where=padding)
    source = sources.laid_out(prompts).astype(np.int64)
    if pad_id:
        np.copyto(source, pad_id, where=source_segments == 0)
    return EncoderDecoderBatch(
        labels=_tensor(labels, target_shape),
        example_ids=tuple(map(tuple, rows)),
        source_tokens=_tensor(source, source_shape),
        source_segments=_tensor(source_segments, source_shape),
        target_tokens=_tensor(target, target_shape),
        target_segments=_tensor(target_segments, target_shape),
        source_keys=None if keys is None else _tensor(sources.token_keys(keys), source_shape),
        target_keys=None if keys is None else _tensor(runs.token_keys(~keys), target_shape),
    )


def _sides(examples: Examples, rows: Sequence[Sequence[int]]) -> tuple[Pieces, Pieces]:
    """Prompts and targets in row order: from a store at once, else one by one."""
    ids = list(chain.from_iterable(rows))
    if isinstance(examples, TokenStore):
        return examples.sides(np.array(ids, np.int64))
    prompts = Pieces.of([examples.prompt(row) for row in ids])
    return prompts, Pieces.of([examples.target(row) for row in ids])


class _Grid:
    """The examples of each row, counted."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        counts = np.array(list(map(len, rows)), np.int64)
        ends = counts.cumsum()
        self.firsts, self.lasts = ends - counts, ends - 1
        self.n = int(counts.sum())
        numbers = np.arange(1, self.n + 1) - np.repeat(self.firsts, counts)
        self.segments = np.zeros(2 * self.n, np.int32)
        """[2 examples] the number of each, from 1 in every row, and 0 for the padding after it."""
        self.segments[::2] = numbers


class _Runs:
    """Places of examples written row by row: `lengths` [examples] are tokens; no row is empty."""

    def __init__(self, grid: _Grid, lengths: NDArray[np.int64], row_length: int) -> None:
        self._grid = grid
        self._gaps = row_length - np.add.reduceat(lengths, grid.firsts)
        self.spans = np.zeros(2 * grid.n, np.int64)
        """[2 examples] tokens of each, and padding after it: 0 except at the row's end."""
        self.spans[::2] = lengths
        self.spans[2 * grid.lasts + 1] = self._gaps
        self.starts = self.spans.cumsum()[::2] - lengths  # [examples] first position of each

    def laid_out(self, pieces: Pieces) -> Ids:
        """All rows in one array of the stored type; padding is 0."""
        return pieces.joined(zip(self._grid.lasts.tolist(), self._gaps.tolist(), strict=True))

    def positions(self) -> NDArray[np.int64]:
        """Tokens since the first of the example, at every position; of padding any number."""
        begins = np.zeros(len(self.spans), np.int64)
        begins[::2] = self.starts
        return np.arange(int(self.spans.sum())) - np.repeat(begins, self.spans)

    def token_keys(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The key of every token, of the examples' keys."""
        return np.repeat(np.repeat(keys, 2), self.spans) + self.positions()

    def segments(self) -> NDArray[np.int32]:
        """The number of the example at every position, from 1 in every row; padding is 0."""
        return np.repeat(self._grid.segments, self.spans)


def _tensor(flat: NDArray[np.integer], shape: tuple[int, int]) -> Tensor:
    return torch.from_numpy(flat.reshape(shape))


@dataclass(frozen=True)
class Layout:
    """Collates rows for one model family, packed or not."""

    examples: Examples
    shape: RowShape  # shape of a packed row; `source` 0 means decoder-only
    pad_id: int
    start_id: int = 0  # the decoder's first input (encoder-decoder only)
    packed: bool = True  # False: an example a row, all as long as the batch's longest

    @classmethod
    def for_model(
        cls, examples: Examples, model: PretrainedConfig, shape: RowShape, *, packed: bool
    ) -> Self:
        """The layout by which examples become the inputs of a model with this configuration."""
        start, pad = (
            getattr(model, name, None) or 0 for name in ("decoder_start_token_id", "pad_token_id")
        )
        return cls(examples, shape, pad, start, packed)

    def batch(
        self,
        rows: Sequence[Sequence[int]],
        examples: Examples | None = None,
        keys: NDArray[np.int64] | None = None,
    ) -> Batch:
        """The batch of these rows, read from `examples` if given.

        `keys` are the examples', in row order; dropout needs them.
        """
        shape, examples = self.shape, examples or self.examples
        if not self.packed:
            rows = [(example,) for row in rows for example in row]
            prompts, targets = (side.lengths for side in _sides(examples, rows))
            joined = self.shape.source == 0
            longest = int((prompts + targets - 1 if joined else targets).max(initial=1))
            shape = RowShape(0 if joined else int(prompts.max(initial=1)), longest)
        if self.shape.source == 0:
            store = self.examples if isinstance(self.examples, TokenStore) else None
            return decoder_batch(
                examples, rows, length=shape.target, pad_id=self.pad_id, store=store, keys=keys
            )
        return encoder_decoder_batch(
            examples, rows, shape=shape, pad_id=self.pad_id, start_id=self.start_id, keys=keys
        )
