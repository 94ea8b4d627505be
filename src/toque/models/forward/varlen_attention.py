"""Variable-length attention over packed rows, one example at a time, for a CPU.

A mask makes a row of L tokens cost L * L, whatever it holds. Examples are runs of consecutive
tokens, so their blocks can be computed alone: no mask, and the sum of squares instead of the
square of the sum. On a CPU, where PyTorch's attention also falls to its slow path as soon as a
position bias needs a gradient (T5), this is several times faster. On a GPU so many small products
would be slower than one masked one; there FlexAttention keeps examples apart.

Letters: R rows, T queries and S keys of a row, H heads, d head size; t and s those of one example.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from toque.models.forward.fast_dropout import keep_mask
from toque.models.forward.grouped_attention import Groups, grouped_attention, groups_of

NAME = "toque_segments"
"""Name of this attention in transformers' registry."""

Span = tuple[int, int, int, int, int]
"""Row, first and last + 1 query, first and last + 1 key."""


@dataclass(frozen=True)
class AttentionPlan:
    """The blocks of attention, for every layer of one forward."""

    own: list[Span]
    """Self-attention."""
    across: list[Span] | None = None
    """Cross-attention, decoder to encoder; None without one."""

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return max(end - start for _, start, end, _, _ in self.own)

    @cached_property
    def causal_groups(self) -> Groups:
        """`own` by groups of like length, for a causal mask; of a batch of one row."""
        return groups_of(_flat(self.own), causal=True)

    @cached_property
    def groups(self) -> Groups:
        """`own` by groups of like length; of a batch of one row."""
        return groups_of(_flat(self.own), causal=False)

    @cached_property
    def across_groups(self) -> Groups:
        """`across` by groups of like length; of a batch of one row."""
        return groups_of(_flat(self.across or []), causal=False)


def _flat(where: list[Span]) -> list[tuple[int, int, int, int]]:
    return [(a, b - a, c, d - c) for _, a, b, c, d in where]


def spans(queries: Tensor, keys: Tensor | None = None) -> list[Span]:
    """The examples of packed rows, from segment numbers.

    Args:
        queries: [R, T] on the CPU; each number's tokens are consecutive.
        keys: [R, S]; the same as `queries` by default.

    >>> spans(torch.tensor([[1, 1, 2, 0]]))
    [(0, 0, 2, 0, 2), (0, 2, 3, 2, 3)]
    """
    first = _runs(queries)
    second = first if keys is None else _runs(keys)
    return [(row, *first[row, number], *second[row, number]) for row, number in first]


def _runs(segments: Tensor) -> dict[tuple[int, int], tuple[int, int]]:
    """(row, segment number) -> first and last + 1 token, padding left out."""
    runs: dict[tuple[int, int], tuple[int, int]] = {}
    for row, numbers in enumerate(segments.numpy()):
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for start, end in itertools.pairwise(edges):
            number = int(numbers[start])
            if number > 0 and runs.setdefault((row, number), (start, end)) != (start, end):
                raise ValueError(f"segment {number} of row {row} is not consecutive")
    return runs


Configs = Mapping[int, PretrainedConfig]
"""The configs of a model's parts by id; encoder and decoder of a T5 have one each."""


def configs_of(model: nn.Module) -> Configs:
    """Every config that names an attention implementation."""
    return {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}


def attention_names(configs: Configs) -> dict[int, str]:
    """The attention implementation of each."""
    return {key: config._attn_implementation for key, config in configs.items()}  # noqa: SLF001


@contextmanager
def attending_with(configs: Configs, names: Mapping[int, str]) -> Iterator[None]:
    """A context in which the configs name these attention implementations."""
    before = attention_names(configs)
    try:
        for key, config in configs.items():
            config._attn_implementation = names[key]  # noqa: SLF001
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]  # noqa: SLF001


def attending_by(model: PreTrainedModel, name: str) -> AbstractContextManager[None]:
    """A context in which the model's layers attend by a function of transformers' registry.

    By ours they take `plan=AttentionPlan(...)` (or of FlexAttention, `BlockMasks`) for masks.
    """
    configs = configs_of(model)
    return attending_with(configs, dict.fromkeys(configs, name))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    plan: AttentionPlan,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: [R, H, T, d] each, to [R, T, H, d]."""
    across = plan.across if getattr(module, "is_decoder", False) and not module.is_causal else None
    query, key, value = as_attended(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.dtype == torch.bfloat16 and len(query) == 1:
        heads_last = [t[0].transpose(0, 1) for t in (query, key, value)]
        packed = torch.cat(heads_last, 1) if across is None else heads_last[0]
        others = None if across is None else torch.cat(heads_last[1:], 1)
        return attend_packed(
            module, packed, others, plan, scale=scale, dropout=dropout, bias=position_bias
        )[None], None
    if position_bias is None and dropout == 0.0 and module.is_causal:
        return _fused_causal(query, key, value, plan.own, scale), None
    # T5 passes its cross-attention a bias of zeros.
    bias = None if position_bias is None or across is not None else position_bias[0]
    output: Tensor = _SpanAttention.apply(  # type: ignore[no-untyped-call]
        query,
        key,
        value,
        bias,
        plan.own if across is None else across,
        bool(module.is_causal),
        scale,
        dropout,
    )
    return output, None


AttentionInterface.register(NAME, _attend)


def as_attended(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [R, H, T, d] of as many heads each, in autocast's type."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    # As PyTorch's own attention does: rotary positions leave queries and keys in float32.
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value


def attend_packed(
    module: nn.Module,
    packed: Tensor,
    others: Tensor | None,
    plan: AttentionPlan,
    *,
    scale: float,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of one flat row, by groups of like length: [N, H, d].

    `packed` is [N, 3 * H, d], in cross-attention [N, H, d] beside `others` [M, 2 * H, d]. The bias
    [1, H, T, S] is not read in cross-attention, where T5 has none.
    """
    causal = bool(module.is_causal) and others is None
    groups = plan.causal_groups if causal else plan.groups
    return grouped_attention(
        packed,
        others,
        groups if others is None else plan.across_groups,
        bias=None if bias is None or others is not None else bias[0],
        causal=causal,
        scale=scale,
        dropout=dropout,
    )


