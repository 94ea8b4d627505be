"""Attention layers: one product for queries, keys and values, which stay one tensor to the end."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.t5.modeling_t5 import T5Attention

from toque.models.forward.bf16.linear import Linear16, in_bf16, product_of_several
from toque.models.forward.bf16.weights import StackedCopy
from toque.models.forward.varlen_attention import AttentionPlan, attend_packed


class _Rotate(torch.autograd.Function):
    """Rotary positions of the first heads of [N, H * d], in place (Su et al. 2021, arXiv 2104.09864).

    Computed in float32, as transformers does: halves (a, b) become (a cos - b sin, b cos + a sin).
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        half = cos.shape[-1] // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        ctx.save_for_backward(cos, signed)
        ctx.heads = heads
        ctx.mark_dirty(packed)
        part = packed.view(len(packed), -1, 2 * half)[:, :heads]
        part.copy_(_rotated(part.float(), cos, signed))
        return packed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, signed = ctx.saved_tensors
        back = grads[0].clone(memory_format=torch.contiguous_format)
        part = back.view(len(back), -1, cos.shape[-1])[:, : ctx.heads]
        part.copy_(_rotated(part.float(), cos, -signed))
        return back, None, None, None


def _rotated(values: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
    other = values.roll(values.shape[-1] // 2, -1)
    return (values * cos[:, None]).addcmul_(other, signed[:, None])


class LlamaAttention16(LlamaAttention):
    """Llama's attention in a packed training forward; anything else is transformers' own."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """[1, N, D] -> [1, N, D]."""
        plan, layers = kwargs.get("plan"), (self.q_proj, self.k_proj, self.v_proj)
        if plan is None or not in_bf16(hidden_states) or not _plain(*layers):
            return super().forward(hidden_states, **kwargs)
        stacked = self.__dict__.setdefault("_stacked", StackedCopy())
        product = product_of_several(hidden_states[0], [l.weight for l in layers], stacked)
        n_queries, n_keys = (l.out_features // self.head_dim for l in layers[:2])
        cos, sin = kwargs["position_embeddings"]
        product = _Rotate.apply(product, cos[0].float(), sin[0].float(), n_queries + n_keys)  # type: ignore[no-untyped-call]
        packed = product.view(len(product), -1, self.head_dim)
        if n_keys < n_queries:
            packed = packed.index_select(1, _every_head(n_queries, n_keys))
        dropout = self.attention_dropout if self.training else 0.0
        attended = attend_packed(self, packed, None, plan, scale=self.scaling, dropout=dropout)
        return self.o_proj(attended.view(1, len(product), -1)), None


class T5Attention16(T5Attention):
    """T5's attention in a packed training forward; anything else is transformers' own."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """[1, N, D] -> [1, N, D]."""
        plan: AttentionPlan | None = kwargs.get("plan")
        if plan is None or not in_bf16(hidden_states) or not _plain(self.q, self.k, self.v):
            return super().forward(hidden_states, **kwargs)
        stacked = self.__dict__.setdefault("_stacked", StackedCopy())
        states, bias = kwargs.get("key_value_states"), kwargs["position_bias"]
        size = self.key_value_proj_dim
        others = None
        if states is None:
            product = product_of_several(
                hidden_states[0], (self.q.weight, self.k.weight, self.v.weight), stacked
            )
        else:
            product = self.q(hidden_states[0])
            both = product_of_several(states[0], (self.k.weight, self.v.weight), stacked)
            others = both.view(len(both), -1, size)
        dropout = self.dropout if self.training else 0.0
        attended = attend_packed(
            self,
            product.view(len(product), -1, size),
            others,
            plan,
            scale=self.scaling,
            dropout=dropout,
            bias=bias,
        )
        return self.o(attended.view(1, len(product), -1)), bias, None


def _plain(*layers: torch.nn.Module) -> bool:
    """Whether these are the layers whose products may be one: no adapter, no bias."""
    return all(type(layer) is Linear16 and layer.bias is None for layer in layers)


def _every_head(n_queries: int, n_keys: int) -> Tensor:
    """The head of [queries, keys, values] that each query head reads: [3 * n_queries]."""
    each = torch.arange(n_keys).repeat_interleave(n_queries // n_keys)
    return torch.cat((torch.arange(n_queries), n_queries + each, n_queries + n_keys + each))
