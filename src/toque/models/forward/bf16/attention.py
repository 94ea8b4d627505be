"""Attention layers: one product for queries, keys and values, which stay one tensor to the end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.t5.modeling_t5 import T5Attention

from toque.models.forward.bf16.linear import in_bf16, is_plain, one_product
from toque.models.forward.varlen_attention import attend_packed


class _Rotate(torch.autograd.Function):
    """Rotary positions of the first heads of [N, H * d], in place.

    Su et al. 2021, arXiv 2104.09864, equation 34, on halves as transformers does: (a, b) becomes
    (a cos - b sin, b cos + a sin), computed in float32.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        ctx.mark_dirty(packed)
        _rotate(packed, cos, sin, heads)
        return packed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        back = grads[0].clone(memory_format=torch.contiguous_format)
        _rotate(back, cos, -sin, ctx.heads)  # the other way round
        return back, None, None, None


def _rotate(packed: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """In place."""
    size = cos.shape[-1]
    half = size // 2
    part = packed.view(len(packed), -1, size)[:, :heads]
    exact = part.float()
    turned = exact * cos[:, None]
    turned[..., :half].addcmul_(exact[..., half:], sin[:, None, :half], value=-1.0)
    turned[..., half:].addcmul_(exact[..., :half], sin[:, None, half:])
    part.copy_(turned)


class LlamaAttention16(LlamaAttention):
    """Llama's attention in a packed forward; anything else is transformers' own."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[1, N, D] -> [1, N, D]."""
        plan, layers = kwargs.get("plan"), (self.q_proj, self.k_proj, self.v_proj)
        if plan is None or args or not (in_bf16(hidden_states) and is_plain(*layers)):
            return super().forward(hidden_states, *args, **kwargs)
        product = one_product(self, hidden_states[0], layers)
        n_queries, n_keys = (layer.out_features // self.head_dim for layer in layers[:2])
        cos, sin = (angles[0].float() for angles in kwargs["position_embeddings"])
        product = _Rotate.apply(product, cos, sin, n_queries + n_keys)  # type: ignore[no-untyped-call]
        packed = product.view(len(product), -1, self.head_dim)
        if n_keys < n_queries:
            packed = packed.index_select(1, _every_head(n_queries, n_keys))
        dropout = float(self.attention_dropout or 0.0) if self.training else 0.0
        attended = attend_packed(self, packed, None, plan, scale=self.scaling, dropout=dropout)
        return self.o_proj(attended.view(1, len(product), -1)), None


class T5Attention16(T5Attention):
    """T5's attention in a packed forward; anything else is transformers' own."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[1, N, D] -> [1, N, D]."""
        plan, states = kwargs.get("plan"), kwargs.get("key_value_states")
        plain = in_bf16(hidden_states) and is_plain(self.q, self.k, self.v)
        if plan is None or args or not plain:
            return super().forward(hidden_states, *args, **kwargs)
        size, others = self.key_value_proj_dim, None
        if states is None:
            product = one_product(self, hidden_states[0], (self.q, self.k, self.v))
        else:
            product = self.q(hidden_states[0])
            others = one_product(self, states[0], (self.k, self.v))
            others = others.view(len(others), -1, size)
        attended = attend_packed(
            self,
            product.view(len(product), -1, size),
            others,
            plan,
            scale=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            bias=kwargs["position_bias"],
        )
        return self.o(attended.view(1, len(product), -1)), kwargs["position_bias"], None


def _every_head(n_queries: int, n_keys: int) -> Tensor:
    """The head of [queries, keys, values] that each query head reads: [3 * n_queries]."""
    each = torch.arange(n_keys).repeat_interleave(n_queries // n_keys)
    return torch.cat((torch.arange(n_queries), n_queries + each, n_queries + n_keys + each))
