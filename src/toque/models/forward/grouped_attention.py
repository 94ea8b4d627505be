"""Attention by groups of examples of like length, for packed rows in bfloat16 on a CPU.

One example at a time, a batch of short texts is thousands of small products, and PyTorch's fused
attention kernel computes bfloat16 far below the rate of products there. Here examples of like
length are padded to one length and stacked, so that each of attention's products is one batched
product for the whole group. Padded queries attend to real keys, nobody reads what they get, and
their gradient is zero. Padded keys stand after the real ones, where a causal mask hides them from
real queries; without one they are masked.

Letters: N tokens, H heads, d head size; of a group: G examples, t and s its longest queries, keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from toque.models.forward.fast_dropout import keep_mask

MULTIPLE = 32
"""Lengths are padded to a multiple of it: few shapes of products, and whole tiles of kernels."""
MAX_PADDED = 1.3
"""Scores that a group computes for each real one, at most; more costs more than another group."""
MAX_SCORES = 1 << 19
"""Scores of one head in a group, at most, unless one example alone has more: the cache's size."""

Example = tuple[int, int, int, int]
"""First query, number of queries, first key, number of keys."""


@dataclass(frozen=True)
class Side:
    """The queries, or the keys, of a group.

    Attributes:
        length: t or s.
        where: [G * length] the token at each place; places of padding hold some token of the group.
        real: [n] the places that are no padding; None without padding.
        tokens: [n] the tokens at the real places.
    """

    length: int
    where: Tensor
    real: Tensor | None
    tokens: Tensor

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int]) -> Side:
        """Of examples of these first tokens and lengths."""
        longest = -(-max(lengths) // MULTIPLE) * MULTIPLE
        first, count = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
        place = torch.arange(longest)[None]
        where = (first + torch.minimum(place, count - 1)).view(-1)
        if min(lengths) == longest:
            return cls(longest, where, None, where)
        real = (place < count).view(-1).nonzero().squeeze(1)
        return cls(longest, where, real, where[real])

    def stacked(self, tokens: Tensor) -> Tensor:
        """[N, H, d] -> [H, G, length, d]."""
        heads, size = tokens.shape[1:]
        taken = tokens.reshape(len(tokens), -1).index_select(0, self.where)
        return taken.view(-1, self.length, heads, size).permute(2, 0, 1, 3).contiguous()

    def stacked_gradient(self, tokens: Tensor) -> Tensor:
        """`stacked`, with zeros at padding."""
        if self.real is None:
            return self.stacked(tokens)
        heads, size = tokens.shape[1:]
        flat = tokens.reshape(len(tokens), -1)
        whole = flat.new_zeros(len(self.where), heads * size)
        whole.index_copy_(0, self.real, flat.index_select(0, self.tokens))
        return whole.view(-1, self.length, heads, size).permute(2, 0, 1, 3).contiguous()

    def put(self, stacked: Tensor, into: Tensor) -> None:
        """[H, G, length, d] -> the real places of `into` [N, H, d], contiguous."""
        flat = stacked.permute(1, 2, 0, 3).reshape(len(self.where), -1)
        if self.real is not None:
            flat = flat.index_select(0, self.real)
        into.view(len(into), -1).index_copy_(0, self.tokens, flat)


@dataclass(frozen=True)
class Group:
    """Examples of like length.

    Attributes:
        queries: Their queries.
        keys: Their keys; the same object in self-attention.
        masked: [G, 1, s] -inf at padded keys, else 0; None where there is nothing to hide.
    """

    queries: Side
    keys: Side
    masked: Tensor | None


def groups_of(examples: Sequence[Example], *, causal: bool) -> list[Group]:
    """The groups of a batch's examples.

    Args:
        examples: Of one flat row of tokens.
        causal: A causal mask will hide padded keys; queries and keys are the same tokens.
    """
    return [_group(part, causal=causal) for part in _alike(examples)]


def _alike(examples: Sequence[Example]) -> Iterator[list[Example]]:
    """Examples in descending length, cut where padding or size would pass the limits."""
    part: list[Example] = []
    real = t = s = 0
    for example in sorted(examples, key=lambda e: (-e[1], -e[3], e[0])):
        _, queries, _, keys = example
        wide = max(s, keys)
        scores = (len(part) + 1) * t * wide
        if part and (scores > MAX_PADDED * (real + queries * keys) or scores > MAX_SCORES):
            yield part
            part, real, t, s = [], 0, 0, 0
        part.append(example)
        real, t, s = real + queries * keys, max(t, queries), max(s, keys)
    if part:
        yield part


def _group(part: Sequence[Example], *, causal: bool) -> Group:
    first, queries, first_key, keys = zip(*part, strict=True)
    own = Side.of(first, queries)
    if causal:
        return Group(own, own, None)
    others = own if (first, queries) == (first_key, keys) else Side.of(first_key, keys)
    if others.real is None:
        return Group(own, others, None)
    hidden = torch.arange(others.length)[None] >= torch.tensor(keys)[:, None]
    masked = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return Group(own, others, masked[:, None])


def grouped_attention(
    packed: Tensor,
    others: Tensor | None,
    groups: Sequence[Group],
    *,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """softmax(scale * q @ k.T + bias) @ v within each example; scores and softmax in float32.

    Args:
        packed: [N, 3 * H, d] in bfloat16: the heads' queries, keys and values; in cross-attention
            [N, H, d], the queries alone.
        others: In cross-attention [M, 2 * H, d], keys and values; else None.
        groups: Of all tokens that attend.
        bias: [H, T, S] added to the scores of each example from its first token on, or None.
        causal: Hide later keys.
        scale: Of the scores.
        dropout: Share of attention weights set to zero.

    Returns:
        [N, H, d].
    """
    output: Tensor = _GroupedAttention.apply(  # type: ignore[no-untyped-call]
        packed, others, bias, groups, causal, scale, dropout
    )
    return output


class _GroupedAttention(torch.autograd.Function):
    """See `grouped_attention`."""

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        others: Tensor | None,
        bias: Tensor | None,
        groups: Sequence[Group],
        causal: bool,  # noqa: FBT001  # autograd functions take arguments by position
        scale: float,
        dropout: float,
    ) -> Tensor:
        heads = packed.shape[1] if others is not None else packed.shape[1] // 3
        output = packed.new_zeros(len(packed), heads, packed.shape[2])
        kept: list[Tensor] = []
        for group in groups:
            q, k, v = _stacked(group, packed, others)
            scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).float()
            if scale != 1.0:  # T5 has none
                scores.mul_(scale)
            _add_masks(scores.view(heads, -1, *scores.shape[1:]), group, bias, causal=causal)
            shares = torch.softmax(scores, -1).to(packed.dtype)
            kept += [q, k, v, shares]
            if dropout > 0.0:
                kept.append(keep_mask(shares, dropout))
                shares = shares * kept[-1]
            group.queries.put(torch.bmm(shares, v.flatten(0, 1)).view(q.shape), output)
        ctx.save_for_backward(*kept)
        ctx.groups, ctx.scale, ctx.dropped = groups, scale, dropout > 0.0
        ctx.shapes = (packed.shape, None if others is None else others.shape)
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_packed, of_others = (
            None if shape is None else grads[0].new_zeros(shape) for shape in ctx.shapes
        )
        assert of_packed is not None
        wants_bias = ctx.bias is not None and ctx.needs_input_grad[2]
        of_bias = torch.zeros(ctx.bias[0], dtype=torch.float32) if wants_bias else None
        saved = iter(ctx.saved_tensors)
        for group in ctx.groups:
            q, k, v, shares = (next(saved) for _ in range(4))
            keep = next(saved) if ctx.dropped else None
            slope = group.queries.stacked_gradient(grads[0]).flatten(0, 1)
            used = shares if keep is None else shares * keep
            # One tensor for the gradients of what was stacked as one.
            sizes = [len(q), len(k), len(v)]
            both = k.new_empty(sum(sizes) if of_others is None else sum(sizes[1:]), *k.shape[1:])
            of_q = both[: len(q)] if of_others is None else torch.empty_like(q)
            of_k, of_v = both[-2 * len(k) : -len(k)], both[-len(k) :]
            torch.bmm(used.transpose(1, 2), slope, out=of_v.flatten(0, 1))
            inner = torch.bmm(slope, v.flatten(0, 1).transpose(1, 2))
            if keep is not None:
                inner = inner.mul_(keep)
            # The softmax's gradient: p * (g - sum(p * g)), in one pass.
            inner = torch._softmax_backward_data(inner, shares, -1, shares.dtype)  # noqa: SLF001
            if of_bias is not None:
                t, s = (min(n, m) for n, m in zip(inner.shape[1:], ctx.bias[0][1:], strict=True))
                each = inner.view(len(q), -1, *inner.shape[1:])[:, :, :t, :s]
                of_bias[:, :t, :s] += each.sum(1, dtype=torch.float32)
            if ctx.scale != 1.0:
                inner = inner.mul_(ctx.scale)
            torch.bmm(inner, k.flatten(0, 1), out=of_q.flatten(0, 1))
            torch.bmm(inner.transpose(1, 2), q.flatten(0, 1), out=of_k.flatten(0, 1))
            if of_others is None:
                group.queries.put(both, of_packed)
            else:
                group.queries.put(of_q, of_packed)
                group.keys.put(both, of_others)
        if of_bias is not None:
            of_bias = of_bias.to(ctx.bias[1])
        return of_packed, of_others, of_bias, None, None, None, None


def _stacked(group: Group, packed: Tensor, others: Tensor | None) -> Sequence[Tensor]:
    """Queries [H, G, t, d], keys and values [H, G, s, d]."""
    if others is None:
        return group.queries.stacked(packed).chunk(3)
    return (group.queries.stacked(packed), *group.keys.stacked(others).chunk(2))


def _add_masks(scores: Tensor, group: Group, bias: Tensor | None, *, causal: bool) -> None:
    """Add bias, causal mask and padded keys to [H, G, t, s] scores."""
    if causal:
        scores.add_(causal_mask(scores.shape[2]))
    if bias is not None:  # padding may reach past its edge; what stands there is not read
        part = scores[:, :, : bias.shape[1], : bias.shape[2]]
        part.add_(bias[:, None, : part.shape[2], : part.shape[3]])
    if group.masked is not None:
        scores.add_(group.masked)


@lru_cache(maxsize=64)
def causal_mask(length: int) -> Tensor:
    """[length, length] -inf above the diagonal, else 0."""
    return torch.full((length, length), -torch.inf).triu_(1)
