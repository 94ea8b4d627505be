"""GELU as GPT-2 and GPT-NeoX call it, read and written in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import GELUActivation

from toque.models.cpu_kernels import fused
from toque.models.forward.bf16.linear import in_bf16


class _Activation(torch.autograd.Function):
    """act(x) by a C kernel."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, kind: fused.Activation) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(values)
        return fused.activate(values, kind, gated=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (values,) = ctx.saved_tensors
        return fused.activate_backward(values, grads[0].contiguous(), ctx.kind, gated=False), None


class GELU16(nn.GELU):
    """`nn.GELU` and its tanh form."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as its base calls it
        """[...] -> [...]."""
        if not _by_kernel(input):
            return super().forward(input)
        return _activated(input, "gelu_tanh" if self.approximate == "tanh" else "gelu")


class GELUActivation16(GELUActivation):
    """transformers' GELU, the same."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as its base calls it
        """[...] -> [...]."""
        if not _by_kernel(input):
            return super().forward(input)
        return _activated(input, "gelu")


def _by_kernel(values: Tensor) -> bool:
    return in_bf16(values) and values.dtype == torch.bfloat16 and fused.available()


def _activated(values: Tensor, kind: fused.Activation) -> Tensor:
    activated: Tensor = _Activation.apply(values.contiguous(), kind)  # type: ignore[no-untyped-call]
    return activated
