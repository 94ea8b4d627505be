"""Token ids to tensors: rows of examples become a batch, packed or one example a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from toque.batch import IGNORE, Batch, DecoderBatch, EncoderDecoderBatch
from toque.data.packing import RowShape

Ids = NDArray[np.generic]


class Examples(Protocol):
    """What a layout reads from; a `TokenStore` is one."""

    def prompt(self, row: int, /) -> Ids:
        """Prompt ids of a store row."""

    def target(self, row: int, /) -> Ids:
        """Target ids of a store row."""


def decoder_batch(
    examples: Examples, rows: Sequence[Sequence[int]], *, length: int, pad_id: int
) -> DecoderBatch:
    """Prompt and target joined; the last token is only predicted, so it is not an input.

    Args:
        examples: where ids come from.
        rows: store rows that share a packed row, for each packed row.
        length: L; no row may need more.
        pad_id: fills the rest.
    """
    shape = (len(rows), length)
    tokens, labels = np.full(shape, pad_id, np.int64), np.full(shape, IGNORE, np.int64)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int64)
    counting = np.arange(length)
    for r, row in enumerate(rows):
        start = 0
        for segment, example in enumerate(row, start=1):
            prompt, target = examples.prompt(example), examples.target(example)
            p, end = len(prompt), start + len(prompt) + len(target) - 1
            tokens[r, start : start + p] = prompt
            tokens[r, start + p : end] = target[:-1]
            # Position p - 1 (the prompt's last token) predicts the target's first.
            if p:
                labels[r, start + p - 1 : end] = target
            else:
                labels[r, start:end] = target[1:]
            segments[r, start:end] = segment
            positions[r, start:end] = counting[: end - start]
            start = end
    return DecoderBatch(
        labels=torch.from_numpy(labels),
        example_ids=tuple(tuple(row) for row in rows),
        tokens=torch.from_numpy(tokens),
        segments=torch.from_numpy(segments),
        positions=torch.from_numpy(positions),
    )


def encoder_decoder_batch(
    examples: Examples,
    rows: Sequence[Sequence[int]],
    *,
    shape: RowShape,
    pad_id: int,
    start_id: int,
) -> EncoderDecoderBatch:
    """Prompts on the source side, targets shifted right on the target side.

    Args:
        examples: where ids come from.
        rows: store rows that share a packed row, for each packed row.
        shape: S and T; no row may need more.
        pad_id: fills the rest.
        start_id: the decoder's first input of every example.
    """
    source_shape, target_shape = (len(rows), shape.source), (len(rows), shape.target)
    source, target = (
        np.full(source_shape, pad_id, np.int64),
        np.full(target_shape, pad_id, np.int64),
    )
    labels = np.full(target_shape, IGNORE, np.int64)
    source_segments, target_segments = (
        np.zeros(source_shape, np.int32),
        np.zeros(target_shape, np.int32),
    )
    for r, row in enumerate(rows):
        s = t = 0
        for segment, example in enumerate(row, start=1):
            prompt, answer = examples.prompt(example), examples.target(example)
            s_end, t_end = s + len(prompt), t + len(answer)
            source[r, s:s_end] = prompt
            source_segments[r, s:s_end] = segment
            target[r, t] = start_id
            target[r, t + 1 : t_end] = answer[:-1]
            labels[r, t:t_end] = answer
            target_segments[r, t:t_end] = segment
            s, t = s_end, t_end
    return EncoderDecoderBatch(
        labels=torch.from_numpy(labels),
        example_ids=tuple(tuple(row) for row in rows),
        source_tokens=torch.from_numpy(source),
        source_segments=torch.from_numpy(source_segments),
        target_tokens=torch.from_numpy(target),
        target_segments=torch.from_numpy(target_segments),
    )


class Layout:
    """How one model family's rows are laid out, packed or not.

    Args:
        examples: where ids come from.
        shape: what a packed row holds; `source` 0 means decoder-only.
        pad_id: of the tokenizer.
        start_id: the decoder's first input (encoder-decoder only).
        packed: False lays every example in a row of its own, as long as the batch's longest.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        shape: RowShape,
        pad_id: int,
        start_id: int = 0,
        packed: bool = True,
    ) -> None:
        self.examples = examples
        self.shape = shape
        self.pad_id = pad_id
        self.start_id = start_id
        self.packed = packed

    def batch(self, rows: Sequence[Sequence[int]], examples: Examples | None = None) -> Batch:
        """The batch of these rows of examples, read from `examples` where they are given."""
        shape, examples = self.shape, examples or self.examples
        if not self.packed:
            rows = [(example,) for row in rows for example in row]
            shape = self._longest([example for (example,) in rows], examples)
        if self.shape.source == 0:
            return decoder_batch(examples, rows, length=shape.target, pad_id=self.pad_id)
        return encoder_decoder_batch(
            examples, rows, shape=shape, pad_id=self.pad_id, start_id=self.start_id
        )

    def _longest(self, rows: Sequence[int], examples: Examples) -> RowShape:
        prompts = [len(examples.prompt(row)) for row in rows]
        targets = [len(examples.target(row)) for row in rows]
        if self.shape.source == 0:
            return RowShape(
                0, max((p + t - 1 for p, t in zip(prompts, targets, strict=True)), default=1)
            )
        return RowShape(max(prompts, default=1), max(targets, default=1))
