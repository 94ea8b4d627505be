"""AdamW whose two averages take one byte a weight each instead of four."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from toque.training.optim.skippable import SkippableOptimizer

_BLOCK: Final = 256
"""Weights that share one scale; bitsandbytes' own choice since version 0.43."""
_SMALL: Final = 4096
"""Tensors below this stay in float32, as in Dettmers et al.: they weigh nothing."""


@cache
def code_book(*, signed: bool) -> Tensor:
    """The 256 numbers a byte can mean, ascending, in [-1, 1] or [0, 1].

    Dynamic tree quantisation, Dettmers et al. 2022 (arXiv 2110.02861), section 2.2: in each of
    seven decades the middles of equal intervals, twice as many as in the decade below; 0 and 1.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(
            0.1, 1.0, 2 ** (decade + (0 if signed else 1)) + 1, dtype=torch.double
        )
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        numbers += middles + ([-m for m in middles] if signed else [])
    return torch.tensor(sorted(numbers))


def to_bytes(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """`values` as bytes of the same shape, and one float32 scale for each block of 256.

    What is above 0 never becomes 0 in the unsigned form: a second moment rounded down to nothing
    would make Adam's quotient explode.
    """
    flat = functional.pad(values.reshape(-1), (0, -values.numel() % _BLOCK)).view(-1, _BLOCK)
    scale = flat.abs().amax(1)
    shares = flat / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    book = code_book(signed=signed)
    edges = (book[:-1] + book[1:]) / 2
    if not signed:
        edges[0] = 0.0
    codes = torch.bucketize(shares, edges.to(values.device)).to(torch.uint8)
    return codes.view(-1)[: values.numel()].view(values.shape), scale


def from_bytes(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """The float32 numbers that `to_bytes` stored, to within a code's width."""
    book = code_book(signed=signed).to(codes.device)
    flat = functional.pad(book[codes.reshape(-1).int()], (0, -codes.numel() % _BLOCK))
    return (flat.view(-1, _BLOCK) * scale[:, None]).view(-1)[: codes.numel()].view(codes.shape)


@final
class AdamW8bit(SkippableOptimizer):
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) with 8-bit averages (Dettmers et al. 2022).

    Plain torch, on any device. Embedding tables, whose rows are rarely and unevenly used, and
    small tensors keep float32 averages, as the paper advises.

    Args:
        groups: parameter groups; `exact: true` keeps a group's averages in float32.
        betas: decay of the two averages.
        eps: added to the root of the second.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, betas: tuple[float, float], eps: float
    ) -> None:
        defaults = {"lr": 0.0, "weight_decay": 0.0, "betas": betas, "eps": eps, "exact": False}
        super().__init__(groups, defaults)
        self._exact = {id(p) for g in self.param_groups if g["exact"] for p in g["params"]}

    def state_shapes(self, parameter: nn.Parameter) -> dict[str, tuple[int, ...]]:
        """See the base."""
        shape = tuple(parameter.shape)
        if not self._in_bytes(parameter):
            return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        blocks = (-(-parameter.numel() // _BLOCK),)
        return {
            "step": (),
            "codes": shape,
            "scales": blocks,
            "square_codes": shape,
            "square_scales": blocks,
        }

    def state_dtype(self, name: str) -> torch.dtype:
        """See the base."""
        return torch.uint8 if name.endswith("codes") else torch.float32

    def _in_bytes(self, parameter: Tensor) -> bool:
        return parameter.numel() >= _SMALL and id(parameter) not in self._exact

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        fresh = parameter not in self.state
        state = super()._state_of(parameter)
        if fresh and "codes" in state:
            state["codes"] += code_book(signed=True).tolist().index(0.0)
        return state

    def update_parameter(
        self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], gate: Tensor
    ) -> Tensor:
        """See the base."""
        state, (beta1, beta2) = self._state_of(parameter), group["betas"]
        state["step"] += gate
        in_bytes = self._in_bytes(parameter)
        if in_bytes:
            mean = from_bytes(state["codes"], state["scales"], signed=True)
            square = from_bytes(state["square_codes"], state["square_scales"], signed=False)
        else:
            mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, (1.0 - beta1) * gate)
        square.lerp_(gradient.square(), (1.0 - beta2) * gate)
        if in_bytes:
            # Twice quantised is once quantised, but for the scale's last bit: with the gate shut
            # the old bytes must stay.
            fresh = (*to_bytes(mean, signed=True), *to_bytes(square, signed=False))
            names = ("codes", "scales", "square_codes", "square_scales")
            for name, value in zip(names, fresh, strict=True):
                state[name].copy_(torch.where(gate > 0, value, state[name]))
        step = state["step"].clamp(min=1.0)
        root = (square / (1.0 - beta2**step)).sqrt_().add_(group["eps"])
        change: Tensor = mean / (1.0 - beta1**step) / root
        return change
