"""Faster layers for a CPU, and their exchange. All but linear layers apply to bfloat16 only.

Norms write bfloat16. Layers with the same input share a product, and gates and attention read it as
one tensor.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.activations import SiLUActivation
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
)
from transformers.models.t5.modeling_t5 import (
    T5Attention,
    T5DenseGatedActDense,
    T5LayerNorm,
)
from transformers.pytorch_utils import Conv1D

from toque.models.forward.cpu_linear import (
    CpuConv1D,
    CpuLinear,
    in_bf16,
    is_plain,
    one_product,
    product_of,
)
from toque.models.forward.grouped_attention import attend_packed

_LAYER_NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward


class _RmsNorm(torch.autograd.Function):
    """w * x / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, eps: float) -> Tensor:
        # PyTorch's own norm needs another pass to square all of `values`.
        scale = torch.linalg.vector_norm(
            values, dim=-1, keepdim=True, dtype=torch.float32
        )
        scale = scale.square_().mul_(1.0 / len(weight)).add_(eps).rsqrt_()
        ctx.save_for_backward(values, weight, scale)
        normed: Tensor = (values * scale).mul_(weight)
        return normed.to(torch.bfloat16)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, scale = ctx.saved_tensors
        slope, exact = grads[0].float(), values.float()
        factors = weight.float()
        # LayerNorm's kernel with a mean of zero does it in one pass. Its gradient lacks the term
        # s * mean(g w), which comes through the mean.
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
        through_mean = (
            (slope @ factors).unsqueeze(-1).mul_(scale).mul_(1.0 / len(weight))
        )
        return back.add_(through_mean).to(values.dtype), of_weight, None


class _RmsNorm16:
    """Norm to bfloat16 under its autocast. It precedes transformers' class in the bases."""

    weight: Any
    variance_epsilon: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not in_bf16(hidden_states):
            return cast("Tensor", super().forward(hidden_states))  # type: ignore[misc]
        normed: Tensor = _RmsNorm.apply(  # type: ignore[no-untyped-call]
            hidden_states, self.weight, self.variance_epsilon
        )
        return normed


class _LlamaRMSNorm16(_RmsNorm16, LlamaRMSNorm):
    pass


class _T5LayerNorm16(_RmsNorm16, T5LayerNorm):
    pass


class _LayerNorm16(nn.LayerNorm):
    """`nn.LayerNorm`, to bfloat16 under its autocast."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as its base calls it
        normed = super().forward(input)
        return normed.to(torch.bfloat16) if in_bf16(input) else normed


_ATEN = torch.ops.aten


class _Gate(torch.autograd.Function):
    """act(a) * b of a tensor [..., 2 I] with a and b (Shazeer 2020, arXiv 2002.05202, eq. 6)."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, gelu: bool) -> Tensor:  # noqa: FBT001  # by position
        ctx.gelu = gelu
        gate, up = both.chunk(2, -1)
        active = (
            functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
        )
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
            _ATEN.gelu_backward.grad_input(
                slope, gate, approximate="tanh", grad_input=of_gate
            )
        else:
            _ATEN.silu_backward.grad_input(slope, gate, grad_input=of_gate)
        return back, None


class _LlamaMLP16(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        silu = isinstance(self.act_fn, (nn.SiLU, SiLUActivation))
        if not (in_bf16(x) and silu and is_plain(self.gate_proj, self.up_proj)):
            return cast("Tensor", super().forward(x))  # type: ignore[no-untyped-call]
        both = one_product(self, x, (self.gate_proj, self.up_proj))
        return cast("Tensor", self.down_proj(_Gate.apply(both, False)))  # type: ignore[no-untyped-call]


class _T5DenseGatedActDense16(T5DenseGatedActDense):
    def forward(self, hidden_states: Tensor) -> Tensor:
        gelu = isinstance(self.act, nn.GELU) and self.act.approximate == "tanh"
        if not (
            in_bf16(hidden_states) and gelu and is_plain(self.wi_0, self.wi_1, self.wo)
        ):
            return cast("Tensor", super().forward(hidden_states))  # type: ignore[no-untyped-call]
        both = one_product(self, hidden_states, (self.wi_0, self.wi_1))
        hidden = _Gate.apply(both, True)  # type: ignore[no-untyped-call]
        return cast("Tensor", self.wo(self.dropout(hidden)))


class _Rotate(torch.autograd.Function):
    """Rotary positions for the first heads and columns of [N, H, d], in place, in float32.

    Su et al. 2021, arXiv 2104.09864, equation 34, on halves: (a cos - b sin, b cos + a sin).
    """

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor, heads: int
    ) -> Tensor:
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
        _rotate(back, cos, -sin, ctx.heads)  # the inverse rotation
        return back, None, None, None


