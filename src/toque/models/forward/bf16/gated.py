"""Gated feed-forward layers: one product for gate and up, and their gradient in one tensor."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

from toque.models.forward.bf16.linear import in_bf16, is_plain, one_product

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
