"""Attention by groups of examples of like length, for packed rows in bfloat16 on a CPU.

One example at a time, a batch of short texts is thousands of small products, and PyTorch's fused
kernel computes bfloat16 far below the rate of products there. Here each of attention's products is
one batched product for a whole group. Masks and T5's bias are added within the product of queries
and keys; the softmax reads and writes 16 bits and computes in float32. So scores are read and
written three times instead of nine.

The examples of a group are padded to one length and stacked. Nobody reads what padded queries get,
and their gradient is zero. Padded keys stand after the real ones, where a causal mask hides them
from real queries; without one they are masked.

Letters: N tokens, H heads, d head size; of a group: G examples, t and s its longest queries, keys.
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

from toque.models.forward.keyed_dropout import by_head, keep_mask, next_keys

MULTIPLE = 32  # lengths are padded to it: few shapes of products, and whole tiles of kernels
MAX_PADDED = 1.3  # scores computed for each real one; more costs more than another group
MAX_SCORES = 1 << 19  # of one head in a group of several examples: the cache's size

Example = tuple[int, int, int, int]  # first query, number of queries, first key, number of keys


@dataclass(frozen=True)
class AttentionPlan:
    """The examples of a flat row, for every layer of one forward."""

    own: list[Example]  # self-attention
    across: list[Example] | None = None  # cross-attention, decoder to encoder; None without one

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return max(n for _, n, _, _ in self.own)

    @cached_property
    def causal_groups(self) -> _Groups:
        """`own` by groups of like length, for a causal mask."""
        return _groups_of(self.own, causal=True)

    @cached_property
    def groups(self) -> _Groups:
        """`own` by groups of like length."""
        return _groups_of(self.own, causal=False)

    @cached_property
    def across_groups(self) -> _Groups:
        """`across` by groups of like length."""
        return _groups_of(self.across or [], causal=False)


@dataclass(frozen=True)
class _Side:
    """The queries, or the keys, of a group."""

    length: int  # t or s
    where: Tensor  # [G * length] token at each place; at padding some token of the group
    padding: Tensor | None  # [p] the places of padding; None where there are none

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int]) -> _Side:
        longest = rounded(max(lengths))
        first, count = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
        place = torch.arange(longest)[None]
        where = (first + torch.minimum(place, count - 1)).view(-1)
        if min(lengths) == longest:
            return cls(longest, where, None)
        return cls(longest, where, (place >= count).view(-1).nonzero().squeeze(1))

    def stacked(self, tokens: Tensor, *, zeros: bool = False) -> Tensor:
        """[N, H, d] -> [H, G, length, d], perhaps with zeros at padding."""
        taken = tokens.reshape(len(tokens), -1).index_select(0, self.where)
        if zeros and self.padding is not None:
            taken.index_fill_(0, self.padding, 0.0)
        by_example = taken.view(-1, self.length, *tokens.shape[1:])
        return by_example.permute(2, 0, 1, 3).contiguous()

    def unstack(self, stacked: Tensor, out: Tensor) -> None:
        """[H, G, length, d] -> `out` [G * length, H * d]."""
        heads, _, length, size = stacked.shape
        out.view(-1, length, heads, size).copy_(stacked.permute(1, 2, 0, 3))


@dataclass(frozen=True)
class _Places:
    """Places of tokens among those of all groups, one group's after the other's.

    They are put back by one gather: `index_copy_` for each group takes ten times as long (torch
    2.13).
    """

    sizes: list[int]  # places of each group
    of_token: Tensor  # [N] place of each token; of one of no example the last, whose row is zero

    @classmethod
    def of(cls, sides: Sequence[_Side]) -> _Places:
        sizes = [len(side.where) for side in sides]
        where = torch.cat([side.where for side in sides])
        real = torch.ones(len(where), dtype=torch.bool)
        for side, part in zip(sides, torch.split(real, sizes), strict=True):
            if side.padding is not None:
                part[side.padding] = False
        places = real.nonzero().squeeze(1)
        of_token = torch.full((int(where.max()) + 1,), len(where))
        of_token[where[places]] = places
        return cls(sizes, of_token)

    def room(self, like: Tensor, width: int) -> tuple[Tensor, Sequence[Tensor]]:
        """A row of `width` for each place and one of zeros, and each group's part of them."""
        rows = like.new_empty(sum(self.sizes) + 1, width)
        rows[-1] = 0.0
        return rows, torch.split(rows[:-1], self.sizes)

    def tokens(self, rows: Tensor, n: int) -> Tensor:
        """[places + 1, width] -> [n, width], n tokens."""
        beyond = n - len(self.of_token)
        order = functional.pad(self.of_token, (0, beyond), value=len(rows) - 1)
        return rows.index_select(0, order)


