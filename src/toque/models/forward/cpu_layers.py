"""Faster layers for a CPU, and a function that exchanges a model's layers.

Linear layers are faster in float32 and bfloat16, and all other layers in bfloat16 only. Norms write
bfloat16. Layers with the same input share a matmul, and gates and attention read its output as one
tensor.
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
    bf16_linear,
    in_bf16,
    is_plain,
    joint_linear,
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
        grad_output, exact = grads[0].float(), values.float()
        factors = weight.float()
        # LayerNorm's kernel computes the gradient in one pass, with a mean of zero. It subtracts
        # s * mean(g w), the gradient through the mean, which an RMSNorm does not have.
        grad_values, grad_weight, _ = _LAYER_NORM_BACKWARD(
            grad_output,
            exact,
            factors.shape,
            torch.zeros_like(scale),
            scale,
            factors,
            None,
            [True, ctx.needs_input_grad[1], False],
        )
        mean_gradient = (grad_output @ factors).unsqueeze(-1)
        mean_gradient.mul_(scale).mul_(1.0 / len(weight))
        return grad_values.add_(mean_gradient).to(values.dtype), grad_weight, None


class _RmsNorm16:
    """Mixin for an RMSNorm with bfloat16 output under autocast to bfloat16.

    It precedes transformers' class in the bases.
    """

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
    """Llama's RMSNorm with bfloat16 output."""


class _T5LayerNorm16(_RmsNorm16, T5LayerNorm):
    """T5's RMSNorm with bfloat16 output."""


class _LayerNorm16(nn.LayerNorm):
    """`nn.LayerNorm` with bfloat16 output under autocast to bfloat16."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as its base calls it
        normed = super().forward(input)
        return normed.to(torch.bfloat16) if in_bf16(input) else normed


class _Gate(torch.autograd.Function):
    """act(a) * b of a tensor [..., 2 I] with a and b (Shazeer 2020, arXiv 2002.05202, eq. 6).

    `act` is GELU with tanh, or SiLU.
    """

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
        grad_both = torch.empty_like(both)
        grad_gate, grad_up = grad_both.chunk(2, -1)
        torch.mul(grads[0], active, out=grad_up)
        grad_active = grads[0] * up
        if ctx.gelu:
            torch.ops.aten.gelu_backward.grad_input(
                grad_active, gate, approximate="tanh", grad_input=grad_gate
            )
        else:
            torch.ops.aten.silu_backward.grad_input(
                grad_active, gate, grad_input=grad_gate
            )
        return grad_both, None


class _LlamaMLP16(LlamaMLP):
    """SwiGLU feed-forward with one matmul for gate and up projection."""

    def forward(self, x: Tensor) -> Tensor:
        is_silu = isinstance(self.act_fn, (nn.SiLU, SiLUActivation))
        if not (in_bf16(x) and is_silu and is_plain(self.gate_proj, self.up_proj)):
            return cast("Tensor", super().forward(x))  # type: ignore[no-untyped-call]
        both = joint_linear(self, x, (self.gate_proj, self.up_proj))
        return cast("Tensor", self.down_proj(_Gate.apply(both, False)))  # type: ignore[no-untyped-call]


class _T5DenseGatedActDense16(T5DenseGatedActDense):
    """Gated GELU feed-forward with one matmul for both inner projections."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        is_gelu = isinstance(self.act, nn.GELU) and self.act.approximate == "tanh"
        layers = (self.wi_0, self.wi_1, self.wo)
        if not (in_bf16(hidden_states) and is_gelu and is_plain(*layers)):
            return cast("Tensor", super().forward(hidden_states))  # type: ignore[no-untyped-call]
        both = joint_linear(self, hidden_states, (self.wi_0, self.wi_1))
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
        grad_packed = grads[0].clone(memory_format=torch.contiguous_format)
        _rotate(grad_packed, cos, -sin, ctx.heads)  # the inverse rotation
        return grad_packed, None, None, None


