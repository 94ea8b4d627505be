"""The layers that a CPU computes fastest in a run's precision; float32's are here.

Linear layers in float32 go by oneDNN where that is faster than torch's own library, see
`models/onednn.py`: on such a processor a float32 update takes about half the time.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from toque.models.forward.bf16_layers import use_bf16_layers
from toque.models.onednn import onednn_is_faster, product


def by_onednn(device: torch.device) -> bool:
    """True if float32 products go by oneDNN now: on such a CPU, outside autocast and compiling."""
    return (
        device.type == "cpu"
        and onednn_is_faster()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


class _Product(torch.autograd.Function):
    """x @ W.T + b, or x @ W + b for a weight [I, O] as GPT-2's layers hold it."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,  # noqa: FBT001  # autograd functions take arguments by position
    ) -> Tensor:
        flat = values.reshape(-1, values.shape[-1])
        ctx.save_for_backward(flat, weight)
        ctx.transposed = transposed
        found = product(flat, weight.T if transposed else weight, bias)
        return found.view(*values.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight = ctx.saved_tensors
        wants = ctx.needs_input_grad
        slope = grads[0].reshape(len(flat), -1)
        back = of_weight = of_bias = None
        if wants[0]:
            back = product(slope, weight if ctx.transposed else weight.T)
            back = back.view(*grads[0].shape[:-1], -1)
        if wants[1]:
            pair = (flat.T, slope.T) if ctx.transposed else (slope.T, flat.T)
            of_weight = product(*pair)
        if wants[2]:
            of_bias = slope.sum(0)
        return back, of_weight, of_bias, None


def _fits(values: Tensor, weight: Tensor) -> bool:
    both = values.dtype == weight.dtype == torch.float32
    return both and values.numel() > 0 and by_onednn(values.device)


class Float32Linear(nn.Linear):
    """`nn.Linear`; its weights, names and what is saved stay the same."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as its base calls it
        """[..., I] -> [..., O]."""
        if not _fits(input, self.weight):
            return super().forward(input)
        found = _Product.apply(input, self.weight, self.bias, False)  # type: ignore[no-untyped-call]
        return cast("Tensor", found)


class Float32Conv1D(Conv1D):
    """GPT-2's linear layer, the same."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        if not _fits(x, self.weight):
            return cast("Tensor", super().forward(x))  # type: ignore[no-untyped-call]
        found = _Product.apply(x, self.weight, self.bias, True)  # type: ignore[no-untyped-call]
        return cast("Tensor", found)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Float32Linear,
    Conv1D: Float32Conv1D,
}


def use_float32_layers(model: nn.Module) -> int:
    """Exchange a model's linear layers for these where they are faster; returns how many."""
    found = 0
    for module in model.modules() if onednn_is_faster() else ():
        other = _CLASSES.get(type(module))
        if other is not None:
            module.__class__ = other
            found += 1
    return found


def use_cpu_layers(model: nn.Module, precision: str) -> int:
    """Exchange layers of a model on a CPU; returns how many. Nothing changes elsewhere.

    Args:
        model: Its weights, their names and what is saved stay the same.
        precision: Of the run's products: bf16 or float32.
    """
    return use_bf16_layers(model) if precision == "bf16" else use_float32_layers(model)