@dataclass(frozen=True)
class _Group:
    """Examples of like length; in self-attention queries and keys are one object."""

    queries: _Side
    keys: _Side
    masked: Tensor | None  # [G, 1, s] bfloat16, -inf at padded keys, else 0; None: nothing to hide


@dataclass(frozen=True)
class _Groups:
    """Groups of all examples of a batch, and the places of their queries and keys."""

    each: list[_Group]
    queries: _Places
    keys: _Places


def _groups_of(examples: Sequence[Example], *, causal: bool) -> _Groups:
    """Groups of examples; `causal`: a mask will hide padded keys, and queries are the keys."""
    each = [_group(part, causal=causal) for part in _alike(examples)]
    queries = _Places.of([group.queries for group in each])
    alone = all(group.queries is group.keys for group in each)
    return _Groups(each, queries, queries if alone else _Places.of([g.keys for g in each]))


def rounded(length: int) -> int:
    """A length rounded up to a multiple of `MULTIPLE`: 33 to 64, 64 to 64."""
    return -(-length // MULTIPLE) * MULTIPLE


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


def _group(part: Sequence[Example], *, causal: bool) -> _Group:
    first, queries, first_key, keys = zip(*part, strict=True)
    own = _Side.of(first, queries)
    if causal:
        return _Group(own, own, None)
    others = own if (first, queries) == (first_key, keys) else _Side.of(first_key, keys)
    if others.padding is None:
        return _Group(own, others, None)
    hidden = torch.arange(others.length)[None] >= torch.tensor(keys)[:, None]
    masked = torch.zeros(hidden.shape, dtype=torch.bfloat16).masked_fill_(hidden, -torch.inf)
    return _Group(own, others, masked[:, None])


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
    """softmax(scale * q @ k.T + bias) @ v within each example of a flat row, [N, H, d].

    `packed` is [N, 3 * H, d] in bfloat16, the heads' queries, keys and values; in cross-attention
    [N, H, d], the queries alone, beside `others` [M, 2 * H, d]. The module says whether later keys
    are hidden. The bias [1, H, T, S] is added to each example's scores from its first token on; in
    cross-attention, where T5 has none, it is not read.
    """
    causal = bool(module.is_causal) and others is None
    groups = plan.causal_groups if causal else plan.groups if others is None else plan.across_groups
    added = None if bias is None or others is not None else bias[0]
    output: Tensor = _GroupedAttention.apply(  # type: ignore[no-untyped-call]
        packed, others, added, groups, causal, scale, dropout, next_keys(module, dropout)
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
        added = _added(bias, causal=causal)
        rows, parts = groups.queries.room(packed, heads * size)
        kept: list[Tensor] = []
        for group, part in zip(groups.each, parts, strict=True):
            own = group.queries.stacked(packed)  # queries [H, G, t, d], keys, values [H, G, s, d]
            across = () if others is None else group.keys.stacked(others).chunk(2)
            q, k, v = (own, *across) if across else own.chunk(3)
            scores = _scores(q, k, _start(group, added, causal=causal), scale)
            # In place: the kernel is done with a row's scores when it writes the row.
            shares = torch.softmax(scores, -1, out=scores)
            kept += [q, k, v, shares]
            if dropout > 0.0:
                queries = None
                if keys is not None:
                    queries = by_head(keys.view(-1)[group.queries.where], heads)
                    queries = queries.view(shares.shape[:2])
                kept.append(keep_mask(shares, dropout, queries))
                shares = shares * kept[-1]
            group.queries.unstack(torch.bmm(shares, v.flatten(0, 1)).view(q.shape), part)
        ctx.save_for_backward(*kept)
        ctx.groups, ctx.scale, ctx.dropped = groups, scale, dropout > 0.0
        ctx.shapes = (packed.shape, None if others is None else others.shape)
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return groups.queries.tokens(rows, n).view(n, heads, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        groups, (own, across) = ctx.groups, ctx.shapes
        wants_bias = ctx.bias is not None and ctx.needs_input_grad[2]
        of_bias = torch.zeros(ctx.bias[0], dtype=torch.float32) if wants_bias else None
        rows, parts = groups.queries.room(grads[0], own[1] * own[2])
        other_rows = None
        other_parts: Sequence[Tensor | None] = [None] * len(parts)
        if across is not None:
            other_rows, other_parts = groups.keys.room(grads[0], across[1] * across[2])
        saved = iter(ctx.saved_tensors)
        for group, part, other in zip(groups.each, parts, other_parts, strict=True):
            q, k, v, shares = (next(saved) for _ in range(4))
            keep = next(saved) if ctx.dropped else None
            slope = group.queries.stacked(grads[0], zeros=True).flatten(0, 1)
            used = shares if keep is None else shares * keep
            # One tensor for the gradients of what was stacked as one.
            sizes = [len(q), len(k), len(v)]
            both = k.new_empty(sum(sizes) if other is None else sum(sizes[1:]), *k.shape[1:])
            of_q = both[: len(q)] if other is None else torch.empty_like(q)
            of_k, of_v = both[-2 * len(k) : -len(k)], both[-len(k) :]
            _product(used.transpose(1, 2), slope, 1.0, out=of_v)
            inner = torch.bmm(slope, v.flatten(0, 1).transpose(1, 2))
            if keep is not None:
                inner = inner.mul_(keep)
            # The softmax's gradient: p * (g - sum(p * g)), in one pass.
            inner = torch._softmax_backward_data(inner, shares, -1, shares.dtype)  # noqa: SLF001
            if of_bias is not None:
                t, s = (min(n, m) for n, m in zip(inner.shape[1:], ctx.bias[0][1:], strict=True))
                each = inner.view(len(q), -1, *inner.shape[1:])[:, :, :t, :s]
                # One by one: torch's sum over the examples takes four times as long.
                for one in each.unbind(1):
                    of_bias[:, :t, :s] += one
            _product(inner, k.flatten(0, 1), ctx.scale, out=of_q)
            _product(inner.transpose(1, 2), q.flatten(0, 1), ctx.scale, out=of_k)
            if other is None:
                group.queries.unstack(both, part)
            else:
                group.queries.unstack(of_q, part)
                group.keys.unstack(both, other)
        of_packed = groups.queries.tokens(rows, own[0]).view(own)
        of_others = None
        if other_rows is not None:
            of_others = groups.keys.tokens(other_rows, across[0]).view(across)
        if of_bias is not None:
            of_bias = of_bias.to(ctx.bias[1])
        return of_packed, of_others, of_bias, None, None, None, None, None


def _added(bias: Tensor | None, *, causal: bool) -> Tensor | None:
    """Bias and causal mask [H, T, S] in bfloat16, as long as a group may be; None without bias."""
    if bias is None:
        return None
    height, width = bias.shape[1:]
    room = (0, rounded(width) - width, 0, rounded(height) - height)  # what stands there is not read
    added = functional.pad(bias.to(torch.bfloat16), room)
    return added + causal_mask(added.shape[1]) if causal else added


def _start(group: _Group, added: Tensor | None, *, causal: bool) -> Tensor | None:
    """Initial scores of a group: broadcastable to [H, G, t, s], or None for nothing."""
    t, s = group.queries.length, group.keys.length
    if added is None:
        if group.masked is not None:
            return group.masked
        return causal_mask(t) if causal else None
    part = added[:, None, :t, :s]
    return part if group.masked is None else part + group.masked


def _scores(q: Tensor, k: Tensor, start: Tensor | None, scale: float) -> Tensor:
    """[H * G, t, s]: `start` plus scale * q @ k.T."""
    queries, keys = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)
    if start is None:
        scores = torch.bmm(queries, keys)
        return scores if scale == 1.0 else scores.mul_(scale)  # T5 has none
    scores = queries.new_empty(*queries.shape[:2], keys.shape[2])
    scores.view(*q.shape[:3], -1).copy_(start)
    return torch.baddbmm(scores, queries, keys, alpha=scale, out=scores)


def _product(left: Tensor, right: Tensor, scale: float, *, out: Tensor) -> None:
    """Into `out` [H, G, ...]: scale * left @ right."""
    flat = out.flatten(0, 1)
    torch.baddbmm(flat, left, right, beta=0.0, alpha=scale, out=flat)


@lru_cache(maxsize=64)
def causal_mask(length: int) -> Tensor:
    """[length, length] bfloat16, -inf above the diagonal, else 0."""
    return torch.full((length, length), -torch.inf, dtype=torch.bfloat16).triu_(1)
