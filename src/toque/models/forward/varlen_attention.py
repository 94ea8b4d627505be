"""Variable-length attention for packed rows on a CPU, one example at a time.

With a mask, attention over a row of L tokens takes L * L operations, regardless of its examples.
Here the examples are runs of consecutive tokens in one flat row without padding, and each is
computed alone. This is several times faster on a CPU, where PyTorch's attention is slow if a
position bias needs a gradient (T5). On a GPU, many small matmuls would be slower than one masked
matmul.

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
MASKED: Final = "toque_masked"  # name of the attention with masks in the registry
PLAN: Final = ContextVar[Any]("PLAN", default=None)
"""Plan of the current forward, for layers that pass no arguments to their attention (StableLM).
Other layers pass the plan as an argument, so that a compiled block can depend on it."""


def examples_in(queries: Tensor, keys: Tensor | None = None) -> list[Example]:
    """List the examples of packed rows by their segment numbers [R, T] and [R, S]. 0 is padding.

    >>> examples_in(torch.tensor([[1, 1, 2, 0], [1, 0, 0, 0]]))
    [(0, 2, 0, 2), (2, 1, 2, 1), (3, 1, 3, 1)]
    """
    query_segments = _locate_segments(queries)
    key_segments = query_segments if keys is None else _locate_segments(keys)
    return [(*query_segments[key], *key_segments[key]) for key in query_segments]


def _locate_segments(segments: Tensor) -> dict[tuple[int, int], tuple[int, int]]:
    """Map (row, segment number) to the segment's first token and its number of tokens.

    Tokens are numbered over the whole batch, without padding.
    """
    located: dict[tuple[int, int], tuple[int, int]] = {}
    first = 0
    for row, numbers in enumerate(segments.numpy()):
        changes = np.flatnonzero(np.diff(numbers)) + 1
        edges = [0, *changes.tolist(), len(numbers)]
        for start, end in itertools.pairwise(edges):
            number = int(numbers[start])
            if number == 0:
                continue
            if (row, number) in located:
                raise ValueError(f"segment {number} of row {row} is not consecutive")
            located[row, number] = (first, end - start)
            first += end - start
    return located


def configs_of(model: nn.Module) -> list[PretrainedConfig]:
    """Return every config that selects an attention. A T5's encoder and decoder have one each."""
    configs = [
        part.config for part in model.modules() if isinstance(part, PreTrainedModel)
    ]
    return list({id(config): config for config in configs}.values())


@contextmanager
def attending_by(
    configs: Sequence[PretrainedConfig], name: str, plan: object = None
) -> Iterator[None]:
    """Context in which layers with these configs use an attention from transformers' registry."""
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
    earlier token of the same segment.
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

    # A window that is wider than every example has no effect. With dropout it is always applied,
    # because the dropped pairs of an example must not depend on the longest example of its batch.
    is_narrow = sliding_window and (dropout > 0.0 or sliding_window < plan.longest)
    if softcap is not None or is_narrow:
        causal["pair"] = next_pair(module, dropout)
        return _attend_causally_by_example(query, key, value, plan, **causal), None

    is_cross = is_cross_attention(module, plan)
    if query.dtype == torch.bfloat16:
        packed, cross_kv = _pack(query, key, value, is_cross=is_cross)
        attended = attend_packed(
            module,
            packed,
            cross_kv,
            plan,
            scale=scale,
            dropout=dropout,
            bias=position_bias,
        )
        return attended[None], None
    if position_bias is None and dropout == 0.0 and module.is_causal:
        return _fused_causal(query, key, value, plan.self_attention, scale), None

    # T5 passes a bias of zeros to its cross-attention.
    bias = None if position_bias is None or is_cross else position_bias[0]
    output: Tensor = _ExamplesAttention.apply(  # type: ignore[no-untyped-call]
        query,
        key,
        value,
        bias,
        plan.cross_attention if is_cross else plan.self_attention,
        bool(module.is_causal),
        scale,
        dropout,
        next_keys(module, dropout),
    )
    return output, None