def _fused_causal(
    query: Tensor, key: Tensor, value: Tensor, where: list[Span], scale: float
) -> Tensor:
    """Each span by PyTorch's fused kernel, which keeps no attention matrix for backward."""
    rows, heads, length, size = query.shape
    pieces, used, done = [], [], 0
    for row, a, b, _, _ in where:
        start = row * length + a
        pieces += [start - done, b - a]  # what lies between the spans, then the span
        used += [False, True]
        done = start + b - a
    pieces.append(rows * length - done)
    used.append(False)
    # One split for all: the gradient of a slice is a tensor of the whole's size, each time.
    flat = [
        torch.split(t.transpose(1, 2).reshape(-1, heads, size), pieces) for t in (query, key, value)
    ]
    outputs = []
    for is_span, *parts in zip(used, *flat, strict=True):
        if not is_span:
            outputs.append(torch.zeros_like(parts[0]))
            continue
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs).view(rows, length, heads, size)


class _SpanAttention(torch.autograd.Function):
    """softmax(scale * q @ k.T + bias) @ v of every span; everything else is zero.

    The bias [H, T, S] depends on the distance of two positions, as T5's does, so that a span
    reads its top left corner wherever in the row it lies.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        where: list[Span],
        causal: bool,  # noqa: FBT001  # autograd functions take arguments by position
        scale: float,
        dropout: float,
    ) -> Tensor:
        output = query.new_zeros(query.transpose(1, 2).shape)
        added = _added(bias, where, causal=causal, dtype=query.dtype)
        kept: list[Tensor] = []
        for row, a, b, c, d in where:
            scores = query[row, :, a:b] @ key[row, :, c:d].transpose(1, 2)
            scores = scores.to(added.dtype)
            if scale != 1.0:  # T5 has none
                scores = scores.mul_(scale)
            scores = scores.add_(added[:, : b - a, : d - c])
            shares = scores.softmax(-1).to(value.dtype)
            kept.append(shares)
            if dropout > 0.0:
                kept.append(keep_mask(shares, dropout))
                shares = shares * kept[-1]
            output[row, a:b] = (shares @ value[row, :, c:d]).transpose(0, 1)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.where, ctx.scale, ctx.dropped = where, scale, dropout > 0.0
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        gradients = [torch.zeros_like(t) for t in (query, key, value)]
        wants_bias = ctx.bias is not None and ctx.needs_input_grad[3]
        grad_bias = query.new_zeros(ctx.bias[0], dtype=ctx.bias[1]) if wants_bias else None
        remaining = iter(kept)
        for row, a, b, c, d in ctx.where:
            shares = next(remaining)
            keep = next(remaining) if ctx.dropped else None
            slope = grads[0][row, a:b].transpose(0, 1)
            used = shares if keep is None else shares * keep
            gradients[2][row, :, c:d] = used.transpose(1, 2) @ slope
            inner = slope @ value[row, :, c:d].transpose(1, 2)
            if keep is not None:
                inner = inner * keep
            # The softmax's gradient: p * (g - sum(p * g)), in one pass.
            inner = torch._softmax_backward_data(inner, shares, -1, shares.dtype)  # noqa: SLF001
            if grad_bias is not None:
                grad_bias[:, : b - a, : d - c] += inner
            gradients[0][row, :, a:b] = (inner @ key[row, :, c:d]) * ctx.scale
            gradients[1][row, :, c:d] = (inner.transpose(1, 2) @ query[row, :, a:b]) * ctx.scale
        return (*gradients, grad_bias, None, None, None, None)


def _added(bias: Tensor | None, where: list[Span], *, causal: bool, dtype: torch.dtype) -> Tensor:
    """Bias plus causal mask, [H or 1, longest t, longest s] in float32 or wider."""
    height = max((b - a for _, a, b, _, _ in where), default=0)
    width = max((d - c for _, _, _, c, d in where), default=0)
    exact = torch.promote_types(dtype, torch.float32)
    if bias is None:
        added = torch.zeros(1, height, width, dtype=exact)
    else:
        added = bias[:, :height, :width].to(exact)
    if causal:
        later = torch.ones(height, width, dtype=torch.bool).triu(1)
        added = added.masked_fill(later, -torch.inf)
    return added
