"""Variable-length attention over packed rows, one example at a time, for a CPU.

A mask makes a row of L tokens cost L * L, whatever it holds. Examples are runs of consecutive
tokens of one flat row without padding, so their blocks can be computed alone. On a CPU, where
PyTorch's attention falls to its slow path as soon as a position bias needs a gradient (T5), this is
several times faster. On a GPU so many small products would be slower than one masked one.

Letters: R rows, T queries and S keys of a row, N tokens of the flat one, H heads, d head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toque.models.forward.grouped_attention import AttentionPlan, Example, attend_packed
from toque.models.forward.keyed_dropout import (
    Pair,
    by_head,
    drop_pairs,
    keep_mask,
    next_keys,
    next_pair,
)

NAME = "toque_segments"  # name of this attention in transformers' registry
MASKED: Final = "toque_masked"  # of the one by masks
PLAN: Final = ContextVar[Any]("PLAN", default=None)
"""Plan of the forward that runs, for layers that pass nothing on to their attention (StableLM's);
others hand it over as an argument, which a compiled block can be compiled for."""


def examples_in(queries: Tensor, keys: Tensor | None = None) -> list[Example]:
    """The examples of packed rows, from segment numbers [R, T] and [R, S]; 0 is padding.

    >>> examples_in(torch.tensor([[1, 1, 2, 0], [1, 0, 0, 0]]))
    [(0, 2, 0, 2), (2, 1, 2, 1), (3, 1, 3, 1)]
    """
    first = _runs(queries)
    second = first if keys is None else _runs(keys)
    return [(*first[run], *second[run]) for run in first]


def _runs(segments: Tensor) -> dict[tuple[int, int], tuple[int, int]]:
    """(row, segment number) -> first of the real tokens of all rows, and how many."""
    runs: dict[tuple[int, int], tuple[int, int]] = {}
    done = 0
    for row, numbers in enumerate(segments.numpy()):
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for start, end in itertools.pairwise(edges):
            number = int(numbers[start])
            if number == 0:
                continue
            if (row, number) in runs:
                raise ValueError(f"segment {number} of row {row} is not consecutive")
            runs[row, number] = (done, end - start)
            done += end - start
    return runs


def configs_of(model: nn.Module) -> list[PretrainedConfig]:
    """Every config that names an attention; encoder and decoder of a T5 have one each."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return list({id(part.config): part.config for part in parts}.values())


@contextmanager
def attending_by(
    configs: Sequence[PretrainedConfig], name: str, plan: object = None
) -> Iterator[None]:
    """Layers with these configs attend by a function of transformers' registry meanwhile."""
    before = [config._attn_implementation for config in configs]  # noqa: SLF001
    token = PLAN.set(plan)
    try:
        for config in configs:
            config._attn_implementation = name  # noqa: SLF001
        yield
    finally:
        PLAN.reset(token)
        for config, other in zip(configs, before, strict=True):
            config._attn_implementation = other  # noqa: SLF001


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None = None,
    *,
    plan: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: [1, H, N, d] each, to [1, N, H, d].

    A plan that is a tensor [R, 1, L, L] is true where pairs of R rows attend: earlier tokens of
    one segment.
    """
    plan = planned(plan, more)
    query, key, value = as_attended(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how: Any = {"scale": scale, "dropout": dropout, "softcap": softcap, "window": sliding_window}
    if isinstance(plan, Tensor):
        how["pair"] = next_pair(module, dropout)
        return attend_causally(query, key, value, plan, **how).transpose(1, 2), None
    # Masks must not depend on what is computed together, such as the longest example.
    narrow = sliding_window and (dropout > 0.0 or sliding_window < plan.longest)
    if softcap is not None or narrow:
        how["pair"] = next_pair(module, dropout)
        return _by_example(query, key, value, plan, **how), None
    across = plan.across if getattr(module, "is_decoder", False) and not module.is_causal else None
    if query.dtype == torch.bfloat16:
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
    output: Tensor = _ExamplesAttention.apply(  # type: ignore[no-untyped-call]
        query,
        key,
        value,
        bias,
        plan.own if across is None else across,
        bool(module.is_causal),
        scale,
        dropout,
        next_keys(module, dropout),
    )
    return output, None


AttentionInterface.register(NAME, _attend)


def planned(plan: object, asked: Mapping[str, Any]) -> Any:
    """The plan that a layer was handed, or else that of the forward that runs.

    NotImplementedError where the model asks its attention for what none of ours does.
    """
    if asked.get("s_aux") is not None:
        raise NotImplementedError("its attention has sinks, which are not computed here")
    return PLAN.get() if plan is None else plan


def _by_example(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    pair: Pair | None,
    **how: Any,
) -> Tensor:
    """Causal attention [1, N, H, d] of each example by itself, within its window."""
    lengths = [n for _, n, _, _ in plan.own]
    beyond = query.shape[2] - sum(lengths)  # tokens of no example
    parts = (torch.split(t, [*lengths, beyond], dim=2) for t in (query, key, value))
    *each, rest = zip(*parts, strict=True)
    pairs: Sequence[Pair | None] = [None] * len(each)
    if pair is not None:
        sides = (torch.split(keys, [*lengths, beyond], dim=1) for keys in pair)
        pairs = [*zip(*sides, strict=True)][: len(each)]
    seen = [
        attend_causally(q, k, v, pair=keys, **how)
        for (q, k, v), keys in zip(each, pairs, strict=True)
    ]
    return torch.cat([*seen, torch.zeros_like(rest[2])], 2).transpose(1, 2)


def attend_causally(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    together: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    pair: Pair | None = None,
) -> Tensor:
    """softmax(cap(scale * q @ k.T)) @ v over earlier tokens within the window, [R, H, T, d].

    cap(s) = c * tanh(s / c) (Gemma Team 2024, arXiv 2408.00118, section 2). `together`, [R, 1, T,
    T] and causal itself, is true where tokens of one segment are, which are consecutive.
    """
    seen, place = together, torch.arange(query.shape[2], device=query.device)
    plain = softcap is None and dropout == 0.0
    if window is not None or (not plain and seen is None):
        back = place[:, None] - place
        near = (back >= 0) & (back < (window or len(place)))
        seen = near if seen is None else seen & near
    if plain:
        return functional.scaled_dot_product_attention(
            query, key, value, seen, is_causal=seen is None, scale=scale
        )
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-1, -2)).to(exact) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    assert seen is not None
    return _dropped(scores.masked_fill(~seen, -torch.inf), value, dropout, pair)


def _dropped(scores: Tensor, value: Tensor, dropout: float, pair: Pair | None) -> Tensor:
    """softmax(scores) @ v with some of the weights dropped."""
    shares = scores.softmax(-1).to(value.dtype)
    return (drop_pairs(shares, dropout, pair) if dropout > 0.0 else shares) @ value


def _attend_masked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Transformers' own "sdpa", and by its definition where weights are dropped.

    [R, H, T, d] each to [R, T, H, d]. A mask [R, 1, T, S] is true where pairs attend; None: causal.
    """
    if dropout == 0.0:
        output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, mask, scaling=scaling, position_bias=position_bias, **more
        )
        return output, None
    query, key, value = as_attended(query, key, value)
    exact = torch.promote_types(query.dtype, torch.float32)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(-1, -2)).to(exact) * scale
    if position_bias is not None:
        scores = scores + position_bias
    if mask is None:
        place = torch.arange(query.shape[2], device=query.device)
        mask = place[:, None] >= place
    scores = scores.masked_fill(~mask, -torch.inf)
    return _dropped(scores, value, dropout, next_pair(module, dropout)).transpose(1, 2), None