AttentionInterface.register(NAME, _attend)


def _pack(
    query: Tensor, key: Tensor, value: Tensor, *, is_cross: bool
) -> tuple[Tensor, Tensor | None]:
    """Stack [1, H, N, d] each as the first two arguments of `attend_packed` after the module."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if is_cross:
        return q, torch.cat([k, v], 1)
    return torch.cat([q, k, v], 1), None


def planned(plan: object, arguments: Mapping[str, Any]) -> Any:
    """Return the plan that a layer passed, or else the plan of the current forward.

    Raises:
        NotImplementedError: The model needs an attention that is not implemented here.
    """
    if arguments.get("s_aux") is not None:
        raise NotImplementedError(
            "its attention uses sinks, which Toque does not support"
        )
    return PLAN.get() if plan is None else plan


def is_cross_attention(module: nn.Module, plan: Any) -> bool:
    """True if a layer of a decoder attends to the encoder."""
    is_decoder = getattr(module, "is_decoder", False)
    return bool(
        plan.cross_attention is not None and is_decoder and not module.is_causal
    )


def _attend_causally_by_example(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    pair: Pair | None,
    **settings: Any,
) -> Tensor:
    """Compute causal attention [1, N, H, d] within the window, one example at a time."""
    lengths = [n for _, n, _, _ in plan.self_attention]
    lengths.append(query.shape[2] - sum(lengths))  # tokens outside of examples
    inputs = (torch.split(t, lengths, dim=2) for t in (query, key, value))
    *examples, (_, _, extra_values) = zip(*inputs, strict=True)
    pairs: Sequence[Pair | None] = [None for _ in examples]
    if pair is not None:
        query_keys, key_keys = (torch.split(keys, lengths, dim=1) for keys in pair)
        pairs = [*zip(query_keys[:-1], key_keys[:-1], strict=True)]

    outputs = [
        attend_causally(q, k, v, pair=keys, **settings)
        for (q, k, v), keys in zip(examples, pairs, strict=True)
    ]
    return torch.cat([*outputs, torch.zeros_like(extra_values)], 2).transpose(1, 2)


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
        together: [R, 1, T, T], true for a token and an earlier token of the same segment; None for
            rows of one segment. The tokens of a segment are consecutive.
        scale: Factor of the scores.
        window: Width of the sliding window in tokens.
        softcap: c of the cap; None without a cap.
        dropout: Probability that an attention weight is dropped.
        pair: Keys that determine the dropped weights.
    """
    mask = together
    position = torch.arange(query.shape[2], device=query.device)
    is_plain = softcap is None and dropout == 0.0
    if window is not None or (not is_plain and mask is None):
        distance = position[:, None] - position
        in_window = (distance >= 0) & (distance < (window or len(position)))
        mask = in_window if mask is None else mask & in_window
    if is_plain:
        return functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scale
        )
    assert mask is not None
    scores = _scores(query, key, scale)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    return _weighted_values(scores, value, dropout, pair)


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Compute scale * q @ k.T in float32 or wider."""
    exact = torch.promote_types(query.dtype, torch.float32)
    return (query @ key.transpose(-1, -2)).to(exact) * scale


def _weighted_values(
    scores: Tensor, value: Tensor, dropout: float, pair: Pair | None
) -> Tensor:
    """Compute softmax(scores) @ v, with dropout."""
    weights = scores.softmax(-1).to(value.dtype)
    if dropout > 0.0:
        weights = drop_pairs(weights, dropout, pair)
    return weights @ value


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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = _scores(query, key, scale)
    if position_bias is not None:
        scores = scores + position_bias
    if mask is None:
        position = torch.arange(query.shape[2], device=query.device)
        mask = position[:, None] >= position
    scores = scores.masked_fill(~mask, -torch.inf)
    output = _weighted_values(scores, value, dropout, next_pair(module, dropout))
    return output.transpose(1, 2), None


AttentionInterface.register(MASKED, _attend_masked)


def as_attended(
    query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat shared keys and values per query head, and cast all three to autocast's precision."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    # PyTorch's attention casts too, because rotary positions make queries and keys float32.
    device_type = query.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = (t.to(dtype) for t in (query, key, value))
    return query, key, value


def _fused_causal(
    query: Tensor, key: Tensor, value: Tensor, examples: list[Example], scale: float
) -> Tensor:
    """Compute each example by PyTorch's fused kernel, which saves no attention matrix."""
    heads, size = query.shape[1], query.shape[3]
    lengths = [n for _, n, _, _ in examples]
    # One split for all examples: the gradient of each slice would be a tensor of all tokens.
    flat = (t.transpose(1, 2).reshape(-1, heads, size) for t in (query, key, value))
    by_example = [torch.split(t, lengths) for t in flat]
    outputs = []
    for parts in zip(*by_example, strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        output = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)[None]


