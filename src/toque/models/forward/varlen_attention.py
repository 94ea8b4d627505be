"""Variable-length attention for packed rows on a CPU, one example at a time.

With a mask, a row of L tokens costs L * L, whatever its examples are. Here the examples are runs of
consecutive tokens in one flat row without padding, and each is computed alone. This is several
times faster on a CPU, where PyTorch's attention is slow if a position bias needs a gradient (T5).
On a GPU, many small products would be slower than one masked product.

Letters: R rows, T queries and S keys of a row, N tokens of the flat row, H heads, d head size.
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
    drop_pairs,
    keep_mask,
    keys_by_head,
    next_keys,
    next_pair,
)

NAME = "toque_segments"  # name of this attention in transformers' registry
MASKED: Final = "toque_masked"  # name of the attention with masks
PLAN: Final = ContextVar[Any]("PLAN", default=None)
"""Plan of the current forward, for layers that pass no arguments to their attention (StableLM).
Other layers pass it as an argument, so that a compiled block can depend on it."""


def examples_in(queries: Tensor, keys: Tensor | None = None) -> list[Example]:
    """List the examples of packed rows, from segment numbers [R, T] and [R, S]. 0 is padding.

    >>> examples_in(torch.tensor([[1, 1, 2, 0], [1, 0, 0, 0]]))
    [(0, 2, 0, 2), (2, 1, 2, 1), (3, 1, 3, 1)]
    """
    first = _runs(queries)
    second = first if keys is None else _runs(keys)
    return [(*first[run], *second[run]) for run in first]


def _runs(segments: Tensor) -> dict[tuple[int, int], tuple[int, int]]:
    """Map (row, segment number) to its first real token in the batch, and its number of tokens."""
    runs: dict[tuple[int, int], tuple[int, int]] = {}
    first = 0
    for row, numbers in enumerate(segments.numpy()):
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for start, end in itertools.pairwise(edges):
            number = int(numbers[start])
            if number == 0:
                continue
            if (row, number) in runs:
                raise ValueError(f"segment {number} of row {row} is not consecutive")
            runs[row, number] = (first, end - start)
            first += end - start
    return runs


def configs_of(model: nn.Module) -> list[PretrainedConfig]:
    """Return every config that selects an attention. A T5 has one for encoder and decoder each."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return list({id(part.config): part.config for part in parts}.values())


