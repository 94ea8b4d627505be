"""Batches: rows of packed examples as tensors.

Shapes: R rows; L tokens per row of a decoder-only model; S source and T target tokens per row of an
encoder-decoder model. Segment 0 is padding, and the examples of a row are the segments 1, 2, and so
on. Tokens attend only to their segment. `labels[r, t]` is the token to predict at position t
(already shifted), or IGNORE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Self

import torch
from torch import Tensor

IGNORE = -100
"""Label of a position without loss."""


@dataclass(frozen=True)
class _Rows:
    labels: Tensor
    example_ids: tuple[tuple[int, ...], ...]
    """Store indices of the examples per row, in order, for replay and error messages."""
    labelled: tuple[int, ...] | None = field(default=None, kw_only=True)
    """Tokens with loss per row, counted before a copy to a GPU, where counting would wait."""

    @property
    def n_rows(self) -> int:
        """Rows in this batch."""
        return int(self.labels.shape[0])

    @property
    def n_targets(self) -> int:
        """Tokens with loss."""
        return int((self.labels != IGNORE).sum()) if self.labelled is None else sum(self.labelled)

    def split(self, micro_batch_rows: int) -> list[Self]:
        """Split into consecutive micro-batches of at most `micro_batch_rows` rows, as views."""
        micro_batches = []
        for start in range(0, self.n_rows, micro_batch_rows):
            rows = slice(start, start + micro_batch_rows)
            tensors = {name: tensor[rows] for name, tensor in self._tensors().items()}
            labelled = None if self.labelled is None else self.labelled[rows]
            micro_batches.append(
                self._replace(tensors, example_ids=self.example_ids[rows], labelled=labelled)
            )
        return micro_batches

    def unlabelled(self) -> Self:
        """Create a row with one token and without loss, for a rank without examples."""
        tensors = {}
        for name, tensor in self._tensors().items():
            value = IGNORE if name == "labels" else 0
            tensors[name] = tensor.new_full((1, *tensor.shape[1:]), value)
            if name.endswith("segments"):
                tensors[name][0, 0] = 1
        return self._replace(tensors, example_ids=((),), labelled=(0,))

    def to(self, device: torch.device | str) -> Self:
        """Copy to a device. Copies from pinned memory do not block."""
        leaves_cpu = torch.device(device).type != self.labels.device.type == "cpu"
        batch = self.counted() if leaves_cpu else self
        return batch._map(  # noqa: SLF001  # an instance of the same class
            lambda tensor: tensor.to(device, non_blocking=True)
        )

    def pin(self) -> Self:
        """Copy to page-locked memory."""
        return self._map(Tensor.pin_memory)

    def counted(self) -> Self:
        """Return the batch with `labelled`."""
        if self.labelled is not None:
            return self
        return replace(self, labelled=tuple((self.labels != IGNORE).sum(1).tolist()))

    def tensors(self) -> list[Tensor]:
        """List all tensors of the batch."""
        return list(self._tensors().values())

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return self._replace({name: function(tensor) for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _replace(self, tensors: Mapping[str, Tensor], **others: object) -> Self:
        return replace(self, **tensors, **others)  # type: ignore[arg-type]


@dataclass(frozen=True)
class DecoderBatch(_Rows):
    """Rows for a decoder-only model: prompt and target joined, loss on the target.

    The last token of an example is a label, but not an input. Example: one row, L = 8, with the
    prompts and targets ([7, 8], [9, 2]) and ([5], [6, 2]):

        tokens     7 8 9 | 5 6 | 0 0 0
        labels     . 9 2 | 6 2 | . . .
        segments   1 1 1 | 2 2 | 0 0 0
        positions  0 1 2 | 0 1 | 0 0 0
    """

    tokens: Tensor  # [R, L] int64
    segments: Tensor  # [R, L] int32
    positions: Tensor  # [R, L] int64, from 0 in every example
    keys: Tensor | None = field(default=None, kw_only=True)
    """[R, L] int64: a key per token, from its example and position. It determines dropout."""

    def token_keys(self) -> Tensor:
        """Return the keys [R, L], or the positions in the batch without keys."""
        return _positions_in(self.tokens) if self.keys is None else self.keys

    @property
    def n_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.segments > 0).sum())

    @property
    def n_computed(self) -> int:
        """Tokens that the model computes, including padding."""
        return self.segments.numel()


@dataclass(frozen=True)
class EncoderDecoderBatch(_Rows):
    """Rows for an encoder-decoder model. Sources and targets are packed.

    Segment k of a source belongs to segment k of the target. `target_tokens` are the decoder's
    inputs: the labels of each example after the start token.
    """

    source_tokens: Tensor  # [R, S] int64
    source_segments: Tensor  # [R, S] int32
    target_tokens: Tensor  # [R, T] int64
    target_segments: Tensor  # [R, T] int32
    source_keys: Tensor | None = field(default=None, kw_only=True)
    """[R, S] int64, as the keys of `DecoderBatch`."""
    target_keys: Tensor | None = field(default=None, kw_only=True)
    """[R, T] int64."""

    def token_keys(self) -> tuple[Tensor, Tensor]:
        """Return the keys [R, S] and [R, T], or the positions in the batch without keys."""
        if self.source_keys is None or self.target_keys is None:
            return _positions_in(self.source_tokens), ~_positions_in(self.target_tokens)
        return self.source_keys, self.target_keys

    @property
    def n_tokens(self) -> int:
        """Tokens of sources and targets that are not padding."""
        return int((self.source_segments > 0).sum()) + int((self.target_segments > 0).sum())

    @property
    def n_computed(self) -> int:
        """Tokens of sources and targets that the model computes, including padding."""
        return self.source_segments.numel() + self.target_segments.numel()


def _positions_in(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)


Batch = DecoderBatch | EncoderDecoderBatch
