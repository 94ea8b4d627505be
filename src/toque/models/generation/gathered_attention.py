"""Attention of one token per row on a CPU, as gathered sums.

A decoding step reads every key and value once, so attention can be as fast as reading. With one
query per head, torch's batched matmuls take three times as long. `embedding_bag` only reads: it
sums selected rows of a table with weights, in float32 for any precision of the table, and rounds
the sum once. For the values, the weights are the softmax. For the keys, 32 columns are next to each
other (`Tiles`), and the weights are the query. A row reads only its own tiles, regardless of the
length of other rows.

The cache is float16: half the bytes of float32, and an eighth of bfloat16's rounding error. Norms
limit the values to far less than its range. 96 rows, 6 heads and 128 columns of 64 numbers take
0.71 ms on one thread of a Zen 5, 1.3 ms in float32, and 4.0 ms as matmuls (two threads).

Letters as in `kv_cache.py`, T columns of a tile, and U tiles that all rows and query heads read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

DTYPE: Final = torch.float16
"""Precision of the keys and values."""
TILE: Final = 32
"""Number of columns in a tile of keys. In 16 bits, they fill a cache line. A row reads its first
and last tile entirely, so tiles must not be too large (scores of 96 rows, 6 heads, 128 columns of
64, one thread: 0.69 ms in tiles of 16, 0.41 in 32, 0.33 in 64)."""
_MAX_INT32: Final = (1 << 31) - 1


def can_gather(device: torch.device) -> bool:
    """Check whether torch's `embedding_bag` uses AVX-512 on this device."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _extend_to_tiles(columns: slice) -> slice:
    """Extend a range of columns to entire tiles: slice(40, 65) becomes slice(32, 96)."""
    tiles = _tile_numbers(columns)
    return slice(tiles.start * TILE, tiles.stop * TILE)


