"""Attention of one token a row on a CPU, as gathered sums.

A decoding step reads every key and every value once, so its attention can be as fast as reading is.
Batched products are not: with one query a head, torch's libraries take three times as long, and
oneDNN makes new code for every length of the window. `embedding_bag`, which torch has for other
purposes, does just the reading: it sums chosen rows of a table, each times a weight, in float32
whatever the table's precision, and rounds the sum once. The values are such a table, the softmax
the weights; with the keys of 32 columns side by side (`Tiles`), so are they, and the query is the
weights. A row of the cache reads its own tiles, however long its neighbours are.

The cache is float16: half of float32's bytes, and an eighth of bfloat16's rounding. Its range, up
to 65,504, is far above what the norms before keys and values leave. Keys and values of 96 rows, 6
heads, 128 columns of 64, one thread of a Zen 5: 0.71 ms, in float32 1.3 ms, as products 4.0 ms
(two threads).

Letters as in `kv_cache.py`: R rows, n of them, H key-value heads, G query heads of each, W columns
of the buffer, K of the window, d head size, T columns of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from toque.models.generation.cache_buffers import TILE, whole_tiles

DTYPE: Final = torch.float16
"""Precision of the keys and values."""
MOST_EMPTY_COLUMNS: Final = 16384
"""Columns that no row reads, which rows attending together may have before they are split.

Each costs a pass of the softmax, another call about ten operators. With 4,096 or 100,000 steps of
96 texts took 2 to 3 % longer (GPT-2 and T5 mini, two Zen 5 cores).
"""
_MOST_INT32: Final = (1 << 31) - 1


def can_gather(device: torch.device) -> bool:
    """True if attention is gathered here: where torch's gathered sums are AVX-512 code."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"


@dataclass(frozen=True)
class _Reads:
    """Places that the two sums read: U tiles, over all rows and query heads."""

    key_rows: Tensor
    """[U * d] rows of the keys' table [R * W / T * H * d, T], in the order of memory."""
    key_ends: Tensor
    """[U + 2] where each tile's part of `key_rows` begins; a last one is empty, its sum zero."""
    queries: Tensor
    """[U] the query of each tile, in that order."""
    scores: Tensor
    """[n * H * G * K / T] the sum that stands in each place; the empty one where none was read."""
    value_rows: Tensor
    """[U * T] rows of the values' table [R * W / T * H * T, d]."""
    value_ends: Tensor
    """[n * H * G + 1] where each query's part of `value_rows` begins."""
    shares: Tensor
    """[U] the place of each part of `value_rows` among [n * H * G * K / T]."""


class Gather:
    """The columns that some rows of a cache read at a step; one serves all layers.

    Args:
        rows: Of the buffer.
        columns: Of the window; `self.columns` are those of all tiles that they touch.
        used: Of each of those rows, the columns it reads; others of their tiles are masked.
    """

    def __init__(self, rows: slice, columns: slice, used: Sequence[slice]) -> None:
        self.rows, self.columns = rows, whole_tiles(columns)
        self.tiles = [whole_tiles(part) for part in used]
        self._reads: _Reads | None = None

    def reads_as(self, other: Gather) -> bool:
        """True if both read the same tiles, as most steps do that follow each other."""
        mine, its = ((each.rows, each.columns, each.tiles) for each in (self, other))
        return mine == its

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """softmax(scale * q @ k.T + mask) @ v, [n, H * G * d].

        Args:
            query: [n, H * G, d] float32; the query heads of one key-value head are neighbours.
            keys: The buffer [R, W / T, H, d, T] in DTYPE.
            values: The buffer [R, W / T, H, T, d] in DTYPE.
            mask: Added to the scores, [n or 1, H or 1, 1, K] float32; -inf where a row's tiles
                hold columns that it does not read, and where it has no tile. None for nothing.
            scale: Of the products.
        """
        heads, size = keys.shape[2:4]
        n, n_queries = query.shape[:2]
        if self._reads is None:
            self._reads = self._places(heads, n_queries // heads, keys)
        reads = self._reads
        asked = (query * scale).to(DTYPE).view(-1, size).index_select(0, reads.queries)
        products = _sums(keys.view(-1, TILE), reads.key_rows, reads.key_ends, asked)
        scores = products.index_select(0, reads.scores).view(n, heads, n_queries // heads, -1)
        scores = scores.float()
        if mask is not None:
            scores = scores.add_(mask)
        shares = scores.softmax(-1).to(DTYPE).view(-1, TILE).index_select(0, reads.shares)
        seen = _sums(values.view(-1, size), reads.value_rows, reads.value_ends, shares)
        return seen.view(n, -1).to(query.dtype)

    def _places(self, heads: int, group: int, keys: Tensor) -> _Reads:
        _, wide, _, size, _ = keys.shape
        kind = torch.int32 if keys.numel() // min(TILE, size) <= _MOST_INT32 else torch.int64
        tile = torch.arange(self.columns.start // TILE, self.columns.stop // TILE)
        bounds = torch.tensor([[part.start, part.stop] for part in self.tiles]) // TILE
        used = (tile >= bounds[:, :1]) & (tile < bounds[:, 1:])
        row = torch.arange(self.rows.start, self.rows.stop)[:, None, None, None]
        of_cache = (row * wide + tile[:, None, None]) * heads + torch.arange(heads)[:, None]
        of_cache = of_cache.to(kind).expand(-1, -1, -1, group)  # [n, K / T, H, G]
        places = torch.arange(of_cache.numel()).view(len(used), heads, group, len(tile))
        in_memory = places.permute(0, 3, 1, 2)[used].view(-1)
        scores = torch.full((of_cache.numel(),), len(in_memory))
        scores[in_memory] = torch.arange(len(in_memory))
        by_query = used[:, None, None].expand_as(places)
        keys_read = of_cache[used].view(-1, 1) * size + torch.arange(size, dtype=kind)
        values_read = of_cache.permute(0, 2, 3, 1)[by_query].view(-1, 1) * TILE
        values_read = values_read + torch.arange(TILE, dtype=kind)
        sizes = torch.full((len(in_memory) + 1,), size)
        sizes[-1] = 0
        counts = used.sum(1).repeat_interleave(heads * group)
        return _Reads(
            key_rows=keys_read.view(-1),
            key_ends=_ends(sizes, kind),
            queries=in_memory // len(tile),
            scores=scores,
            value_rows=values_read.view(-1),
            value_ends=_ends(counts * TILE, kind),
            shares=places[by_query],
        )


def _ends(lengths: Tensor, kind: torch.dtype) -> Tensor:
    """0 and the running sum."""
    return functional.pad(lengths.cumsum(0), (1, 0)).to(kind)


def _sums(table: Tensor, rows: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of a table's rows, one between each two ends."""
    return functional.embedding_bag(
        rows,
        table,
        ends,
        mode="sum",
        per_sample_weights=weights.view(-1),
        include_last_offset=True,
    )