def _rotate(packed: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    n_turned = cos.shape[-1]
    half = n_turned // 2
    part = packed[:, :heads, :n_turned]
    exact = part.float()
    turned = exact * cos[:, None]
    turned[..., :half].addcmul_(exact[..., half:], sin[:, None, :half], value=-1.0)
    turned[..., half:].addcmul_(exact[..., :half], sin[:, None, half:])
    part.copy_(turned)


def _rotated(
    product: Tensor, size: int, heads: int, embeddings: tuple[Tensor, Tensor]
) -> Tensor:
    """Reshape [N, H * d] to [N, H, d], and rotate the first heads by their positions."""
    cos, sin = (angles[0].float().contiguous() for angles in embeddings)
    packed = product.view(len(product), -1, size)
    rotated: Tensor = _Rotate.apply(packed, cos, sin, heads)  # type: ignore[no-untyped-call]
    return rotated


# Attention layers compute a packed forward [1, N, D] -> [1, N, D], and call transformers' forward
# for any other.


# In a packed forward, [1, N, D] -> [1, N, D]; anything else is transformers' own.


class _GPT2Attention16(GPT2Attention):
    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        plan = kwargs.get("plan")
        if (
            plan is None
            or args
            or self.is_cross_attention
            or not in_bf16(hidden_states)
        ):
            return super().forward(hidden_states, *args, **kwargs)
        product = self.c_attn(hidden_states)[0].to(torch.bfloat16)
        packed = product.view(len(product), -1, self.head_dim)
        dropout = self.attn_dropout.p if self.training else 0.0
        attended = attend_packed(
            self, packed, None, plan, scale=self.scaling, dropout=dropout
        )
        return self.resid_dropout(self.c_proj(attended.view(1, len(product), -1))), None


class _GPTNeoXAttention16(GPTNeoXAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        plan, layer = kwargs.get("plan"), self.query_key_value
        if (
            plan is None
            or args
            or not (in_bf16(hidden_states) and type(layer) is CpuLinear)
        ):
            return super().forward(hidden_states, *args, **kwargs)
        # In the weight, each head's query, key and value are together. Here all queries come first.
        weight, bias = (
            None
            if t is None
            else t.view(-1, 3, self.head_size, *t.shape[1:]).transpose(0, 1)
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
        attended = attend_packed(
            self, packed, None, plan, scale=self.scaling, dropout=dropout
        )
        return self.dense(attended.view(1, len(product), -1)), None


class _LlamaAttention16(LlamaAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        plan = kwargs.get("plan")
        layers = (self.q_proj, self.k_proj, self.v_proj)
        if plan is None or args or not (in_bf16(hidden_states) and is_plain(*layers)):
            return super().forward(hidden_states, *args, **kwargs)
        product = one_product(self, hidden_states[0], layers)
        n_queries, n_keys = (
            layer.out_features // self.head_dim for layer in layers[:2]
        )
        n_rotated = n_queries + n_keys
        packed = _rotated(
            product, self.head_dim, n_rotated, kwargs["position_embeddings"]
        )
        if n_keys < n_queries:
            # For each query head, the heads of its query, key and value: [3 * n_queries].
            key_of = n_queries + torch.arange(n_keys).repeat_interleave(
                n_queries // n_keys
            )
            heads = torch.cat((torch.arange(n_queries), key_of, n_keys + key_of))
            packed = packed.index_select(1, heads)
        dropout = float(self.attention_dropout or 0.0) if self.training else 0.0
        attended = attend_packed(
            self, packed, None, plan, scale=self.scaling, dropout=dropout
        )
        return self.o_proj(attended.view(1, len(product), -1)), None


class _T5Attention16(T5Attention):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        plan, states = kwargs.get("plan"), kwargs.get("key_value_states")
        is_fast = in_bf16(hidden_states) and is_plain(self.q, self.k, self.v)
        if plan is None or args or not is_fast:
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


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: CpuLinear,
    Conv1D: CpuConv1D,
    LlamaRMSNorm: _LlamaRMSNorm16,
    T5LayerNorm: _T5LayerNorm16,
    nn.LayerNorm: _LayerNorm16,
    LlamaMLP: _LlamaMLP16,
    T5DenseGatedActDense: _T5DenseGatedActDense16,
    LlamaAttention: _LlamaAttention16,
    T5Attention: _T5Attention16,
    GPT2Attention: _GPT2Attention16,
    GPTNeoXAttention: _GPTNeoXAttention16,
}


def use_cpu_layers(model: nn.Module) -> int:
    """Exchange the layers of a model on a CPU for faster classes. Return their number.

    Weights, names and saved files do not change.
    """
    n_exchanged = 0
    for module in model.modules():
        faster = _CLASSES.get(type(module))
        if faster is not None and all(
            p.device.type == "cpu" for p in module.parameters()
        ):
            if isinstance(module, nn.Linear) and module.weight.dtype != torch.float32:
                continue  # frozen bfloat16 weights need no copy
            module.__class__ = faster
            n_exchanged += 1
    return n_exchanged