AttentionInterface.register(MASKED, _attend_masked)


def as_attended(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [R, H, T, d] of as many heads each, in autocast's type."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    # As PyTorch's own attention does: rotary positions leave queries and keys in float32.
    kind = query.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value


def _fused_causal(
    query: Tensor, key: Tensor, value: Tensor, examples: list[Example], scale: float
) -> Tensor:
    """Each example by PyTorch's fused kernel, which keeps no attention matrix for backward."""
    heads, size = query.shape[1], query.shape[3]
    lengths = [n for _, n, _, _ in examples]
    # One split for all: the gradient of a slice is a tensor of the whole's size, each time.
    flat = [
        torch.split(t.transpose(1, 2).reshape(-1, heads, size), lengths)
        for t in (query, key, value)
    ]
    outputs = []
    for parts in zip(*flat, strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)[None]


class _ExamplesAttention(torch.autograd.Function):
    """softmax(scale * q @ k.T + bias) @ v of every example, of tensors [1, H, N, d].

    The bias [H, T, S] depends on distance: an example reads its top left corner wherever it lies.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        examples: list[Example],
        causal: bool,  # noqa: FBT001  # autograd functions take arguments by position
        scale: float,
        dropout: float,
        keys: Tensor | None,
    ) -> Tensor:
        output = query.new_zeros(query.transpose(1, 2).shape)
        added = _added(bias, examples, causal=causal, dtype=query.dtype)
        kept: list[Tensor] = []
        for first, n, first_key, n_keys in examples:
            own, seen = slice(first, first + n), slice(first_key, first_key + n_keys)
            scores = query[0, :, own] @ key[0, :, seen].transpose(1, 2)
            scores = scores.to(added.dtype)
            if scale != 1.0:  # T5 has none
                scores = scores.mul_(scale)
            scores = scores.add_(added[:, :n, :n_keys])
            shares = scores.softmax(-1).to(value.dtype)
            kept.append(shares)
            if dropout > 0.0:
                queries = None if keys is None else by_head(keys[0, own], len(shares))
                kept.append(keep_mask(shares, dropout, queries))
                shares = shares * kept[-1]
            output[0, own] = (shares @ value[0, :, seen]).transpose(0, 1)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.examples, ctx.scale, ctx.dropped = examples, scale, dropout > 0.0
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
        for first, n, first_key, n_keys in ctx.examples:
            own, seen = slice(first, first + n), slice(first_key, first_key + n_keys)
            shares = next(remaining)
            keep = next(remaining) if ctx.dropped else None
            slope = grads[0][0, own].transpose(0, 1)
            used = shares if keep is None else shares * keep
            gradients[2][0, :, seen] = used.transpose(1, 2) @ slope
            inner = slope @ value[0, :, seen].transpose(1, 2)
            if keep is not None:
                inner = inner * keep
            # The softmax's gradient: p * (g - sum(p * g)), in one pass.
            inner = torch._softmax_backward_data(inner, shares, -1, shares.dtype)  # noqa: SLF001
            if grad_bias is not None:
                grad_bias[:, :n, :n_keys] += inner
            gradients[0][0, :, own] = (inner @ key[0, :, seen]) * ctx.scale
            gradients[1][0, :, seen] = (inner.transpose(1, 2) @ query[0, :, own]) * ctx.scale
        return (*gradients, grad_bias, None, None, None, None, None)


def _added(
    bias: Tensor | None, examples: list[Example], *, causal: bool, dtype: torch.dtype
) -> Tensor:
    """Bias plus causal mask, [H or 1, longest t, longest s] in float32 or wider."""
    height = max((n for _, n, _, _ in examples), default=0)
    width = max((n for _, _, _, n in examples), default=0)
    exact = torch.promote_types(dtype, torch.float32)
    if bias is None:
        added = torch.zeros(1, height, width, dtype=exact)
    else:
        added = bias[:, :height, :width].to(exact)
    if causal:
        later = torch.ones(height, width, dtype=torch.bool).triu(1)
        added = added.masked_fill(later, -torch.inf)
    return added
