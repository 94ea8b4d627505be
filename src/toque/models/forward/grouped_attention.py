"""Attention for packed rows in bfloat16 on a CPU, by groups of examples of similar length.

Attention for one example at a time needs thousands of small matmuls for a batch of short texts.
PyTorch's fused attention kernel is far slower in bfloat16 than its matmuls. Here each matmul of
attention is one batched matmul per group. The matmul of queries and keys also adds the masks and
T5's bias. The softmax reads and writes 16 bits and computes in float32. Scores are therefore read
and written three times instead of nine.

The examples of a group are padded to one length and stacked. The output of padded queries is not
used, and their gradient is zero. Padded keys come after the real keys: a causal mask hides them
from real queries, and without a causal mask they are masked.

Letters: N tokens, H heads, d head size. In a group: G examples, t and s the numbers of queries and
    keys of the longest example.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from toque.models.forward.keyed_dropout import keep_mask, keys_by_head, next_keys

# Lengths are padded to a multiple, so that matmuls have few shapes and kernels entire tiles.
MULTIPLE = 32
# Largest ratio of computed to real scores in a group. Above it, two groups are faster.
MAX_PADDED = 1.3
# Maximum number of scores of one head in a group of several examples. They fit into the cache.
MAX_SCORES = 1 << 19

# First query, number of queries, first key, number of keys.
Example = tuple[int, int, int, int]


@dataclass(frozen=True)
class AttentionPlan:
    """Examples of a flat row, for every layer of one forward."""

    self_attention: list[Example]
    # From decoder to encoder, if there is cross-attention.
    cross_attention: list[Example] | None = None

    @property
    def longest(self) -> int:
        """Length of the longest example, in tokens."""
        return max(n for _, n, _, _ in self.self_attention)

    @cached_property
    def causal_groups(self) -> _Groups:
        """Groups of `self_attention` by length, for a causal mask."""
        return _build_groups(self.self_attention, causal=True)

    @cached_property
    def groups(self) -> _Groups:
        """Groups of `self_attention` by length."""
        return _build_groups(self.self_attention, causal=False)

    @cached_property
    def cross_groups(self) -> _Groups:
        """Groups of `cross_attention` by length."""
        return _build_groups(self.cross_attention or [], causal=False)


@dataclass(frozen=True)
class _Side:
    """Queries or keys of a group."""

    length: int  # t or s
    token_indices: (
        Tensor  # [G * length] token at each position; at padding, any of its example
    )
    padding: Tensor | None  # [p] positions of padding, if there are any

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int]) -> _Side:
        """Build a side from the first token and the number of tokens of each example."""
        longest = round_up(max(lengths))
        first = torch.tensor(starts)[:, None]
        count = torch.tensor(lengths)[:, None]
        position = torch.arange(longest)[None]
        token_indices = (first + torch.minimum(position, count - 1)).view(-1)
        if min(lengths) == longest:
            return cls(longest, token_indices, None)
        padding = (position >= count).view(-1).nonzero().squeeze(1)
        return cls(longest, token_indices, padding)

    def stack(self, tokens: Tensor, *, zeros: bool = False) -> Tensor:
        """Stack [N, H, d] to [H, G, length, d]. With `zeros`, padding is zero."""
        rows = tokens.reshape(len(tokens), -1).index_select(0, self.token_indices)
        if zeros and self.padding is not None:
            rows.index_fill_(0, self.padding, 0.0)
        by_example = rows.view(-1, self.length, *tokens.shape[1:])
        return by_example.permute(2, 0, 1, 3).contiguous()

    def unstack(self, stacked: Tensor, out: Tensor) -> None:
        """Copy [H, G, length, d] to `out` [G * length, H * d]."""
        heads, _, length, size = stacked.shape
        out.view(-1, length, heads, size).copy_(stacked.permute(1, 2, 0, 3))


@dataclass(frozen=True)
class _StackedPositions:
    """Position of each token in a tensor that concatenates the stacks of all groups.

    One gather restores the order of the tokens. An `index_copy_` per group takes ten times as long
    (torch 2.13).
    """

    sizes: list[int]  # positions of each group
    # [N] position of each token; for tokens outside of examples the last position, a row of zeros
    of_token: Tensor

    @classmethod
    def of(cls, sides: Sequence[_Side]) -> _StackedPositions:
        """Number the positions of several groups consecutively."""
        sizes = [len(side.token_indices) for side in sides]
        token_indices = torch.cat([side.token_indices for side in sides])
        is_real = torch.ones(len(token_indices), dtype=torch.bool)
        for side, part in zip(sides, torch.split(is_real, sizes), strict=True):
            if side.padding is not None:
                part[side.padding] = False

        positions = is_real.nonzero().squeeze(1)
        n_tokens = int(token_indices.max()) + 1
        of_token = torch.full((n_tokens,), len(token_indices))
        of_token[token_indices[positions]] = positions
        return cls(sizes, of_token)

    def allocate(self, like: Tensor, width: int) -> tuple[Tensor, Sequence[Tensor]]:
        """Allocate [positions + 1, width] with a last row of zeros. Return it and group views."""
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
    # [G, 1, s] bfloat16: -inf at padded keys, else 0. None without padded keys to mask.
    padding_mask: Tensor | None


@dataclass(frozen=True)
class _Groups:
    """Groups of all examples in a batch, and the positions of their queries and keys."""

    groups: list[_Group]
    queries: _StackedPositions
    keys: _StackedPositions


def _build_groups(examples: Sequence[Example], *, causal: bool) -> _Groups:
    """Group examples by length. A causal mask also hides padded keys."""
    parts = _split_by_length(examples)
    groups = [_build_group(part, causal=causal) for part in parts]
    queries = keys = _StackedPositions.of([group.queries for group in groups])
    if any(group.queries is not group.keys for group in groups):
        keys = _StackedPositions.of([group.keys for group in groups])
    return _Groups(groups, queries, keys)


def round_up(length: int) -> int:
    """Round a length up to a multiple of `MULTIPLE`: 33 to 64, 64 to 64."""
    return -(-length // MULTIPLE) * MULTIPLE


def _split_by_length(examples: Sequence[Example]) -> Iterator[list[Example]]:
    """Sort examples by descending length. Begin a new part before padding or size is too large."""
    part: list[Example] = []
    real_scores = longest_queries = longest_keys = 0
    for example in sorted(examples, key=lambda e: (-e[1], -e[3], e[0])):
        _, queries, _, keys = example
        widest = max(longest_keys, keys)
        # The examples are sorted by queries, so the first example of a part has the most.
        padded_scores = (len(part) + 1) * longest_queries * widest
        padding_limit = MAX_PADDED * (real_scores + queries * keys)
        if part and (padded_scores > padding_limit or padded_scores > MAX_SCORES):
            yield part
            part = []
            real_scores = longest_queries = longest_keys = 0
        part.append(example)
        real_scores += queries * keys
        longest_queries = max(longest_queries, queries)
        longest_keys = max(longest_keys, keys)
    if part:
        yield part


def _build_group(part: Sequence[Example], *, causal: bool) -> _Group:
    first_query, n_queries, first_key, n_keys = zip(*part, strict=True)
    queries = _Side.of(first_query, n_queries)
    if causal:  # only self-attention is causal
        return _Group(queries, queries, None)

    is_self_attention = (first_query, n_queries) == (first_key, n_keys)
    keys = queries if is_self_attention else _Side.of(first_key, n_keys)
    if keys.padding is None:
        return _Group(queries, keys, None)
    is_padding = torch.arange(keys.length)[None] >= torch.tensor(n_keys)[:, None]
    mask = torch.zeros(is_padding.shape, dtype=torch.bfloat16)
    mask.masked_fill_(is_padding, -torch.inf)
    return _Group(queries, keys, mask[:, None])


def attend_packed(
    module: nn.Module,
    packed: Tensor,
    cross_kv: Tensor | None,
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
        cross_kv: [M, 2 * H, d], keys and values for cross-attention.
        plan: Examples of the row.
        scale: Factor of the scores.
        dropout: Probability that an attention weight is dropped.
        bias: [1, H, T, S], added to the scores of each example from its first token. Ignored for
            cross-attention, which has no bias in T5.
    """
    causal = bool(module.is_causal) and cross_kv is None
    if cross_kv is not None:
        groups = plan.cross_groups
    else:
        groups = plan.causal_groups if causal else plan.groups
    own_bias = None if bias is None or cross_kv is not None else bias[0]
    output: Tensor = _GroupedAttention.apply(  # type: ignore[no-untyped-call]
        packed,
        cross_kv,
        own_bias,
        groups,
        causal,
        scale,
        dropout,
        next_keys(module, dropout),
    )
    return output


