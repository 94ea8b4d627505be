"""Attention by groups of examples of like length, with C kernels between its products.

What `grouped_attention.py` does by torch's operators, in fewer passes: tokens are stacked in one
copy and put back in one; a softmax sees the keys that its query may see and nothing else, adds
T5's bias by distance, and needs no mask. Scores are rounded to 16 bits before the bias is added.

Letters: N tokens, H heads, d head size; of a group: G examples, t and s its longest queries, keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from toque.models.cpu_kernels import fused
from toque.models.forward.attention_groups import Group, Groups, Side
from toque.models.forward.fast_dropout import keep_mask


def kernel_attention(*arguments: Any) -> Tensor:
    """`grouped_attention`, its arguments in order; the bias is [H, 2 T - 1] by distance."""
    output: Tensor = _KernelAttention.apply(*arguments)  # type: ignore[no-untyped-call]
    return output


class _KernelAttention(torch.autograd.Function):
    """See `kernel_attention`."""

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        others: Tensor | None,
        bias: Tensor | None,
        groups: Groups,
        causal: bool,  # noqa: FBT001  # autograd functions take arguments by position
        scale: float,
        dropout: float,
    ) -> Tensor:
        n, width, size = packed.shape
        heads = width if others is not None else width // 3
        output = groups.queries.output(packed, n, heads, size)
        kept: list[Tensor] = []
        for group in groups.each:
            q, k, v = _stacked(group, packed, others)
            weights = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
            by_group = weights.view(*q.shape[:3], -1)
            counts = group.keys.counts
            fused.attention_weights(by_group, counts, scale=scale, bias=bias, causal=causal)
            kept += [q, k, v, weights]
            if dropout > 0.0:
                kept.append(keep_mask(weights, dropout))
                weights = weights * kept[-1]
            attended = torch.bmm(weights, v.flatten(0, 1)).view(q.shape)
            _unstack(attended, group.queries, output)
        ctx.save_for_backward(*kept)
        ctx.groups, ctx.causal, ctx.scale, ctx.dropped = groups, causal, scale, dropout > 0.0
        ctx.shapes = (packed.shape, None if others is None else others.shape)
        ctx.bias = None if bias is None else bias.shape
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        groups, (own, across) = ctx.groups, ctx.shapes
        wants_bias = ctx.bias is not None and ctx.needs_input_grad[2]
        of_bias = torch.zeros(ctx.bias, dtype=torch.float32) if wants_bias else None
        of_packed = groups.queries.output(grads[0], *own)
        of_others = None if across is None else groups.keys.output(grads[0], *across)
        saved = iter(ctx.saved_tensors)
        for group in groups.each:
            q, k, v, weights = (next(saved) for _ in range(4))
            keep = next(saved) if ctx.dropped else None
            slope = _stack(grads[0].contiguous(), group.queries, hollow=True).flatten(0, 1)
            used = weights if keep is None else weights * keep
            inner = torch.bmm(slope, v.flatten(0, 1).transpose(1, 2))
            if keep is not None:
                inner = inner.mul_(keep)
            fused.attention_weights_backward(
                weights.view(*q.shape[:3], -1),
                inner.view(*q.shape[:3], -1),
                group.keys.counts,
                scale=ctx.scale,
                of_bias=of_bias,
                causal=ctx.causal,
            )
            # One tensor for the gradients of what was stacked as one.
            sizes = [len(q), len(k), len(v)] if of_others is None else [len(k), len(v)]
            both = k.new_empty(sum(sizes), *k.shape[1:])
            of_q = both[: len(q)] if of_others is None else torch.empty_like(q)
            of_k, of_v = both[-2 * len(k) : -len(k)], both[-len(k) :]
            torch.bmm(used.transpose(1, 2), slope, out=of_v.flatten(0, 1))
            torch.bmm(inner, k.flatten(0, 1), out=of_q.flatten(0, 1))
            torch.bmm(inner.transpose(1, 2), q.flatten(0, 1), out=of_k.flatten(0, 1))
            if of_others is None:
                _unstack(both, group.queries, of_packed)
            else:
                _unstack(of_q, group.queries, of_packed)
                _unstack(both, group.keys, of_others)
        return of_packed, of_others, of_bias, None, None, None, None


def _stacked(group: Group, packed: Tensor, others: Tensor | None) -> tuple[Tensor, ...]:
    """Queries [H, G, t, d], keys and values [H, G, s, d]."""
    if others is None:
        return _stack(packed.contiguous(), group.queries).chunk(3)
    return (
        _stack(packed.contiguous(), group.queries),
        *_stack(others.contiguous(), group.keys).chunk(2),
    )


def _stack(tokens: Tensor, side: Side, *, hollow: bool = False) -> Tensor:
    return fused.stack(tokens, side.where, side.counts, side.length, hollow=hollow)


def _unstack(stacked: Tensor, side: Side, out: Tensor) -> None:
    fused.unstack(stacked, side.where, side.counts, out)
