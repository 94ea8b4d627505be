"""Norms and feed-forward layers in bfloat16 on a CPU, and the exchange of a model's layers."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.activations import SiLUActivation
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5Attention, T5DenseGatedActDense, T5LayerNorm
from transformers.pytorch_utils import Conv1D

from toque.models.forward.bf16_attention import (
    GPT2Attention16,
    GPTNeoXAttention16,
    LlamaAttention16,
    T5Attention16,
)
from toque.models.forward.bf16_linear import Conv1D16, Linear16, in_bf16, is_plain, one_product

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


_ATEN = torch.ops.aten


class _Gate(torch.autograd.Function):
    """act(a) * b of [..., a and b] (Shazeer 2020, arXiv 2002.05202, equation 6)."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, gelu: bool) -> Tensor:  # noqa: FBT001  # by position
        ctx.gelu = gelu
        gate, up = both.chunk(2, -1)
        active = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
        ctx.save_for_backward(both, active)
        return active * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        both, active = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        back = torch.empty_like(both)
        of_gate, of_up = back.chunk(2, -1)
        torch.mul(grads[0], active, out=of_up)
        slope = grads[0] * up
        if ctx.gelu:
            _ATEN.gelu_backward.grad_input(slope, gate, approximate="tanh", grad_input=of_gate)
        else:
            _ATEN.silu_backward.grad_input(slope, gate, grad_input=of_gate)
        return back, None


class LlamaMLP16(LlamaMLP):
    """Llama's feed-forward layer."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        silu = isinstance(self.act_fn, (nn.SiLU, SiLUActivation))
        if not (in_bf16(x) and silu and is_plain(self.gate_proj, self.up_proj)):
            return cast("Tensor", super().forward(x))  # type: ignore[no-untyped-call]
        both = one_product(self, x, (self.gate_proj, self.up_proj))
        return cast("Tensor", self.down_proj(_Gate.apply(both, False)))  # type: ignore[no-untyped-call]


class T5DenseGatedActDense16(T5DenseGatedActDense):
    """T5 v1.1's feed-forward layer."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        gelu = isinstance(self.act, nn.GELU) and self.act.approximate == "tanh"
        if not (in_bf16(hidden_states) and gelu and is_plain(self.wi_0, self.wi_1, self.wo)):
            return cast("Tensor", super().forward(hidden_states))  # type: ignore[no-untyped-call]
        both = one_product(self, hidden_states, (self.wi_0, self.wi_1))
        hidden = _Gate.apply(both, True)  # type: ignore[no-untyped-call]
        return cast("Tensor", self.wo(self.dropout(hidden)))


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear16,
    Conv1D: Conv1D16,
    LlamaRMSNorm: LlamaRMSNorm16,
    T5LayerNorm: T5LayerNorm16,
    nn.LayerNorm: LayerNorm16,
    LlamaMLP: LlamaMLP16,
    T5DenseGatedActDense: T5DenseGatedActDense16,
    LlamaAttention: LlamaAttention16,
    T5Attention: T5Attention16,
    GPT2Attention: GPT2Attention16,
    GPTNeoXAttention: GPTNeoXAttention16,
}


def use_bf16_layers(model: nn.Module) -> int:
    """Let the layers of a model on a CPU compute in bfloat16; returns how many do.

    Only within bfloat16 autocast: elsewhere they are what they were. Weights, names and what is
    saved stay the same. Frozen weights are bfloat16 already and need no copy.
    """
    found = 0
    for module in model.modules():
        other = _CLASSES.get(type(module))
        if other is not None and all(p.device.type == "cpu" for p in module.parameters()):
            if isinstance(module, nn.Linear) and module.weight.dtype != torch.float32:
                continue
            module.__class__ = other
            found += 1
    return found
