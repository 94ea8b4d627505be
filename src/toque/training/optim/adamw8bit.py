"""AdamW with 8-bit optimizer states: its two averages take one byte a weight each, not four."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional

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
class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) with 8-bit averages (Dettmers et al. 2022).

    Plain torch, on any device. Embedding tables, whose rows are rarely and unevenly used, and
    small tensors keep float32 averages, as the paper advises.

    Args:
        groups: parameter groups; `exact: true` keeps a group's averages in float32.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        # Decay of the averages, and what is added to the root, as in torch's AdamW.
        adam = {"betas": (0.9, 0.999), "eps": 1e-8}
        super().__init__(groups, adam | {"lr": 0.0, "weight_decay": 0.0, "exact": False})
        self._exact = {id(p) for g in self.param_groups if g["exact"] for p in g["params"]}

    def initial_state(
        self, parameter: nn.Parameter, device: torch.device | str
    ) -> dict[str, Tensor]:
        """The state of `parameter` before its first update, on `device`: averages of zero."""
        zeros = torch.zeros(parameter.shape, device=device)
        state = {"step": torch.zeros((), device=device)}
        if parameter.numel() < _SMALL or id(parameter) in self._exact:
            return state | {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        codes, scales = to_bytes(zeros, signed=True)
        square_codes, square_scales = to_bytes(zeros, signed=False)
        return state | {
            "codes": codes,
            "scales": scales,
            "square_codes": square_codes,
            "square_scales": square_scales,
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; decay is decoupled."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter not in self.state:
                    self.state[parameter] = self.initial_state(parameter, parameter.device)
                change = _change(self.state[parameter], parameter.grad.float(), group)
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.add_(change.to(parameter.dtype), alpha=-group["lr"])


def _change(state: dict[str, Tensor], gradient: Tensor, group: dict[str, Any]) -> Tensor:
    """Renew a parameter's averages; Adam's quotient, before the learning rate."""
    beta1, beta2 = group["betas"]
    in_bytes = "codes" in state
    if in_bytes:
        mean = from_bytes(state["codes"], state["scales"], signed=True)
        square = from_bytes(state["square_codes"], state["square_scales"], signed=False)
    else:
        mean, square = state["exp_avg"], state["exp_avg_sq"]
    mean.lerp_(gradient, 1.0 - beta1)
    square.lerp_(gradient.square(), 1.0 - beta2)
    if in_bytes:
        state["codes"], state["scales"] = to_bytes(mean, signed=True)
        state["square_codes"], state["square_scales"] = to_bytes(square, signed=False)
    step = state["step"].add_(1.0)
    root = (square / (1.0 - beta2**step)).sqrt_().add_(group["eps"])
    change: Tensor = mean / (1.0 - beta1**step) / root
    return change
