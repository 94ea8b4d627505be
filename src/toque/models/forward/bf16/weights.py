"""Bfloat16 copies of float32 weights, made anew when the weights change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_NAME = "_toque_bf16"
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
    if weight.dtype == torch.bfloat16:
        return weight.detach()
    now = _state_of(weight)
    held: tuple[tuple[int, int], Tensor] | None = getattr(weight, _NAME, None)
    if held is not None and held[0] == now:
        return held[1]
    with torch.no_grad():
        if held is not None and held[1].shape == weight.shape:
            copy = held[1].copy_(weight)
        else:
            copy = weight.detach().to(torch.bfloat16)
    setattr(weight, _NAME, (now, copy))
    return copy


def padded_copy(weight: Tensor) -> Tensor:
    """An output head's weight [V, D] in bfloat16, with rows of zeros up to a multiple of 64.

    oneDNN computes the gradient of 50,257 rows at 560 GFLOP/s and of 50,304 at 760 (672 labels of
    384, two Zen 5 cores). Made anew as `bf16_copy`'s. A weight that is bfloat16 itself is frozen,
    has no gradient, and stays as it is.
    """
    if weight.dtype == torch.bfloat16 or len(weight) % _WHOLE_ROWS == 0:
        return bf16_copy(weight)
    now = _state_of(weight)
    held: tuple[tuple[int, int], Tensor] | None = getattr(weight, _NAME, None)
    rows = -(-len(weight) // _WHOLE_ROWS) * _WHOLE_ROWS
    copy = None if held is None else held[1]
    if copy is None or copy.shape != (rows, weight.shape[1]):
        copy = weight.new_zeros(rows, weight.shape[1], dtype=torch.bfloat16)
    elif held is not None and held[0] == now:
        return copy
    with torch.no_grad():
        copy[: len(weight)].copy_(weight)
    setattr(weight, _NAME, (now, copy))
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
