"""Attention for packed rows in bfloat16 on a CPU, by groups of examples of similar length.

One example at a time, a batch of short texts needs thousands of small products. PyTorch's fused
kernel is far slower in bfloat16 than its products. Here every product of attention is one batched
product per group. Masks and T5's bias are added within the product of queries and keys. The softmax
reads and writes 16 bits and computes in float32. Scores are thereby read and written three times
instead of nine.

The examples of a group are padded to one length and stacked. The output of padded queries is not
used, and their gradient is zero. Padded keys come after the real ones: a causal mask hides them
from real queries, and without a causal mask they are masked.

Letters: N tokens, H heads, d head size. In a group: G examples, t and s the longest queries and
keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from toque.models.forward.keyed_dropout import keep_mask, keys_by_head, next_keys

MULTIPLE = 32  # lengths are padded to it, for few shapes of products and entire tiles of kernels
# Largest ratio of computed to real scores; above it, another group is faster.
MAX_PADDED = 1.3
# Scores of one head in a group of several examples; they fit the cache.
MAX_SCORES = 1 << 19

# First query, number of queries, first key, number of keys.
Example = tuple[int, int, int, int]


@dataclass(frozen=True)
class AttentionPlan:
    """Examples of a flat row, for every layer of one forward."""

    own: list[Example]  # self-attention
    # cross-attention from decoder to encoder, if there is one.
    across: list[Example] | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return max(n for _, n, _, _ in self.own)

    @cached_property
    def causal_groups(self) -> _Groups:
        """Groups of `own` by length, for a causal mask."""
        return _groups_of(self.own, causal=True)

    @cached_property
    def groups(self) -> _Groups:
        """Groups of `own` by length."""
        return _groups_of(self.own, causal=False)

    @cached_property
    def across_groups(self) -> _Groups:
        """Groups of `across` by length."""
        return _groups_of(self.across or [], causal=False)


@dataclass(frozen=True)
class _Side:
    """Queries or keys of a group."""

    length: int  # t or s
    where: Tensor  # [G * length] token at each position; at padding any token of the example
    padding: Tensor | None  # [p] positions of padding, if there are any

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int]) -> _Side:
        longest = rounded(max(lengths))
        first, count = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
        position = torch.arange(longest)[None]
        where = (first + torch.minimum(position, count - 1)).view(-1)
        if min(lengths) == longest:
            return cls(longest, where, None)
        return cls(longest, where, (position >= count).view(-1).nonzero().squeeze(1))

    def stack(self, tokens: Tensor, *, zeros: bool = False) -> Tensor:
        """Stack [N, H, d] to [H, G, length, d]. With `zeros`, padding is zero."""
        rows = tokens.reshape(len(tokens), -1).index_select(0, self.where)
        if zeros and self.padding is not None:
            rows.index_fill_(0, self.padding, 0.0)
        by_example = rows.view(-1, self.length, *tokens.shape[1:])
        return by_example.permute(2, 0, 1, 3).contiguous()

    def unstack(self, stacked: Tensor, out: Tensor) -> None:
        """Copy [H, G, length, d] to `out` [G * length, H * d]."""
        heads, _, length, size = stacked.shape
        out.view(-1, length, heads, size).copy_(stacked.permute(1, 2, 0, 3))


@dataclass(frozen=True)
class _Places:
    """Positions of tokens in a tensor with the positions of all groups, in order.

    One gather returns them to the order of tokens. An `index_copy_` per group takes ten times as
    long (torch 2.13).
    """

    sizes: list[int]  # positions of each group
    of_token: Tensor  # [N] position of each token; tokens of no example have the last, a zero row

    @classmethod
    def of(cls, sides: Sequence[_Side]) -> _Places:
        sizes = [len(side.where) for side in sides]
        where = torch.cat([side.where for side in sides])
        is_real = torch.ones(len(where), dtype=torch.bool)
        for side, part in zip(sides, torch.split(is_real, sizes), strict=True):
            if side.padding is not None:
                part[side.padding] = False
        positions = is_real.nonzero().squeeze(1)
        of_token = torch.full((int(where.max()) + 1,), len(where))
        of_token[where[positions]] = positions
        return cls(sizes, of_token)

    def allocate(self, like: Tensor, width: int) -> tuple[Tensor, Sequence[Tensor]]:
        """Allocate [positions + 1, width], the last row zero. Return it, and a view per group."""
        rows = like.new_empty(sum(self.sizes) + 1, width)
        rows[-1] = 0.0
        return rows, torch.split(rows[:-1], self.sizes)

    def gather(self, rows: Tensor, n: int) -> Tensor:
        """Select the rows [n, width] of n tokens from [positions + 1, width]."""
        n_extra = n - len(self.of_token)
        order = functional.pad(self.of_token, (0, n_extra), value=len(rows) - 1)
        return rows.index_select(0, order)


@dataclass(frozen=True)
class _Group:
    """Examples of similar length. In self-attention, queries and keys are one object."""

    queries: _Side
    keys: _Side
    # [G, 1, s] bfloat16, -inf at padded keys, else 0; None without any.
    masked: Tensor | None


@dataclass(frozen=True)
class _Groups:
    """Groups of all examples in a batch, and the positions of their queries and keys."""

    each: list[_Group]
    queries: _Places
    keys: _Places


def _groups_of(examples: Sequence[Example], *, causal: bool) -> _Groups:
    """Group examples. With a causal mask, which hides padded keys, queries are also the keys."""
    each = [_group(part, causal=causal) for part in _similar(examples)]
    queries = _Places.of([group.queries for group in each])
    is_shared = all(group.queries is group.keys for group in each)
    return _Groups(
        each, queries, queries if is_shared else _Places.of([g.keys for g in each])
    )


def rounded(length: int) -> int:
    """Round a length up to a multiple of `MULTIPLE`: 33 to 64, 64 to 64."""
    return -(-length // MULTIPLE) * MULTIPLE


def _similar(examples: Sequence[Example]) -> Iterator[list[Example]]:
    """Sort examples by descending length, and divide them before padding or size is too large."""
    part: list[Example] = []
    real = longest_queries = longest_keys = 0
    for example in sorted(examples, key=lambda e: (-e[1], -e[3], e[0])):
        _, queries, _, keys = example
        widest = max(longest_keys, keys)
        scores = (len(part) + 1) * longest_queries * widest
        if part and (
            scores > MAX_PADDED * (real + queries * keys) or scores > MAX_SCORES
        ):
            yield part
            part, real = [], 0
            longest_queries = longest_keys = 0
        part.append(example)
        real += queries * keys
        longest_queries = max(longest_queries, queries)
        longest_keys = max(longest_keys, keys)
    if part:
        yield part


def _group(part: Sequence[Example], *, causal: bool) -> _Group:
    first, n_queries, first_key, n_keys = zip(*part, strict=True)
    queries = _Side.of(first, n_queries)
    if causal:
        return _Group(queries, queries, None)
    is_self = (first, n_queries) == (first_key, n_keys)
    keys = queries if is_self else _Side.of(first_key, n_keys)
    if keys.padding is None:
        return _Group(queries, keys, None)
    hidden = torch.arange(keys.length)[None] >= torch.tensor(n_keys)[:, None]
    masked = torch.zeros(hidden.shape, dtype=torch.bfloat16).masked_fill_(
        hidden, -torch.inf
    )
    return _Group(queries, keys, masked[:, None])


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
    """Compute softmax(scale * q @ k.T + bias) @ v in each example of a flat row, [N, H, d].

    Args:
        module: The attention layer. Its `is_causal` hides later keys.
        packed: [N, 3 * H, d] bfloat16, queries, keys and values. For cross-attention [N, H, d], the
            queries.
        others: [M, 2 * H, d], keys and values for cross-attention.
        plan: The examples.
        scale: Factor of the scores.
        dropout: Probability of an attention weight to be dropped.
        bias: [1, H, T, S], added to the scores of each example from its first token. Ignored for
            cross-attention, which has no bias in T5.
    """
    causal = bool(module.is_causal) and others is None
    if others is not None:
        groups = plan.across_groups
    else:
        groups = plan.causal_groups if causal else plan.groups
    own_bias = None if bias is None or others is not None else bias[0]
    output: Tensor = _GroupedAttention.apply(  # type: ignore[no-untyped-call]
        packed,
        others,
        own_bias,
        groups,
        causal,
        scale,
        dropout,
        next_keys(module, dropout),
    )
    return output


class _GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        others: Tensor | None,
        bias: Tensor | None,
        groups: _Groups,
        causal: bool,  # noqa: FBT001  # autograd functions take arguments by position
        scale: float,
        dropout: float,
        keys: Tensor | None,
    ) -> Tensor:
        n, width, size = packed.shape
        heads = width if others is not None else width // 3
        added = _bias_and_mask(bias, causal=causal)
        rows, parts = groups.queries.allocate(packed, heads * size)

        saved: list[Tensor] = []
        for group, part in zip(groups.each, parts, strict=True):
            # Queries are [H, G, t, d], keys and values [H, G, s, d].
            stacked = group.queries.stack(packed)
            if others is None:
                q, k, v = stacked.chunk(3)
            else:
                q, (k, v) = stacked, group.keys.stack(others).chunk(2)

            scores = _scores(q, k, _initial_scores(group, added, causal=causal), scale)
            # In place: the kernel has read a row's scores before it writes the row.
            shares = torch.softmax(scores, -1, out=scores)
            saved += [q, k, v, shares]

            if dropout > 0.0:
                queries = None
                if keys is not None:
                    queries = keys_by_head(keys.view(-1)[group.queries.where], heads)
                    queries = queries.view(shares.shape[:2])
                saved.append(keep_mask(shares, dropout, queries))
                shares = shares * saved[-1]

            group.queries.unstack(
                torch.bmm(shares, v.flatten(0, 1)).view(q.shape), part
            )

        ctx.save_for_backward(*saved)
        ctx.groups, ctx.scale = groups, scale
        ctx.dropped = dropout > 0.0
        ctx.shapes = (packed.shape, None if others is None else others.shape)
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return groups.queries.gather(rows, n).view(n, heads, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        groups, (packed_shape, others_shape) = ctx.groups, ctx.shapes
        needs_bias = ctx.bias is not None and ctx.needs_input_grad[2]
        of_bias = torch.zeros(ctx.bias[0], dtype=torch.float32) if needs_bias else None
        rows, parts = groups.queries.allocate(
            grads[0], packed_shape[1] * packed_shape[2]
        )
        other_rows = None
        other_parts: Sequence[Tensor | None] = [None] * len(parts)
        if others_shape is not None:
            width = others_shape[1] * others_shape[2]
            other_rows, other_parts = groups.keys.allocate(grads[0], width)

        saved = iter(ctx.saved_tensors)
        for group, part, other in zip(groups.each, parts, other_parts, strict=True):
            q, k, v, shares = (next(saved) for _ in range(4))
            keep = next(saved) if ctx.dropped else None
            slope = group.queries.stack(grads[0], zeros=True).flatten(0, 1)
            used = shares if keep is None else shares * keep
            # Gradients of tensors that were stacked as one are one tensor too.
            sizes = [len(q), len(k), len(v)]
            joint = k.new_empty(
                sum(sizes) if other is None else sum(sizes[1:]), *k.shape[1:]
            )
            of_q = joint[: len(q)] if other is None else torch.empty_like(q)
            of_k, of_v = joint[-2 * len(k) : -len(k)], joint[-len(k) :]

            _multiply_into(used.transpose(1, 2), slope, 1.0, out=of_v)
            inner = torch.bmm(slope, v.flatten(0, 1).transpose(1, 2))
            if keep is not None:
                inner = inner.mul_(keep)
            # The gradient of softmax in one pass: p * (g - sum(p * g)).
            inner = torch._softmax_backward_data(inner, shares, -1, shares.dtype)  # noqa: SLF001
            if of_bias is not None:
                t, s = (
                    min(n, m)
                    for n, m in zip(inner.shape[1:], ctx.bias[0][1:], strict=True)
                )
                by_example = inner.view(len(q), -1, *inner.shape[1:])[:, :, :t, :s]
                # torch's sum over the examples takes four times as long.
                for example in by_example.unbind(1):
                    of_bias[:, :t, :s] += example
            _multiply_into(inner, k.flatten(0, 1), ctx.scale, out=of_q)
            _multiply_into(inner.transpose(1, 2), q.flatten(0, 1), ctx.scale, out=of_k)

            if other is None:
                group.queries.unstack(joint, part)
            else:
                group.queries.unstack(of_q, part)
                group.keys.unstack(joint, other)
        of_packed = groups.queries.gather(rows, packed_shape[0]).view(packed_shape)
        of_others = None
        if other_rows is not None:
            of_others = groups.keys.gather(other_rows, others_shape[0]).view(
                others_shape
            )
        if of_bias is not None:
            of_bias = of_bias.to(ctx.bias[1])
        return of_packed, of_others, of_bias, None, None, None, None, None


def _bias_and_mask(bias: Tensor | None, *, causal: bool) -> Tensor | None:
    """Add bias and causal mask, [H, T, S] in bfloat16, padded for any group; None without bias."""
    if bias is None:
        return None
    height, width = bias.shape[1:]
    # These scores are not used.
    padding = (
        0,
        rounded(width) - width,
        0,
        rounded(height) - height,
    )
    added = functional.pad(bias.to(torch.bfloat16), padding)
    return added + causal_mask(added.shape[1]) if causal else added


def _initial_scores(
    group: _Group, added: Tensor | None, *, causal: bool
) -> Tensor | None:
    """Return the initial scores of a group, broadcastable to [H, G, t, s]; None for zeros."""
    t, s = group.queries.length, group.keys.length
    if added is None:
        if group.masked is not None:
            return group.masked
        return causal_mask(t) if causal else None
    part = added[:, None, :t, :s]
    return part if group.masked is None else part + group.masked


def _scores(q: Tensor, k: Tensor, start: Tensor | None, scale: float) -> Tensor:
    """Compute `start` + scale * q @ k.T, [H * G, t, s]."""
    queries, keys = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)
    if start is None:
        scores = torch.bmm(queries, keys)
        return scores if scale == 1.0 else scores.mul_(scale)  # T5 does not scale
    scores = queries.new_empty(*queries.shape[:2], keys.shape[2])
    scores.view(*q.shape[:3], -1).copy_(start)
    return torch.baddbmm(scores, queries, keys, alpha=scale, out=scores)


def _multiply_into(left: Tensor, right: Tensor, scale: float, *, out: Tensor) -> None:
    """Write scale * left @ right to `out` [H, G, ...]."""
    flat = out.flatten(0, 1)
    torch.baddbmm(flat, left, right, beta=0.0, alpha=scale, out=flat)


@lru_cache(maxsize=64)
def causal_mask(length: int) -> Tensor:
    """Build a mask [length, length] in bfloat16: -inf above the diagonal, else 0."""
    return torch.full((length, length), -torch.inf, dtype=torch.bfloat16).triu_(1)