def _tile_numbers(columns: slice) -> slice:
    """Return the indices of all tiles in a range of columns: slice(1, 3) for slice(40, 65)."""
    return slice(columns.start // TILE, -(-columns.stop // TILE))


class Tiles:
    """Keys [R, W / T, H, d, T] or values [R, W / T, H, T, d] of a layer, like `kv_cache.Columns`.

    The numbers of one sum are next to each other. If the heads of a row were apart, reading would
    take 1.5 times as long. Columns move by entire tiles. A tile is zeroed before its first column
    is written, because a masked column must not contain NaN. Therefore the buffer may reuse freed
    memory (`glibc_malloc.py`). New pages would take 6 % of the time of 96 texts of 400 tokens
    (T5 mini).

    Args:
        shape: (R, H, W, d).
        keys: True for keys, False for values.
    """

    def __init__(self, shape: tuple[int, int, int, int], *, keys: bool) -> None:
        rows, heads, width, size = shape
        tile_shape = (size, TILE) if keys else (TILE, size)
        self.data = torch.empty((rows, width // TILE, heads, *tile_shape), dtype=DTYPE)
        # [R, W / T, H, T, d] for keys and values.
        self._tiles = self.data.transpose(3, 4) if keys else self.data

    def append(self, column: int, new: Tensor) -> None:
        """Write one column of the first n rows, [n, H, d]."""
        tile, offset = divmod(column, TILE)
        if offset == 0:
            self.data[: len(new), tile] = 0
        self._tiles[: len(new), tile, :, offset] = new

    def begin(self, row: int, column: int) -> None:
        """Prepare a row that starts with this column."""
        if column % TILE:  # otherwise `append` clears the tile
            self.data[row, column // TILE] = 0

    def store(self, row: int, columns: slice, many: Tensor) -> None:
        """Write columns of a row, [H, columns, d]. Other columns of their tiles become zero."""
        tiles = _tile_numbers(columns)
        n_before = columns.start - tiles.start * TILE
        n_after = tiles.stop * TILE - columns.stop
        padded = functional.pad(many, (0, 0, n_before, n_after))
        tiled = padded.view(len(many), -1, TILE, many.shape[-1])
        self._tiles[row, tiles] = tiled.transpose(0, 1)

    def read(self, row: int, columns: slice) -> Tensor:
        """Copy columns of a row, [H, columns, d]."""
        tiles = _tile_numbers(columns)
        many = self._tiles[row, tiles].transpose(0, 1).flatten(1, 2)
        start = columns.start - tiles.start * TILE
        return many[:, start : start + columns.stop - columns.start].clone()

    def copy_row(self, row: int, source: int, columns: slice) -> None:
        """Copy columns from another row."""
        tiles = _tile_numbers(columns)
        self.data[row, tiles] = self.data[source, tiles]

    def copy_from(self, other: Tensor, rows: int, columns: slice, start: int) -> None:
        """Copy columns of the first rows from a buffer's data, to the columns from `start`."""
        tiles = _tile_numbers(columns)
        source = other[:rows, tiles]
        if other is self.data:  # source and target may overlap
            source = source.clone()
        first = start // TILE
        end = first + tiles.stop - tiles.start
        self.data[:rows, first:end] = source


@dataclass(frozen=True)
class _GatherIndices:
    """Indices of the two `embedding_bag` calls of a step."""

    key_rows: Tensor
    """[U * d] Rows of the keys as a table [R * W / T * H * d, T], in memory order."""
    key_offsets: Tensor
    """[U + 2] Start of each tile in `key_rows`. The last tile is empty, so its sum is zero."""
    queries: Tensor
    """[U] Index of each tile's query."""
    scores: Tensor
    """[n * H * G * K / T] Index of the sum for each tile of the window. Tiles that are not read
    have the empty sum."""
    value_rows: Tensor
    """[U * T] Rows of the values as a table [R * W / T * H * T, d]."""
    value_offsets: Tensor
    """[n * H * G + 1] Start of each query in `value_rows`."""
    weights: Tensor
    """[U] Index of each tile in `value_rows` among all [n * H * G * K / T] tiles."""


class Gather:
    """Tiles that the first n rows of a cache read in a step, for all layers.

    Args:
        columns: Range of the window's columns.
        used: Range of columns that each row reads. The mask hides other columns of their tiles.
    """

    def __init__(self, columns: slice, used: Sequence[slice]) -> None:
        self.columns = _extend_to_tiles(columns)
        self.tiles = [_tile_numbers(part) for part in used]
        self._indices: _GatherIndices | None = None

    def reads_same_tiles(self, other: Gather) -> bool:
        """Check whether both read the same tiles, as in most consecutive steps."""
        return (self.columns, self.tiles) == (other.columns, other.tiles)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Compute softmax(scale * q @ k.T + mask) @ v with entire buffers, [n, H * G * d].

        Queries are [n, H * G, d] float32. The mask [n or 1, H or 1, 1, K] is float32. It is -inf
        for columns that a row does not read.
        """
        heads, size = keys.shape[2:4]
        n, n_queries = query.shape[:2]
        group = n_queries // heads
        if self._indices is None:
            self._indices = self._compute_indices(heads, group, keys)
        indices = self._indices

        scaled = (query * scale).to(DTYPE).view(-1, size)
        products = _weighted_sums(
            keys.view(-1, TILE),
            indices.key_rows,
            indices.key_offsets,
            scaled.index_select(0, indices.queries),
        )
        scores = products.index_select(0, indices.scores).view(n, heads, group, -1)
        scores = scores.float()
        if mask is not None:
            scores = scores.add_(mask)
        weights = scores.softmax(-1).to(DTYPE).view(-1, TILE)
        output = _weighted_sums(
            values.view(-1, size),
            indices.value_rows,
            indices.value_offsets,
            weights.index_select(0, indices.weights),
        )
        return output.view(n, -1).to(query.dtype)

    def _compute_indices(self, heads: int, group: int, keys: Tensor) -> _GatherIndices:
        """Compute the indices for H heads and G queries per head, in the shape of the keys."""
        _, n_buffer_tiles, _, size, _ = keys.shape
        n_table_rows = keys.numel() // min(TILE, size)
        dtype = torch.int32 if n_table_rows <= _MAX_INT32 else torch.int64

        window = _tile_numbers(self.columns)
        tile = torch.arange(window.start, window.stop)
        bounds = torch.tensor([[part.start, part.stop] for part in self.tiles])
        is_read = (tile >= bounds[:, :1]) & (tile < bounds[:, 1:])  # [n, K / T]
        is_read_by_query = is_read[:, None, None].expand(-1, heads, group, -1)

        # Index of each tile in the buffer, [n, K / T, H, G].
        row = torch.arange(len(self.tiles))[:, None, None, None]
        head = torch.arange(heads)[:, None]
        buffer_tiles = (row * n_buffer_tiles + tile[:, None, None]) * heads + head
        buffer_tiles = buffer_tiles.to(dtype).expand(-1, -1, -1, group)

        # Index of each tile among the scores, [n, H, G, K / T].
        score_tiles = torch.arange(buffer_tiles.numel())
        score_tiles = score_tiles.view(len(is_read), heads, group, len(tile))
        in_memory_order = score_tiles.permute(0, 3, 1, 2)[is_read].view(-1)
        n_read = len(in_memory_order)
        # Tiles that are not read have the sum after the last one, which is empty.
        scores = torch.full((buffer_tiles.numel(),), n_read)
        scores[in_memory_order] = torch.arange(n_read)

        key_lengths = torch.full((n_read + 1,), size)
        key_lengths[-1] = 0
        value_tiles = buffer_tiles.permute(0, 2, 3, 1)[is_read_by_query]
        value_lengths = is_read.sum(1).repeat_interleave(heads * group) * TILE
        return _GatherIndices(
            key_rows=_rows_of_tiles(buffer_tiles[is_read], size),
            key_offsets=_offsets(key_lengths, dtype),
            queries=in_memory_order // len(tile),
            scores=scores,
            value_rows=_rows_of_tiles(value_tiles, TILE),
            value_offsets=_offsets(value_lengths, dtype),
            weights=score_tiles[is_read_by_query],
        )


def _rows_of_tiles(tiles: Tensor, rows_per_tile: int) -> Tensor:
    """Return the numbers of all rows of the tiles in a table."""
    row = torch.arange(rows_per_tile, dtype=tiles.dtype)
    return (tiles.view(-1, 1) * rows_per_tile + row).view(-1)


def _offsets(lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 and the cumulative sums of the lengths."""
    return functional.pad(lengths.cumsum(0), (1, 0)).to(dtype)


def _weighted_sums(
    table: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor
) -> Tensor:
    """Sum weighted rows of a table between consecutive offsets."""
    return functional.embedding_bag(
        rows,
        table,
        offsets,
        mode="sum",
        per_sample_weights=weights.view(-1),
        include_last_offset=True,
    )