class _ExamplesAttention(torch.autograd.Function):
    """Softmax(scale * q @ k.T + bias) @ v of every example, from [1, H, N, d] to [1, N, H, d].

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
            rows = slice(first, first + n)
            columns = slice(first_key, first_key + n_keys)
            scores = query[0, :, rows] @ key[0, :, columns].transpose(1, 2)
            scores = scores.to(added.dtype)
            if scale != 1.0:  # T5 does not scale
                scores = scores.mul_(scale)
            scores = scores.add_(added[:, :n, :n_keys])
            weights = scores.softmax(-1).to(value.dtype)
            saved.append(weights)

            if dropout > 0.0:
                query_keys = None
                if keys is not None:
                    query_keys = keys_by_head(keys[0, rows], len(weights))
                keep = keep_mask(weights, dropout, query_keys)
                saved.append(keep)
                weights = weights * keep
            output[0, rows] = (weights @ value[0, :, columns]).transpose(0, 1)

        ctx.save_for_backward(query, key, value, *saved)
        ctx.examples, ctx.scale = examples, scale
        ctx.dropped = dropout > 0.0
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *saved = ctx.saved_tensors
        grad_query = torch.zeros_like(query)
        grad_key = torch.zeros_like(key)
        grad_value = torch.zeros_like(value)
        grad_bias = None
        if ctx.bias is not None and ctx.needs_input_grad[3]:
            shape, dtype = ctx.bias
            grad_bias = query.new_zeros(shape, dtype=dtype)

        remaining = iter(saved)
        for first, n, first_key, n_keys in ctx.examples:
            rows = slice(first, first + n)
            columns = slice(first_key, first_key + n_keys)
            weights = next(remaining)
            keep = next(remaining) if ctx.dropped else None
            grad_output = grads[0][0, rows].transpose(0, 1)

            final_weights = weights if keep is None else weights * keep
            grad_value[0, :, columns] = final_weights.transpose(1, 2) @ grad_output
            grad = grad_output @ value[0, :, columns].transpose(1, 2)
            if keep is not None:
                grad = grad * keep
            # The gradient of softmax in one pass: p * (g - sum(p * g)).
            grad = torch._softmax_backward_data(grad, weights, -1, weights.dtype)  # noqa: SLF001
            if grad_bias is not None:
                grad_bias[:, :n, :n_keys] += grad

            grad_query[0, :, rows] = (grad @ key[0, :, columns]) * ctx.scale
            grad_rows = grad.transpose(1, 2) @ query[0, :, rows]
            grad_key[0, :, columns] = grad_rows * ctx.scale
        return grad_query, grad_key, grad_value, grad_bias, None, None, None, None, None


def _bias_and_mask(
    bias: Tensor | None, examples: list[Example], *, causal: bool, dtype: torch.dtype
) -> Tensor:
    """Add bias and causal mask, [H or 1, most queries, most keys] in float32 or wider."""
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