def _rotate(packed: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """Rotate the first heads and columns of [N, H, d] in place, by angles [N, columns]."""
    n_columns = cos.shape[-1]
    half = n_columns // 2
    part = packed[:, :heads, :n_columns]
    exact = part.float()
    rotated = exact * cos[:, None]
    rotated[..., :half].addcmul_(exact[..., half:], sin[:, None, :half], value=-1.0)
    rotated[..., half:].addcmul_(exact[..., :half], sin[:, None, half:])
    part.copy_(rotated)


def _rotate_heads(
    qkv: Tensor, size: int, heads: int, embeddings: tuple[Tensor, Tensor]
) -> Tensor:
    """Reshape [N, H * d] to [N, H, d], and rotate the first `heads` heads by their positions."""
    cos, sin = (angles[0].float().contiguous() for angles in embeddings)
    packed = qkv.view(len(qkv), -1, size)
    rotated: Tensor = _Rotate.apply(packed, cos, sin, heads)  # type: ignore[no-untyped-call]
    return rotated


# The attention layers below compute a packed forward [1, N, D] -> [1, N, D], for which the caller
# passes a plan, and only keyword arguments. Other calls go to transformers' forward.


class _GPT2Attention16(GPT2Attention):
    """GPT-2's attention with a packed forward."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        plan: Any = kwargs.get("plan")
        is_packed = plan is not None and not args and not self.is_cross_attention
        if not (is_packed and in_bf16(hidden_states)):
            return super().forward(hidden_states, *args, **kwargs)
        qkv = self.c_attn(hidden_states)[0].to(torch.bfloat16)
        packed = qkv.view(len(qkv), -1, self.head_dim)
        dropout = self.attn_dropout.p if self.training else 0.0
        attended = attend_packed(
            self, packed, None, plan, scale=self.scaling, dropout=dropout
        )
        output = self.c_proj(attended.view(1, len(qkv), -1))
        return self.resid_dropout(output), None


class _GPTNeoXAttention16(GPTNeoXAttention):
    """GPT-NeoX's attention with a packed forward."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        plan: Any = kwargs.get("plan")
        layer = self.query_key_value
        is_packed = plan is not None and not args and type(layer) is CpuLinear
        if not (is_packed and in_bf16(hidden_states)):
            return super().forward(hidden_states, *args, **kwargs)

        weight = self._queries_first(layer.weight)
        bias = None if layer.bias is None else self._queries_first(layer.bias)
        qkv = bf16_linear(hidden_states[0], weight, bias)
        n_heads = qkv.shape[1] // self.head_size // 3
        packed = _rotate_heads(
            qkv, self.head_size, 2 * n_heads, kwargs["position_embeddings"]
        )
        dropout = float(self.attention_dropout or 0.0) if self.training else 0.0
        attended = attend_packed(
            self, packed, None, plan, scale=self.scaling, dropout=dropout
        )
        return self.dense(attended.view(1, len(qkv), -1)), None

    def _queries_first(self, parameter: Tensor) -> Tensor:
        """Reorder rows from (head, q/k/v) to (q/k/v, head), the order of packed attention."""
        by_head = parameter.view(-1, 3, self.head_size, *parameter.shape[1:])
        return by_head.transpose(0, 1).reshape(parameter.shape)


class _LlamaAttention16(LlamaAttention):
    """Llama's attention with a packed forward and one matmul for queries, keys and values."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        plan: Any = kwargs.get("plan")
        layers = (self.q_proj, self.k_proj, self.v_proj)
        is_packed = plan is not None and not args
        if not (is_packed and in_bf16(hidden_states) and is_plain(*layers)):
            return super().forward(hidden_states, *args, **kwargs)

        qkv = joint_linear(self, hidden_states[0], layers)
        n_queries = self.q_proj.out_features // self.head_dim
        n_keys = self.k_proj.out_features // self.head_dim
        packed = _rotate_heads(
            qkv, self.head_dim, n_queries + n_keys, kwargs["position_embeddings"]
        )
        if n_keys < n_queries:
            # Repeat the keys and values of grouped-query attention for each query head.
            group_size = n_queries // n_keys
            key_heads = n_queries + torch.arange(n_keys).repeat_interleave(group_size)
            value_heads = n_keys + key_heads
            heads = torch.cat((torch.arange(n_queries), key_heads, value_heads))
            packed = packed.index_select(1, heads)
        dropout = float(self.attention_dropout or 0.0) if self.training else 0.0
        attended = attend_packed(
            self, packed, None, plan, scale=self.scaling, dropout=dropout
        )
        return self.o_proj(attended.view(1, len(qkv), -1)), None


class _T5Attention16(T5Attention):
    """T5's attention with a packed forward and one matmul for keys and values."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        plan: Any = kwargs.get("plan")
        states = kwargs.get("key_value_states")
        is_packed = plan is not None and not args
        layers = (self.q, self.k, self.v)
        if not (is_packed and in_bf16(hidden_states) and is_plain(*layers)):
            return super().forward(hidden_states, *args, **kwargs)

        size = self.key_value_proj_dim
        cross_kv = None
        if states is None:
            packed = joint_linear(self, hidden_states[0], layers)
        else:
            packed = self.q(hidden_states[0])
            cross_kv = joint_linear(self, states[0], (self.k, self.v))
            cross_kv = cross_kv.view(len(cross_kv), -1, size)
        attended = attend_packed(
            self,
            packed.view(len(packed), -1, size),
            cross_kv,
            plan,
            scale=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            bias=kwargs["position_bias"],
        )
        output = self.o(attended.view(1, len(packed), -1))
        return output, kwargs["position_bias"], None


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
        if faster is None or any(p.device.type != "cpu" for p in module.parameters()):
            continue
        if isinstance(module, nn.Linear) and module.weight.dtype != torch.float32:
            continue  # frozen bfloat16 weights need no copy
        module.__class__ = faster
        n_exchanged += 1
    return n_exchanged
