"""Batches: rows of packed examples as tensors.

Shapes: R rows, row length L of a decoder-only model, row lengths S (source) and T (target) of an
encoder-decoder. The examples of a row are segments 1, 2, ...; segment 0 is padding. Tokens attend
only within their segment. `labels[r, t]` is the token to predict at position t (already shifted),
or `IGNORE`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Self

import torch
from torch import Tensor

IGNORE = -100
"""Label of a position without loss, as in torch's cross entropy."""


@dataclass(frozen=True)
class _Rows:
    labels: Tensor
    example_ids: tuple[tuple[int, ...], ...]
    """Store rows of the examples in each batch row, in order, for replay and error messages.
    """
    label_weights: Tensor | None = field(default=None, kw_only=True)
    """Factors of the labels' losses, float32 in the shape of `labels`. They may be negative. None:
    all are 1."""
    labelled: tuple[int, ...] | None = field(default=None, kw_only=True)
    """Number of tokens with loss in each row, if counted on the CPU. Counting on a GPU would wait
    for it.
    """

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return int(self.labels.shape[0])

    @property
    def n_targets(self) -> int:
        """Number of tokens with loss."""
        if self.labelled is not None:
            return sum(self.labelled)
        return int((self.labels != IGNORE).sum())

    def split(self, micro_batch_rows: int) -> list[Self]:
        """Split into consecutive micro-batches of at most `micro_batch_rows` rows, as views."""
        starts = range(0, self.n_rows, micro_batch_rows)
        return [self._part(slice(start, start + micro_batch_rows)) for start in starts]

    def unlabelled(self) -> Self:
        """Make a row of one token without loss, for a rank without a row."""
        zeros = self._map_tensors(lambda old: old.new_zeros((1, *old.shape[1:])))
        row = replace(zeros, example_ids=((),), labelled=(0,))
        row.labels.fill_(IGNORE)
        # Attention needs at least one token that is not padding.
        for name, tensor in row.tensors().items():
            if name.endswith("segments"):
                tensor[0, 0] = 1
        return row

    def to(self, device: torch.device | str) -> Self:
        """Copy the batch to `device`. Copies from pinned memory do not block."""
        # Count on the CPU, because counting on the device would wait for it.
        is_on_cpu = self.labels.device.type == "cpu"
        leaves_cpu = is_on_cpu and torch.device(device).type != "cpu"
        batch = self.counted() if leaves_cpu else self
        return batch._map_tensors(  # noqa: SLF001
            lambda tensor: tensor.to(device, non_blocking=True)
        )

    def pin(self) -> Self:
        """Copy the batch to page-locked memory."""
        return self._map_tensors(Tensor.pin_memory)

    def counted(self) -> Self:
        """Return a batch with the number of tokens with loss per row in `labelled`."""
        if self.labelled is not None:
            return self
        return replace(self, labelled=tuple((self.labels != IGNORE).sum(1).tolist()))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the names of their fields."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: value for name, value in values.items() if isinstance(value, Tensor)
        }

    def _part(self, rows: slice) -> Self:
        part = self._map_tensors(lambda tensor: tensor[rows])
        labelled = None if self.labelled is None else self.labelled[rows]
        return replace(part, example_ids=self.example_ids[rows], labelled=labelled)

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)  # type: ignore[arg-type]


@dataclass(frozen=True)
class DecoderBatch(_Rows):
    """Rows for a decoder-only model: prompt and target joined, loss on the target.

    The last token of an example is predicted but never read, so it is not an input. The examples
    ([7, 8], [9, 2]) and ([5], [6, 2]), each a prompt and a target, in one row of L = 8:

        tokens     7 8 9 | 5 6 | 0 0 0
        labels     . 9 2 | 6 2 | . . .
        segments   1 1 1 | 2 2 | 0 0 0
        positions  0 1 2 | 0 1 | 0 0 0
    """

    tokens: Tensor  # [R, L] int64
    segments: Tensor  # [R, L] int32
    positions: Tensor  # [R, L] int64, from 0 in every example
    keys: Tensor | None = field(default=None, kw_only=True)
    """[R, L] int64 random keys of the tokens, by example and position. Dropout masks use them."""

    def token_keys(self) -> Tensor:
        """Return the tokens' random keys [R, L]. Without `keys`, number the tokens."""
        return _numbered(self.tokens) if self.keys is None else self.keys

    @property
    def n_tokens(self) -> int:
        """Number of tokens without padding."""
        return int((self.segments > 0).sum())

    @property
    def n_computed(self) -> int:
        """Number of tokens that the model computes, with padding."""
        return self.segments.numel()


@dataclass(frozen=True)
class EncoderDecoderBatch(_Rows):
    """Rows for an encoder-decoder model, packed in two dimensions.

    Segment k of the source belongs to segment k of the target. `target_tokens` are the decoder's
    inputs: the start token, then the labels of the example without the last one.
    """

    source_tokens: Tensor  # [R, S] int64
    source_segments: Tensor  # [R, S] int32
    target_tokens: Tensor  # [R, T] int64
    target_segments: Tensor  # [R, T] int32
    source_keys: Tensor | None = field(default=None, kw_only=True)
    """[R, S] int64 random keys of the source tokens, as `DecoderBatch.keys`."""
    target_keys: Tensor | None = field(default=None, kw_only=True)
    """[R, T] int64 random keys of the target tokens."""

    def token_keys(self) -> tuple[Tensor, Tensor]:
        """Return the random keys [R, S] and [R, T] of both sides. Without keys, number the tokens.

        Target numbers are negative, so that no key appears on both sides.
        """
        if self.source_keys is None or self.target_keys is None:
            return _numbered(self.source_tokens), ~_numbered(self.target_tokens)
        return self.source_keys, self.target_keys

    @property
    def n_tokens(self) -> int:
        """Number of tokens on both sides without padding."""
        n_source = int((self.source_segments > 0).sum())
        n_target = int((self.target_segments > 0).sum())
        return n_source + n_target

    @property
    def n_computed(self) -> int:
        """Number of tokens on both sides that the model computes, with padding."""
        return self.source_segments.numel() + self.target_segments.numel()


def _numbered(tokens: Tensor) -> Tensor:
    """Return 0, 1, 2, ... in the shape of `tokens`."""
    return torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)


Batch = DecoderBatch | EncoderDecoderBatch
