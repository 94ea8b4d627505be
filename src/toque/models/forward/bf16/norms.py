"""Norms that read float32 and write what the next product reads, bfloat16."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from toque.models.forward.bf16.linear import in_bf16

_LAYER_NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward


class _RmsNorm(torch.autograd.Function):
    """w * x / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, eps: float) -> Tensor:
        # PyTorch's own squares all of `values` in a pass of its own.
        scale = torch.linalg.vector_norm(values, dim=-1, keepdim=True, dtype=torch.float32)
        scale = scale.square_().mul_(1.0 / len(weight)).add_(eps).rsqrt_()
        ctx.save_for_backward(values, weight, scale)
        normed: Tensor = (values * scale).mul_(weight)
        return normed.to(torch.bfloat16)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, scale = ctx.saved_tensors
        slope, exact, factors = grads[0].float(), values.float(), weight.float()
        # LayerNorm's kernel does it in one pass, told that the mean is zero. Its gradient lacks
        # s * mean(g w), which came through the mean.
        back, of_weight, _ = _LAYER_NORM_BACKWARD(
            slope,
            exact,
            factors.shape,
            torch.zeros_like(scale),
            scale,
            factors,
            None,
            [True, ctx.needs_input_grad[1], False],
        )
        through_mean = (slope @ factors).unsqueeze(-1).mul_(scale).mul_(1.0 / len(weight))
        return back.add_(through_mean).to(values.dtype), of_weight, None


def _normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = _RmsNorm.apply(hidden, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class LlamaRMSNorm16(LlamaRMSNorm):
    """Llama's norm, to bfloat16 where autocast asks for it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        if not in_bf16(hidden_states):
            return super().forward(hidden_states)
        return _normed(hidden_states, self.weight, self.variance_epsilon)


class T5LayerNorm16(T5LayerNorm):
    """T5's norm, to bfloat16 where autocast asks for it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        if not in_bf16(hidden_states):
            return cast("Tensor", super().forward(hidden_states))  # type: ignore[no-untyped-call]
        return _normed(hidden_states, self.weight, self.variance_epsilon)


class LayerNorm16(nn.LayerNorm):
    """`nn.LayerNorm`, to bfloat16 where autocast asks for it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as its base calls it
        """[..., D] -> [..., D]."""
        normed = super().forward(input)
        return normed.to(torch.bfloat16) if in_bf16(input) else normed
