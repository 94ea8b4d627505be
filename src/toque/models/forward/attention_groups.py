"""Examples of like length in groups, so that a whole group's attention is one batched product.

The examples of a group are padded to one length and stacked. Padded queries attend to real keys,
nobody reads what they get, and their gradient is zero. Padded keys stand after the real ones, where
a causal mask hides them from real queries; without one they are masked.

Letters: N tokens, H heads, d head size; of a group: G examples, t and s its longest queries, keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

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
        padding: [p] the places of padding; None where there are none.
    """

    length: int
    where: Tensor
    padding: Tensor | None

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int]) -> Side:
        """Of examples of these first tokens and lengths."""
        longest = rounded(max(lengths))
        first, count = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
        place = torch.arange(longest)[None]
        where = (first + torch.minimum(place, count - 1)).view(-1)
        if min(lengths) == longest:
            return cls(longest, where, None)
        return cls(longest, where, (place >= count).view(-1).nonzero().squeeze(1))

    def stacked(self, tokens: Tensor) -> Tensor:
        """[N, H, d] -> [H, G, length, d]."""
        return self._heads_first(tokens, self._taken(tokens))

    def stacked_gradient(self, tokens: Tensor) -> Tensor:
        """`stacked`, with zeros at padding."""
        taken = self._taken(tokens)
        if self.padding is not None:
            taken.index_fill_(0, self.padding, 0.0)
        return self._heads_first(tokens, taken)

    def unstack(self, stacked: Tensor, out: Tensor) -> None:
        """[H, G, length, d] -> `out` [G * length, H * d]."""
        heads, _, length, size = stacked.shape
        out.view(-1, length, heads, size).copy_(stacked.permute(1, 2, 0, 3))

    def _taken(self, tokens: Tensor) -> Tensor:
        return tokens.reshape(len(tokens), -1).index_select(0, self.where)

    def _heads_first(self, tokens: Tensor, taken: Tensor) -> Tensor:
        by_example = taken.view(-1, self.length, *tokens.shape[1:])
        return by_example.permute(2, 0, 1, 3).contiguous()


@dataclass(frozen=True)
class Places:
    """Where tokens stand among the places of all groups, one group's after the other's.

    What all groups computed is put back by one gather: `index_copy_` for each group takes ten times
    as long as `index_select` (torch 2.13).

    Attributes:
        sizes: Places of each group.
        of_token: [N] the place of each token; the one after all places, whose row is zero, for
            tokens of no example.
    """

    sizes: list[int]
    of_token: Tensor

    @classmethod
    def of(cls, sides: Sequence[Side]) -> Places:
        """Of all groups' queries, or keys."""
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
class Group:
    """Examples of like length.

    Attributes:
        queries: Their queries.
        keys: Their keys; the same object in self-attention.
        masked: [G, 1, s] bfloat16, -inf at padded keys, else 0; None where nothing is to be hidden.
    """

    queries: Side
    keys: Side
    masked: Tensor | None


@dataclass(frozen=True)
class Groups:
    """All examples of a batch.

    Attributes:
        each: The groups.
        queries: Where queries stand.
        keys: Where keys do; the same object in self-attention.
    """

    each: list[Group]
    queries: Places
    keys: Places


def groups_of(examples: Sequence[Example], *, causal: bool) -> Groups:
    """The groups of a batch's examples, at least one.

    Args:
        examples: Of one flat row of tokens.
        causal: A causal mask will hide padded keys; queries and keys are the same tokens.
    """
    each = [_group(part, causal=causal) for part in _alike(examples)]
    queries = Places.of([group.queries for group in each])
    alone = all(group.queries is group.keys for group in each)
    return Groups(each, queries, queries if alone else Places.of([g.keys for g in each]))


def rounded(length: int) -> int:
    """Up to a multiple.

    >>> rounded(33), rounded(64)
    (64, 64)
    """
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


def _group(part: Sequence[Example], *, causal: bool) -> Group:
    first, queries, first_key, keys = zip(*part, strict=True)
    own = Side.of(first, queries)
    if causal:
        return Group(own, own, None)
    others = own if (first, queries) == (first_key, keys) else Side.of(first_key, keys)
    if others.padding is None:
        return Group(own, others, None)
    hidden = torch.arange(others.length)[None] >= torch.tensor(keys)[:, None]
    masked = torch.zeros(hidden.shape, dtype=torch.bfloat16).masked_fill_(hidden, -torch.inf)
    return Group(own, others, masked[:, None])
