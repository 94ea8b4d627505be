"""Linear layers by bfloat16 copies of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from toque.models.forward.bf16.weights import StackedCopy, bf16_copy


def in_bf16(tensor: Tensor) -> bool:
    """Whether bfloat16 is asked for: autocast to it on a CPU, outside of compiled code."""
    return (
        tensor.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and not torch.compiler.is_compiling()
    )


def one_product(owner: nn.Module, values: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """What the layers make of `values` [..., I], side by side: [..., sum of O] in bfloat16.

    Args:
        owner: The module the layers belong to; it holds their copy.
        values: What all of them read.
        layers: For which `is_plain` holds.
    """
    stacked: StackedCopy = owner.__dict__.setdefault("_toque_stacked", StackedCopy())
    weights = [layer.weight for layer in layers]
    product: Tensor = _Products.apply(values, stacked.of(weights), *weights)  # type: ignore[no-untyped-call]
    return product


def product_of(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer in bfloat16: [..., I] by weight [O, I] and bias [O] to [..., O]."""
    product: Tensor = _Product.apply(values, weight, bias, False)  # type: ignore[no-untyped-call]
    return product


def is_plain(*layers: nn.Module) -> bool:
    """Whether these layers' products may be one: they have no bias, and no adapter around them."""
    return all(type(layer) is Linear16 and layer.bias is None for layer in layers)


class _Products(torch.autograd.Function):
    """x @ W.T, where W is a bfloat16 copy of weights that stand one above the other."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, copy: Tensor, *weights: Tensor) -> Tensor:
        flat = values.reshape(-1, values.shape[-1]).to(torch.bfloat16)
        ctx.save_for_backward(flat, copy)
        ctx.dtype, ctx.rows = values.dtype, [len(w) for w in weights]
        product = torch.mm(flat, copy.T)
        # A view must not leave a function whose result the caller changes in place.
        return product if values.dim() == 2 else product.view(*values.shape[:-1], len(copy))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, copy = ctx.saved_tensors
        slope = grads[0].reshape(-1, len(copy)).to(torch.bfloat16)
        back = None
        if ctx.needs_input_grad[0]:
            back = torch.mm(slope, copy).to(ctx.dtype).view(*grads[0].shape[:-1], -1)
        if not any(ctx.needs_input_grad[2:]):
            return back, None, *(None for _ in ctx.rows)
        whole = torch.mm(slope.T, flat).float()
        return back, None, *torch.split(whole, ctx.rows)


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
        flat = values.reshape(-1, values.shape[-1]).to(torch.bfloat16)
        copy = bf16_copy(weight)
        ctx.save_for_backward(flat, copy)
        ctx.dtype, ctx.transposed = values.dtype, transposed
        matrix = copy if transposed else copy.T
        if bias is None:
            product = torch.mm(flat, matrix)
        else:
            product = torch.addmm(bf16_copy(bias), flat, matrix)
        # A view must not leave a function whose result the caller changes in place.
        return product if values.dim() == 2 else product.view(*values.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, copy = ctx.saved_tensors
        wants = ctx.needs_input_grad
        slope = grads[0].reshape(len(flat), -1).to(torch.bfloat16)
        back = of_weight = of_bias = None
        if wants[0]:
            back = torch.mm(slope, copy.T if ctx.transposed else copy)
            back = back.to(ctx.dtype).view(*grads[0].shape[:-1], -1)
        if wants[1]:
            pair = (flat.T, slope) if ctx.transposed else (slope.T, flat)
            of_weight = torch.mm(*pair).float()
        if wants[2]:
            of_bias = slope.sum(0, dtype=torch.float32)
        return back, of_weight, of_bias, None


class Linear16(nn.Linear):
    """`nn.Linear` in bfloat16 where autocast asks for it; its weights stay float32."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as its base calls it
        """[..., I] -> [..., O]."""
        if not in_bf16(input):
            return functional.linear(input, self.weight, self.bias)
        return product_of(input, self.weight, self.bias)


class Conv1D16(Conv1D):
    """GPT-2's linear layer, the same."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        if not in_bf16(x):
            return cast("Tensor", super().forward(x))  # type: ignore[no-untyped-call]
        product = _Product.apply(x, self.weight, self.bias, True)  # type: ignore[no-untyped-call]
        return cast("Tensor", product)
