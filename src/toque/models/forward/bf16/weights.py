"""Bfloat16 copies of float32 weights, made anew when the weights change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_NAME, _PADDED = "_toque_bf16", "_toque_bf16_padded"
_WHOLE_ROWS = 64
"""Rows of an output head are padded to a multiple of it, see `padded_copy`."""


def padded_length(n: int) -> int:
    """`n` rounded up so that few different shapes of products occur: by at most 1/16, or 31.

    oneDNN generates code for each shape it has not seen, a millisecond a product, and forgets those
    above a thousand: with a new number of tokens every time, small products cost twice.

    >>> padded_length(970), padded_length(3000)
    (992, 3072)
    """
    step = max(32, 1 << max(0, n.bit_length() - 5))
    return -(-n // step) * step


def bf16_copy(weight: Tensor) -> Tensor:
    """`weight` in bfloat16; the same tensor until the weight changes in place.

    A change is known by the weight's version counter. Fused optimizers change weights without
    counting, so `Runtime.optimizer_step` counts for them.
    """
    return weight.detach() if weight.dtype == torch.bfloat16 else _kept(weight, len(weight), _NAME)


def padded_copy(weight: Tensor) -> Tensor:
    """An output head's weight [V, D] as `bf16_copy`'s, with rows of zeros up to a multiple of 64.

    oneDNN computes the gradient of 50,257 rows at 560 GFLOP/s and of 50,304 at 760 (672 labels of
    384, two Zen 5 cores). A weight that is bfloat16 itself is frozen and has no gradient.
    """
    rows = -(-len(weight) // _WHOLE_ROWS) * _WHOLE_ROWS
    if weight.dtype == torch.bfloat16 or rows == len(weight):
        return bf16_copy(weight)
    return _kept(weight, rows, _PADDED)


def copies_of(weight: Tensor) -> list[Tensor]:
    """The copies that are kept of a weight."""
    held = (getattr(weight, name, None) for name in (_NAME, _PADDED))
    return [one[1] for one in held if one is not None]


def _kept(weight: Tensor, rows: int, name: str) -> Tensor:
    now = _state_of(weight)
    held: tuple[tuple[int, int], Tensor] | None = getattr(weight, name, None)
    if held is not None and held[0] == now:
        return held[1]
    shape = (rows, *weight.shape[1:])
    with torch.no_grad():
        if held is not None and held[1].shape == shape:
            copy = held[1]
        else:
            copy = weight.new_zeros(shape, dtype=torch.bfloat16)
        copy[: len(weight)].copy_(weight)
    setattr(weight, name, (now, copy))
    return copy


@dataclass
class StackedCopy:
    """One bfloat16 copy of several weights [O, I], one above the other.

    Layers that read the same input then are one product, forward and backward.
    """

    copy: Tensor | None = None
    made_from: list[tuple[int, int]] = field(default_factory=list)

    def of(self, weights: Sequence[Tensor]) -> Tensor:
        """[sum of O, I]."""
        now = [_state_of(w) for w in weights]
        if self.copy is None or now != self.made_from:
            with torch.no_grad():
                parts = [w.detach().to(torch.bfloat16) for w in weights]
                self.copy = torch.cat(parts, out=self.copy)
            self.made_from = now
        return self.copy


def _state_of(weight: Tensor) -> tuple[int, int]:
    """What differs once the weight was changed or its memory exchanged.

    By the storage, not by its data's address, which a tensor without memory (`FakeTensor`) lacks.
    """
    return weight._version, weight.untyped_storage()._cdata  # noqa: SLF001  # no public names
