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
"""Of the keys and values."""
MOST_EMPTY_COLUMNS: Final = 4096
"""Columns that no row reads, which rows attending together may have before they are split.

A guess: each costs a pass of the softmax, about 10 ns for 6 heads, and another call about 50 us.
"""
_MOST_INT32: Final = (1 << 31) - 1


def can_gather(device: torch.device) -> bool:
    """Whether attention is gathered here: where torch's gathered sums are AVX-512 code."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"


@dataclass(frozen=True)
class _Reads:
    """What the two sums read; U tiles are read, by all rows and query heads together."""

    key_rows: Tensor
    """[U * d] rows of the keys' table [R * W / T * H * d, T]."""
    key_ends: Tensor
    """[n * H * G * K / T + 1] where each tile's part of `key_rows` begins; it may have none."""
    queries: Tensor
    """[U] the query of each tile."""
    value_rows: Tensor
    """[U * T] rows of the values' table [R * W / T * H * T, d]."""
    value_ends: Tensor
    """[n * H * G + 1] where each query's part of `value_rows` begins."""
    tiles: Tensor
    """[U] each tile's place among [n * H * G * K / T]."""


class Gather:
    """The columns that some rows of a cache read at a step; one serves all layers.

    Args:
        rows: Of the buffer.
        columns: Of the window; `self.columns` are those of all tiles that they touch.
        used: Of each of those rows, the columns it reads; others of their tiles are masked.
    """

    def __init__(self, rows: slice, columns: slice, used: Sequence[slice]) -> None:
        self.rows, self.columns = rows, whole_tiles(columns)
        self._tiles = [whole_tiles(part) for part in used]
        self._reads: _Reads | None = None

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
        scores = products.view(n, heads, n_queries // heads, -1).float()
        if mask is not None:
            scores = scores.add_(mask)
        shares = scores.softmax(-1).to(DTYPE).view(-1, TILE).index_select(0, reads.tiles)
        seen = _sums(values.view(-1, size), reads.value_rows, reads.value_ends, shares)
        return seen.view(n, -1).to(query.dtype)

    def _places(self, heads: int, group: int, keys: Tensor) -> _Reads:
        _, wide, _, size, _ = keys.shape
        kind = torch.int32 if keys.numel() // min(TILE, size) <= _MOST_INT32 else torch.int64
        tile = torch.arange(self.columns.start // TILE, self.columns.stop // TILE)
        bounds = torch.tensor([[part.start, part.stop] for part in self._tiles]) // TILE
        used = ((tile >= bounds[:, :1]) & (tile < bounds[:, 1:]))[:, None, None]
        used = used.expand(-1, heads, group, -1).reshape(-1)
        row = torch.arange(self.rows.start, self.rows.stop)[:, None, None, None]
        head = torch.arange(heads)[:, None, None]
        of_cache = (row * wide + tile) * heads + head
        of_cache = of_cache.expand(-1, -1, group, -1).reshape(-1)
        places = used.nonzero().squeeze(1)
        read = of_cache.index_select(0, places).to(kind)[:, None]
        counts = (bounds[:, 1] - bounds[:, 0]).repeat_interleave(heads * group)
        return _Reads(
            key_rows=(read * size + torch.arange(size, dtype=kind)).view(-1),
            key_ends=_ends(used * size, kind),
            queries=places // len(tile),
            value_rows=(read * TILE + torch.arange(TILE, dtype=kind)).view(-1),
            value_ends=_ends(counts * TILE, kind),
            tiles=places,
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
