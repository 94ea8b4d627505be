"""Batches: rows of packed examples as tensors.

Letters: R rows, L row length of a decoder-only model, S source and T target row length.
Segment 0 is padding; the examples of a row are numbered from 1. Tokens attend only within their
segment. `labels[r, t]` is the token to be predicted *at* position t (already shifted), or IGNORE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Self

import torch
from torch import Tensor

IGNORE = -100  # label of a position without loss


@dataclass(frozen=True)
class _Rows:
    labels: Tensor
    example_ids: tuple[tuple[int, ...], ...]
    """Store indices of the examples in each row, in row order; for replay and error messages."""
    labelled: tuple[int, ...] | None = field(default=None, kw_only=True)
    """Tokens with loss in each row, where the host knows them: on a GPU it would wait to count."""

    @property
    def n_rows(self) -> int:
        """Rows in this batch."""
        return int(self.labels.shape[0])

    @property
    def n_targets(self) -> int:
        """Tokens with loss."""
        return int((self.labels != IGNORE).sum()) if self.labelled is None else sum(self.labelled)

    def split(self, micro_batch_rows: int) -> list[Self]:
        """Consecutive micro-batches of at most `micro_batch_rows` rows, as views."""
        whole, rest = divmod(self.n_rows, micro_batch_rows)
        sizes = [micro_batch_rows] * whole + [rest] * (rest > 0)
        ids, counts = iter(self.example_ids), iter(self.labelled or ())
        tensors = self._tensors()
        known = self.labelled is not None
        parts = zip(*(torch.split(tensor, sizes) for tensor in tensors.values()), strict=True)
        return [
            self._with(
                dict(zip(tensors, part, strict=True)),
                example_ids=tuple(islice(ids, n)),
                labelled=tuple(islice(counts, n)) if known else None,
            )
            for n, part in zip(sizes, parts, strict=True)
        ]

    def unlabelled(self) -> Self:
        """One row of a token without a label, for a rank that must compute along: no loss."""
        made = {}
        for name, tensor in self._tensors().items():
            made[name] = tensor.new_full((1, *tensor.shape[1:]), IGNORE * (name == "labels"))
            if name.endswith("segments"):
                made[name][0, 0] = 1
        return self._with(made, example_ids=((),), labelled=(0,))

    def to(self, device: torch.device | str) -> Self:
        """The same batch on `device`; copies from pinned memory do not block."""
        leaves = torch.device(device).type != self.labels.device.type == "cpu"
        counted = self.counted() if leaves else self
        return counted._each(  # noqa: SLF001  # its own kind
            lambda tensor: tensor.to(device, non_blocking=True)
        )

    def pin(self) -> Self:
        """The same batch in page-locked memory."""
        return self._each(Tensor.pin_memory)

    def counted(self) -> Self:
        """The same batch with `labelled`."""
        if self.labelled is not None:
            return self
        return replace(self, labelled=tuple((self.labels != IGNORE).sum(1).tolist()))

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return list(self._tensors().values())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        return self._with({name: change(tensor) for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _with(self, tensors: Mapping[str, Tensor], **others: object) -> Self:
        """This batch with the tensors that `_tensors` names exchanged."""
        return replace(self, **tensors, **others)  # type: ignore[arg-type]


@dataclass(frozen=True)
class DecoderBatch(_Rows):
    """Rows for a decoder-only model: prompt and target joined, loss on the target.

    An example's last token is only ever predicted, so it is not among the inputs. One row with the
    examples ([7, 8], [9, 2]) and ([5], [6, 2]), prompt and target of each, L = 8:

        tokens     7 8 9 | 5 6 | 0 0 0
        labels     . 9 2 | 6 2 | . . .
        segments   1 1 1 | 2 2 | 0 0 0
        positions  0 1 2 | 0 1 | 0 0 0
    """

    tokens: Tensor  # [R, L] int64
    segments: Tensor  # [R, L] int32
    positions: Tensor  # [R, L] int64, from 0 in every example
    keys: Tensor | None = field(default=None, kw_only=True)
    """[R, L] int64 of the tokens, by example and place in it; dropout's masks depend on them."""

    def token_keys(self) -> Tensor:
        """Keys [R, L], of a batch without them by the place in it."""
        return _keys_by_place(self.tokens) if self.keys is None else self.keys

    @property
    def n_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.segments > 0).sum())

    @property
    def n_computed(self) -> int:
        """Tokens the model computes, padding included."""
        return self.segments.numel()


@dataclass(frozen=True)
class EncoderDecoderBatch(_Rows):
    """Rows for an encoder-decoder model, packed in two dimensions.

    Segment k of the source belongs to segment k of the target. `target_tokens` are the decoder's
    inputs: each example's labels shifted right by one, beginning with the start token.
    """

    source_tokens: Tensor  # [R, S] int64
    source_segments: Tensor  # [R, S] int32
    target_tokens: Tensor  # [R, T] int64
    target_segments: Tensor  # [R, T] int32
    source_keys: Tensor | None = field(default=None, kw_only=True)  # [R, S] int64, as `keys` above
    target_keys: Tensor | None = field(default=None, kw_only=True)  # [R, T]

    def token_keys(self) -> tuple[Tensor, Tensor]:
        """Keys [R, S] and [R, T] of both sides, of a batch without them by the place in it."""
        if self.source_keys is None or self.target_keys is None:
            return _keys_by_place(self.source_tokens), ~_keys_by_place(self.target_tokens)
        return self.source_keys, self.target_keys

    @property
    def n_tokens(self) -> int:
        """Tokens of both sides that are not padding."""
        return int((self.source_segments > 0).sum()) + int((self.target_segments > 0).sum())

    @property
    def n_computed(self) -> int:
        """Tokens of both sides the model computes, padding included."""
        return self.source_segments.numel() + self.target_segments.numel()


def _keys_by_place(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)


Batch = DecoderBatch | EncoderDecoderBatch