@contextmanager
def attending_by(
    configs: Sequence[PretrainedConfig], name: str, plan: object = None
) -> Iterator[None]:
    """Context in which layers with these configs use an attention of transformers' registry."""
    before = [config._attn_implementation for config in configs]  # noqa: SLF001
    token = PLAN.set(plan)
    try:
        for config in configs:
            config._attn_implementation = name  # noqa: SLF001
        yield
    finally:
        PLAN.reset(token)
        for config, previous in zip(configs, before, strict=True):
            config._attn_implementation = previous  # noqa: SLF001


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
    """Attention function for transformers: [1, H, N, d] each, to [1, N, H, d].

    A plan can also be a tensor [R, 1, L, L] for R rows. It is true for pairs of a token and an
    earlier one of its segment.
    """
    plan = planned(plan, more)
    query, key, value = as_attended(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal: Any = {
        "scale": scale, "dropout": dropout, "softcap": softcap, "window": sliding_window
    }  # fmt: skip
    if isinstance(plan, Tensor):
        causal["pair"] = next_pair(module, dropout)
        return attend_causally(query, key, value, plan, **causal).transpose(1, 2), None

    # Dropout must not depend on other examples, so the longest example may not decide here.
    is_narrow = sliding_window and (dropout > 0.0 or sliding_window < plan.longest)
    if softcap is not None or is_narrow:
        causal["pair"] = next_pair(module, dropout)
        return _by_example(query, key, value, plan, **causal), None

    is_across = is_cross_attention(module, plan)
    if query.dtype == torch.bfloat16:
        queries, keys, values = (t[0].transpose(0, 1) for t in (query, key, value))
        packed = queries if is_across else torch.cat([queries, keys, values], 1)
        others = torch.cat([keys, values], 1) if is_across else None
        attended = attend_packed(
            module,
            packed,
            others,
            plan,
            scale=scale,
            dropout=dropout,
            bias=position_bias,
        )
        return attended[None], None
    if position_bias is None and dropout == 0.0 and module.is_causal:
        return _fused_causal(query, key, value, plan.own, scale), None

    # T5 gives its cross-attention a bias of zeros.
    bias = None if position_bias is None or is_across else position_bias[0]
    output: Tensor = _ExamplesAttention.apply(  # type: ignore[no-untyped-call]
        query,
        key,
        value,
        bias,
        plan.across if is_across else plan.own,
        bool(module.is_causal),
        scale,
        dropout,
        next_keys(module, dropout),
    )
    return output, None


AttentionInterface.register(NAME, _attend)


def planned(plan: object, arguments: Mapping[str, Any]) -> Any:
    """Return the plan that a layer passed, or the plan of the current forward.

    Raises:
        NotImplementedError: The model needs an attention that is not implemented here.
    """
    if arguments.get("s_aux") is not None:
        raise NotImplementedError(
            "its attention has sinks, which are not computed here"
        )
    return PLAN.get() if plan is None else plan


def is_cross_attention(module: nn.Module, plan: Any) -> bool:
    """True if a layer of a decoder attends to the encoder."""
    is_decoder = getattr(module, "is_decoder", False)
    return bool(plan.across is not None and is_decoder and not module.is_causal)


def _by_example(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    pair: Pair | None,
    **settings: Any,
) -> Tensor:
    """Compute causal attention [1, N, H, d] within the window, one example at a time."""
    lengths = [n for _, n, _, _ in plan.own]
    n_extra = query.shape[2] - sum(lengths)  # tokens of no example
    parts = (torch.split(t, [*lengths, n_extra], dim=2) for t in (query, key, value))
    *examples, extra = zip(*parts, strict=True)
    pairs: Sequence[Pair | None] = [None] * len(examples)
    if pair is not None:
        sides = (torch.split(keys, [*lengths, n_extra], dim=1) for keys in pair)
        pairs = [*zip(*sides, strict=True)][: len(examples)]
    outputs = [
        attend_causally(q, k, v, pair=keys, **settings)
        for (q, k, v), keys in zip(examples, pairs, strict=True)
    ]
    return torch.cat([*outputs, torch.zeros_like(extra[2])], 2).transpose(1, 2)


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
    """Compute softmax(cap(scale * q @ k.T)) @ v over earlier tokens in the window, [R, H, T, d].

    cap(s) = c * tanh(s / c) (Gemma Team 2024, arXiv 2408.00118, section 2).

    Args:
        query: [R, H, T, d].
        key: [R, H, T, d].
        value: [R, H, T, d].
        together: [R, 1, T, T], true for a token and an earlier one of its segment; None for rows of
            one segment. The tokens of a segment are consecutive.
        scale: Factor of the scores.
        window: Width of the sliding window in tokens.
        softcap: c of the cap; None without one.
        dropout: Probability of an attention weight to be dropped.
        pair: Keys that determine the dropped weights.
    """
    mask, position = together, torch.arange(query.shape[2], device=query.device)
    is_plain = softcap is None and dropout == 0.0
    if window is not None or (not is_plain and mask is None):
        distance = position[:, None] - position
        near = (distance >= 0) & (distance < (window or len(position)))
        mask = near if mask is None else mask & near
    if is_plain:
        return functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scale
        )
    assert mask is not None
    scores = _scores(query, key, scale)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    return _weighted(scores.masked_fill(~mask, -torch.inf), value, dropout, pair)


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Compute scale * q @ k.T in float32 or wider."""
    exact = torch.promote_types(query.dtype, torch.float32)
    return (query @ key.transpose(-1, -2)).to(exact) * scale


def _weighted(
    scores: Tensor, value: Tensor, dropout: float, pair: Pair | None
) -> Tensor:
    """Compute softmax(scores) @ v, with dropout."""
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
    """Attention function for transformers with a mask: [R, H, T, d] each, to [R, T, H, d].

    Without dropout it is transformers' "sdpa". A mask [R, 1, T, S] is true for pairs that attend.
    Without a mask, attention is causal.
    """
    if dropout == 0.0:
        output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module,
            query,
            key,
            value,
            mask,
            scaling=scaling,
            position_bias=position_bias,
            **more,
        )
        return output, None
    query, key, value = as_attended(query, key, value)
    scores = _scores(
        query, key, query.shape[-1] ** -0.5 if scaling is None else scaling
    )
    if position_bias is not None:
        scores = scores + position_bias
    if mask is None:
        position = torch.arange(query.shape[2], device=query.device)
        mask = position[:, None] >= position
    scores = scores.masked_fill(~mask, -torch.inf)
    return _weighted(scores, value, dropout, next_pair(module, dropout)).transpose(
        1, 2
    ), None


AttentionInterface.register(MASKED, _attend_masked)


def as_attended(
    query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat shared keys and values for every query head, and cast all to autocast's precision."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    # PyTorch's attention casts too, because rotary positions make queries and keys float32.
    kind = query.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (t.to(dtype) for t in (query, key, value))
    return query, key, value


def _fused_causal(
    query: Tensor, key: Tensor, value: Tensor, examples: list[Example], scale: float
) -> Tensor:
    """Compute each example by PyTorch's fused kernel, which saves no attention matrix."""
    heads, size = query.shape[1], query.shape[3]
    lengths = [n for _, n, _, _ in examples]
    # One split for all examples: the gradient of each slice would be a tensor of all tokens.
    flat = [
        torch.split(t.transpose(1, 2).reshape(-1, heads, size), lengths)
        for t in (query, key, value)
    ]
    outputs = []
    for parts in zip(*flat, strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        output = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)[None]


