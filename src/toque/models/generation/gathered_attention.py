"""Attention of one token a row on a CPU, as gathered sums.

A decoding step reads every key and every value once, so its attention can be as fast as reading is.
Batched products are not: with one query a head, torch's libraries take three times as long.
`embedding_bag` does just the reading: it sums chosen rows of a table, each times a weight, in
float32 whatever the table's precision, and rounds the sum once. The values are such a table, the
softmax the weights; with the keys of 32 columns side by side (`Tiles`), so are they, and the query
is the weights. A row of the cache reads its own tiles, however long its neighbours are.

The cache is float16: half of float32's bytes, and an eighth of bfloat16's rounding; its range is
far above what norms leave. 96 rows, 6 heads, 128 columns of 64, one thread of a Zen 5: 0.71 ms, in
float32 1.3 ms, as products 4.0 ms (two threads). Letters as in `kv_cache.py`, and T columns a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

DTYPE: Final = torch.float16  # precision of the keys and values
TILE: Final = 32
"""Columns of a tile of keys: in 16 bits a cache line, and few enough that a row's first and last
tile, of which it uses a part, waste little (scores of 96 rows, 6 heads, 128 columns of 64, one
thread: 0.69 ms in tiles of 16, 0.41 in 32, 0.33 in 64)."""
_MOST_INT32: Final = (1 << 31) - 1


def can_gather(device: torch.device) -> bool:
    """True if attention is gathered here: where torch's gathered sums are AVX-512 code."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"


def whole_tiles(columns: slice) -> slice:
    """The columns of all tiles that these touch: slice(32, 96) of slice(40, 65)."""
    return slice(columns.start // TILE * TILE, -(-columns.stop // TILE) * TILE)


def _tiles(columns: slice) -> slice:
    """The numbers of those tiles."""
    whole = whole_tiles(columns)
    return slice(whole.start // TILE, whole.stop // TILE)


class Tiles:
    """A layer's keys [R, W / T, H, d, T] or values [R, W / T, H, T, d], as `kv_cache.Columns`.

    `shape` is R, H, W and d. What a query sums lies side by side: with a row's heads apart reading
    takes half as long again. Columns move by whole tiles. A tile is zeroed when its first column is
    used, as masked ones must not hold a NaN, so that memory may be such as a process kept
    (`glibc_malloc.py`): fresh pages take 6 % of the time of 96 texts of 400 tokens (T5 mini).
    """

    def __init__(self, shape: tuple[int, int, int, int], *, keys: bool) -> None:
        rows, heads, width, size = shape
        within = (size, TILE) if keys else (TILE, size)
        self.data = torch.empty((rows, width // TILE, heads, *within), dtype=DTYPE)
        self._tiles = self.data.transpose(3, 4) if keys else self.data

    def append(self, column: int, new: Tensor) -> None:
        """Write one column of the first n rows, [n, H, d]."""
        if column % TILE == 0:
            self.data[: len(new), column // TILE] = 0
        self._tiles[: len(new), column // TILE, :, column % TILE] = new

    def begin(self, row: int, column: int) -> None:
        """Make ready a row whose first column this will be."""
        if column % TILE:
            self.data[row, column // TILE] = 0

    def store(self, row: int, columns: slice, many: Tensor) -> None:
        """Write columns of a row, [H, columns, d]; others of their tiles become zero."""
        tiles = _tiles(columns)
        before, after = columns.start - tiles.start * TILE, tiles.stop * TILE - columns.stop
        whole = functional.pad(many, (0, 0, before, after))
        self._tiles[row, tiles] = whole.view(len(many), -1, TILE, many.shape[-1]).transpose(0, 1)

    def copy_row(self, row: int, source: int, columns: slice) -> None:
        """Overwrite columns of a row with those of another."""
        tiles = _tiles(columns)
        self.data[row, tiles] = self.data[source, tiles]

    def take(self, other: Tensor, rows: int, columns: slice, at: int) -> None:
        """Copy columns of the first rows of a buffer's data to the columns from `at` on."""
        tiles, first = _tiles(columns), at // TILE
        taken = other[:rows, tiles]
        end = first + tiles.stop - tiles.start
        self.data[:rows, first:end] = taken.clone() if other is self.data else taken


@dataclass(frozen=True)
class _Reads:
    """Places that the two sums read: U tiles, over all rows and query heads."""

    key_rows: Tensor  # [U * d] rows of the keys' table [R * W / T * H * d, T], in order of memory
    key_ends: Tensor  # [U + 2] where each tile's part of `key_rows` begins; the last is empty
    queries: Tensor  # [U] the query of each tile, in that order
    scores: Tensor  # [n * H * G * K / T] the sum in each place; the empty one where none was read
    value_rows: Tensor  # [U * T] rows of the values' table [R * W / T * H * T, d]
    value_ends: Tensor  # [n * H * G + 1] where each query's part of `value_rows` begins
    shares: Tensor  # [U] the place of each part of `value_rows` among [n * H * G * K / T]


class Gather:
    """The columns that the first n rows of a cache read at a step; one serves all layers.

    `columns` are the window's, `used` those that each row reads; others of their tiles are masked.
    """

    def __init__(self, columns: slice, used: Sequence[slice]) -> None:
        self.columns = whole_tiles(columns)
        self.tiles = [whole_tiles(part) for part in used]
        self._reads: _Reads | None = None

    def reads_as(self, other: Gather) -> bool:
        """True if both read the same tiles, as most steps do that follow each other."""
        return (self.columns, self.tiles) == (other.columns, other.tiles)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """softmax(scale * q @ k.T + mask) @ v of whole buffers, [n, H * G * d].

        Queries are [n, H * G, d] float32; the mask [n or 1, H or 1, 1, K] is float32, -inf where a
        row's tiles hold columns that it does not read, and where it has no tile.
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
        row = torch.arange(len(self.tiles))[:, None, None, None]
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
        rows, table, ends, mode="sum", per_sample_weights=weights.view(-1), include_last_offset=True
    )