class _GroupedAttention(torch.autograd.Function):
    """Attention of all groups of a flat row, with the arguments of `attend_packed`."""

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        cross_kv: Tensor | None,
        bias: Tensor | None,
        groups: _Groups,
        causal: bool,  # noqa: FBT001  # autograd functions take arguments by position
        scale: float,
        dropout: float,
        keys: Tensor | None,
    ) -> Tensor:
        n, width, size = packed.shape
        heads = width if cross_kv is not None else width // 3
        added = _bias_and_mask(bias, causal=causal)
        rows, parts = groups.queries.allocate(packed, heads * size)

        saved: list[Tensor] = []
        for group, part in zip(groups.groups, parts, strict=True):
            # Queries are [H, G, t, d], keys and values [H, G, s, d].
            stacked = group.queries.stack(packed)
            if cross_kv is None:
                q, k, v = stacked.chunk(3)
            else:
                q = stacked
                k, v = group.keys.stack(cross_kv).chunk(2)

            initial = _initial_scores(group, added, causal=causal)
            scores = _scores(q, k, initial, scale)
            # In place: the kernel has read a row's scores before it writes the row.
            weights = torch.softmax(scores, -1, out=scores)
            saved += [q, k, v, weights]

            if dropout > 0.0:
                keep = _keep_mask(group, weights, dropout, keys, heads)
                saved.append(keep)
                weights = weights * keep

            output = torch.bmm(weights, v.flatten(0, 1)).view(q.shape)
            group.queries.unstack(output, part)

        ctx.save_for_backward(*saved)
        ctx.groups, ctx.scale = groups, scale
        ctx.dropped = dropout > 0.0
        ctx.shapes = (packed.shape, None if cross_kv is None else cross_kv.shape)
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return groups.queries.gather(rows, n).view(n, heads, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        groups, (packed_shape, cross_shape) = ctx.groups, ctx.shapes
        needs_bias = ctx.bias is not None and ctx.needs_input_grad[2]
        grad_bias = None
        if needs_bias:
            grad_bias = torch.zeros(ctx.bias[0], dtype=torch.float32)
        packed_width = packed_shape[1] * packed_shape[2]
        rows, parts = groups.queries.allocate(grads[0], packed_width)
        cross_rows = None
        cross_parts: Sequence[Tensor | None] = list(itertools.repeat(None, len(parts)))
        if cross_shape is not None:
            cross_width = cross_shape[1] * cross_shape[2]
            cross_rows, cross_parts = groups.keys.allocate(grads[0], cross_width)

        saved = iter(ctx.saved_tensors)
        for group, part, cross in zip(groups.groups, parts, cross_parts, strict=True):
            q, k, v, weights = (next(saved) for _ in range(4))
            keep = next(saved) if ctx.dropped else None
            grad_output = group.queries.stack(grads[0], zeros=True).flatten(0, 1)
            joint, grad_q, grad_k, grad_v = _allocate_gradients(
                q, k, cross=cross is not None
            )

            final_weights = weights if keep is None else weights * keep
            _multiply_into(final_weights.transpose(1, 2), grad_output, 1.0, out=grad_v)
            grad_scores = _score_gradient(grad_output, v, weights, keep)
            if grad_bias is not None:
                _add_bias_gradient(grad_bias, grad_scores)
            flat_q, flat_k = q.flatten(0, 1), k.flatten(0, 1)
            _multiply_into(grad_scores, flat_k, ctx.scale, out=grad_q)
            _multiply_into(grad_scores.transpose(1, 2), flat_q, ctx.scale, out=grad_k)

            if cross is None:
                group.queries.unstack(joint, part)
            else:
                group.queries.unstack(grad_q, part)
                group.keys.unstack(joint, cross)

        grad_packed = groups.queries.gather(rows, packed_shape[0]).view(packed_shape)
        grad_cross = None
        if cross_rows is not None:
            grad_cross = groups.keys.gather(cross_rows, cross_shape[0])
            grad_cross = grad_cross.view(cross_shape)
        if grad_bias is not None:
            grad_bias = grad_bias.to(ctx.bias[1])
        return grad_packed, grad_cross, grad_bias, None, None, None, None, None


def _keep_mask(
    group: _Group, weights: Tensor, dropout: float, keys: Tensor | None, heads: int
) -> Tensor:
    """Build the dropout factors of a group's attention weights, by the keys of its queries."""
    query_keys = None
    if keys is not None:
        keys_in_group = keys.view(-1)[group.queries.token_indices]
        query_keys = keys_by_head(keys_in_group, heads).view(weights.shape[:2])
    return keep_mask(weights, dropout, query_keys)


def _allocate_gradients(
    q: Tensor, k: Tensor, *, cross: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate a joint tensor, and the gradients of q, k and v as views.

    Tensors that were stacked together have their gradients in the joint tensor: q, k and v in
    self-attention, k and v in cross-attention.
    """
    n = len(k)
    joint = k.new_empty(2 * n if cross else len(q) + 2 * n, *k.shape[1:])
    grad_q = torch.empty_like(q) if cross else joint[: len(q)]
    return joint, grad_q, joint[-2 * n : -n], joint[-n:]


def _score_gradient(
    grad_output: Tensor, v: Tensor, weights: Tensor, keep: Tensor | None
) -> Tensor:
    """Compute the gradient of the scores, [H * G, t, s]."""
    gradient = torch.bmm(grad_output, v.flatten(0, 1).transpose(1, 2))
    if keep is not None:
        gradient = gradient.mul_(keep)
    # The gradient of softmax in one pass: p * (g - sum(p * g)).
    return torch._softmax_backward_data(gradient, weights, -1, weights.dtype)  # noqa: SLF001


def _add_bias_gradient(grad_bias: Tensor, grad_scores: Tensor) -> None:
    """Add the gradient [H * G, t, s] of a group's scores to the gradient [H, T, S] of the bias."""
    heads, height, width = grad_bias.shape
    t = min(grad_scores.shape[1], height)
    s = min(grad_scores.shape[2], width)
    by_example = grad_scores.view(heads, -1, *grad_scores.shape[1:])[:, :, :t, :s]
    # torch's sum over the examples takes four times as long.
    for example in by_example.unbind(1):
        grad_bias[:, :t, :s] += example


def _bias_and_mask(bias: Tensor | None, *, causal: bool) -> Tensor | None:
    """Add bias and causal mask, [H, T, S] in bfloat16, padded for any group; None without bias."""
    if bias is None:
        return None
    height, width = bias.shape[1:]
    # The padded scores are not used.
    padding = (0, round_up(width) - width, 0, round_up(height) - height)
    added = functional.pad(bias.to(torch.bfloat16), padding)
    return added + causal_mask(added.shape[1]) if causal else added


def _initial_scores(
    group: _Group, bias_and_mask: Tensor | None, *, causal: bool
) -> Tensor | None:
    """Return the initial scores of a group, broadcastable to [H, G, t, s]; None for zeros."""
    t, s = group.queries.length, group.keys.length
    if bias_and_mask is None:
        if group.padding_mask is not None:
            return group.padding_mask
        return causal_mask(t) if causal else None
    initial = bias_and_mask[:, None, :t, :s]
    return initial if group.padding_mask is None else initial + group.padding_mask


def _scores(q: Tensor, k: Tensor, initial: Tensor | None, scale: float) -> Tensor:
    """Compute `initial` + scale * q @ k.T, [H * G, t, s]."""
    queries, keys = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)
    if initial is None:
        scores = torch.bmm(queries, keys)
        return scores if scale == 1.0 else scores.mul_(scale)  # T5 does not scale
    scores = queries.new_empty(*queries.shape[:2], keys.shape[2])
    scores.view(*q.shape[:3], -1).copy_(initial)
    return torch.baddbmm(scores, queries, keys, alpha=scale, out=scores)


def _multiply_into(left: Tensor, right: Tensor, scale: float, *, out: Tensor) -> None:
    """Write scale * left @ right to `out` [H, G, ...]."""
    flat = out.flatten(0, 1)
    torch.baddbmm(flat, left, right, beta=0.0, alpha=scale, out=flat)


@lru_cache(maxsize=64)
def causal_mask(length: int) -> Tensor:
    """Build a mask [length, length] in bfloat16: -inf above the diagonal, else 0."""
    return torch.full((length, length), -torch.inf, dtype=torch.bfloat16).triu_(1)