class _ExamplesAttention(torch.autograd.Function):
    """Compute softmax(scale * q @ k.T + bias) @ v of every example, from [1, H, N, d].

    The bias [H, T, S] depends on the distance only, so every example uses its top left corner.
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
        added = _bias_and_mask(bias, examples, causal=causal, dtype=query.dtype)
        saved: list[Tensor] = []
        for first, n, first_key, n_keys in examples:
            rows, columns = (
                slice(first, first + n),
                slice(first_key, first_key + n_keys),
            )
            scores = query[0, :, rows] @ key[0, :, columns].transpose(1, 2)
            scores = scores.to(added.dtype)
            if scale != 1.0:  # T5 does not scale
                scores = scores.mul_(scale)
            scores = scores.add_(added[:, :n, :n_keys])
            shares = scores.softmax(-1).to(value.dtype)
            saved.append(shares)
            if dropout > 0.0:
                queries = (
                    None if keys is None else keys_by_head(keys[0, rows], len(shares))
                )
                saved.append(keep_mask(shares, dropout, queries))
                shares = shares * saved[-1]
            output[0, rows] = (shares @ value[0, :, columns]).transpose(0, 1)
        ctx.save_for_backward(query, key, value, *saved)
        ctx.examples, ctx.scale = examples, scale
        ctx.dropped = dropout > 0.0
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *saved = ctx.saved_tensors
        of_query, of_key, of_value = (torch.zeros_like(t) for t in (query, key, value))
        needs_bias = ctx.bias is not None and ctx.needs_input_grad[3]
        of_bias = (
            query.new_zeros(ctx.bias[0], dtype=ctx.bias[1]) if needs_bias else None
        )
        remaining = iter(saved)
        for first, n, first_key, n_keys in ctx.examples:
            rows, columns = (
                slice(first, first + n),
                slice(first_key, first_key + n_keys),
            )
            shares = next(remaining)
            keep = next(remaining) if ctx.dropped else None
            slope = grads[0][0, rows].transpose(0, 1)
            used = shares if keep is None else shares * keep
            of_value[0, :, columns] = used.transpose(1, 2) @ slope
            inner = slope @ value[0, :, columns].transpose(1, 2)
            if keep is not None:
                inner = inner * keep
            # The gradient of softmax in one pass: p * (g - sum(p * g)).
            inner = torch._softmax_backward_data(inner, shares, -1, shares.dtype)  # noqa: SLF001
            if of_bias is not None:
                of_bias[:, :n, :n_keys] += inner
            of_query[0, :, rows] = (inner @ key[0, :, columns]) * ctx.scale
            of_key[0, :, columns] = (
                inner.transpose(1, 2) @ query[0, :, rows]
            ) * ctx.scale
        return of_query, of_key, of_value, of_bias, None, None, None, None, None


def _bias_and_mask(
    bias: Tensor | None, examples: list[Example], *, causal: bool, dtype: torch.dtype
) -> Tensor:
    """Add bias and causal mask, [H or 1, longest t, longest s] in float32 or wider."""
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
