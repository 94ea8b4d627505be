"""Attention layers: one product for queries, keys and values, which stay one tensor to the end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.t5.modeling_t5 import T5Attention

from toque.models.forward.bf16_linear import Linear16, in_bf16, is_plain, one_product, product_of
from toque.models.forward.varlen_attention import attend_packed


class _Rotate(torch.autograd.Function):
    """Rotary positions of the first heads of [N, H, d], in place.

    Su et al. 2021, arXiv 2104.09864, equation 34, on halves as transformers does: (a, b) becomes
    (a cos - b sin, b cos + a sin), computed in float32. What is beyond the angles stays.
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
    """Turn the first heads in place."""
    turned = cos.shape[-1]
    half = turned // 2
    part = packed[:, :heads, :turned]
    exact = part.float()
    done = exact * cos[:, None]
    done[..., :half].addcmul_(exact[..., half:], sin[:, None, :half], value=-1.0)
    done[..., half:].addcmul_(exact[..., :half], sin[:, None, half:])
    part.copy_(done)


def _rotated(product: Tensor, size: int, heads: int, embeddings: tuple[Tensor, Tensor]) -> Tensor:
    """Heads side by side [N, H * d] as [N, H, d], the first of them turned by their positions."""
    cos, sin = (angles[0].float().contiguous() for angles in embeddings)
    packed = product.view(len(product), -1, size)
    turned: Tensor = _Rotate.apply(packed, cos, sin, heads)  # type: ignore[no-untyped-call]
    return turned


class GPT2Attention16(GPT2Attention):
    """GPT-2's attention in a packed forward; anything else is transformers' own."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """[1, N, D] -> [1, N, D]."""
        plan = kwargs.get("plan")
        if plan is None or args or self.is_cross_attention or not in_bf16(hidden_states):
            return super().forward(hidden_states, *args, **kwargs)
        product = self.c_attn(hidden_states)[0].to(torch.bfloat16)
        packed = product.view(len(product), -1, self.head_dim)
        dropout = self.attn_dropout.p if self.training else 0.0
        attended = attend_packed(self, packed, None, plan, scale=self.scaling, dropout=dropout)
        return self.resid_dropout(self.c_proj(attended.view(1, len(product), -1))), None


class GPTNeoXAttention16(GPTNeoXAttention):
    """GPT-NeoX's attention in a packed forward; anything else is transformers' own."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[1, N, D] -> [1, N, D]."""
        plan, layer = kwargs.get("plan"), self.query_key_value
        if plan is None or args or not (in_bf16(hidden_states) and type(layer) is Linear16):
            return super().forward(hidden_states, *args, **kwargs)
        # Each head's query, key and value stand together there; here all queries come first.
        weight, bias = (
            None if t is None else t.view(-1, 3, self.head_size, *t.shape[1:]).transpose(0, 1)
            for t in (layer.weight, layer.bias)
        )
        product = product_of(
            hidden_states[0],
            weight.reshape(layer.weight.shape),
            None if bias is None else bias.reshape(-1),
        )
        heads = 2 * (product.shape[1] // self.head_size // 3)
        packed = _rotated(product, self.head_size, heads, kwargs["position_embeddings"])
        dropout = float(self.attention_dropout or 0.0) if self.training else 0.0
        attended = attend_packed(self, packed, None, plan, scale=self.scaling, dropout=dropout)
        return self.dense(attended.view(1, len(product), -1)), None


class LlamaAttention16(LlamaAttention):
    """Llama's attention in a packed forward; anything else is transformers' own."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[1, N, D] -> [1, N, D]."""
        plan, layers = kwargs.get("plan"), (self.q_proj, self.k_proj, self.v_proj)
        if plan is None or args or not (in_bf16(hidden_states) and is_plain(*layers)):
            return super().forward(hidden_states, *args, **kwargs)
        product = one_product(self, hidden_states[0], layers)
        n_queries, n_keys = (layer.out_features // self.head_dim for layer in layers[:2])
        turned = n_queries + n_keys
        packed = _rotated(product, self.head_dim, turned, kwargs["position_embeddings"])
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
