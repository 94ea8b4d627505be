"""Attention of one token per row on a CPU, as gathered sums.

A decoding step reads every key and value once, so attention can be as fast as reading. With one
query per head, torch's batched products take three times as long. `embedding_bag` only reads: it
sums selected rows of a table with weights, in float32 for any precision of the table, and rounds
the sum once. For the values, the weights are the softmax. For the keys, 32 columns are next to each
other (`Tiles`), and the weights are the query. A row reads only its own tiles, whatever the length
of other rows is.

The cache is float16: half the bytes of float32, and an eighth of bfloat16's rounding error. Norms
limit the values to far less than its range. 96 rows, 6 heads, 128 columns of 64, one thread of a
Zen 5: 0.71 ms, in float32 1.3 ms, as products 4.0 ms (two threads).

Letters as in `kv_cache.py`, and T columns of a tile.
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
"""Columns of a tile of keys. In 16 bits they are a cache line. A row reads its first and last tile
entirely, so tiles must not be too large (scores of 96 rows, 6 heads, 128 columns of 64, one thread:
0.69 ms in tiles of 16, 0.41 in 32, 0.33 in 64)."""
_MAX_INT32: Final = (1 << 31) - 1


def can_gather(device: torch.device) -> bool:
    """True if torch's gathered sums are AVX-512 code on this device."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"


def whole_tiles(columns: slice) -> slice:
    """Return the columns of all tiles in a range: slice(32, 96) for slice(40, 65)."""
    return slice(columns.start // TILE * TILE, -(-columns.stop // TILE) * TILE)


def _tiles(columns: slice) -> slice:
    """Return the numbers of all tiles in a range of columns."""
    entire = whole_tiles(columns)
    return slice(entire.start // TILE, entire.stop // TILE)


class Tiles:
    """Keys [R, W / T, H, d, T] or values [R, W / T, H, T, d] of a layer, like `kv_cache.Columns`.

    The numbers of one sum are next to each other. With a row's heads apart, reading takes 1.5 times
    as long. Columns move by entire tiles. A tile is zeroed before its first column is written,
    because a masked column must not contain NaN. The memory may therefore be reused
    (`glibc_malloc.py`): new pages take 6 % of the time of 96 texts of 400 tokens (T5 mini).

    Args:
        shape: (R, H, W, d).
        keys: True for keys.
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
        """Prepare a row that starts with this column."""
        if column % TILE:
            self.data[row, column // TILE] = 0

    def store(self, row: int, columns: slice, many: Tensor) -> None:
        """Write columns of a row, [H, columns, d]. Other columns of their tiles become zero."""
        tiles = _tiles(columns)
        before, after = (
            columns.start - tiles.start * TILE,
            tiles.stop * TILE - columns.stop,
        )
        padded = functional.pad(many, (0, 0, before, after))
        self._tiles[row, tiles] = padded.view(
            len(many), -1, TILE, many.shape[-1]
        ).transpose(0, 1)

    def copy_row(self, row: int, source: int, columns: slice) -> None:
        """Copy columns from another row."""
        tiles = _tiles(columns)
        self.data[row, tiles] = self.data[source, tiles]

    def copy_from(self, other: Tensor, rows: int, columns: slice, start: int) -> None:
        """Copy columns of the first rows from a buffer's data, to the columns after `start`."""
        tiles, first = _tiles(columns), start // TILE
        source = other[:rows, tiles]
        end = first + tiles.stop - tiles.start
        self.data[:rows, first:end] = source.clone() if other is self.data else source


@dataclass(frozen=True)
class _Reads:
    """Indices of the two sums, for U tiles over all rows and query heads."""

    key_rows: Tensor  # [U * d] rows of the keys' table [R * W / T * H * d, T], in memory order
    key_ends: Tensor  # [U + 2] start of each tile in `key_rows`; the last tile is empty
    queries: Tensor  # [U] query of each tile
    scores: Tensor  # [n * H * G * K / T] sum for each place; unused places have the empty sum
    value_rows: Tensor  # [U * T] rows of the values' table [R * W / T * H * T, d]
    value_ends: Tensor  # [n * H * G + 1] start of each query in `value_rows`
    shares: Tensor  # [U] place of each tile in `value_rows` among [n * H * G * K / T]


class Gather:
    """Columns that the first n rows of a cache read in a step, for all layers.

    Args:
        columns: Columns of the window.
        used: Columns of each row. The mask hides other columns of their tiles.
    """

    def __init__(self, columns: slice, used: Sequence[slice]) -> None:
        self.columns = whole_tiles(columns)
        self.tiles = [whole_tiles(part) for part in used]
        self._reads: _Reads | None = None

    def reads_as(self, other: Gather) -> bool:
        """True if both read the same tiles. This is so for most consecutive steps."""
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
        if self._reads is None:
            self._reads = self._find_reads(heads, n_queries // heads, keys)
        reads = self._reads

        scaled = (query * scale).to(DTYPE).view(-1, size).index_select(0, reads.queries)
        products = _sums(keys.view(-1, TILE), reads.key_rows, reads.key_ends, scaled)
        scores = products.index_select(0, reads.scores).view(
            n, heads, n_queries // heads, -1
        )
        scores = scores.float()
        if mask is not None:
            scores = scores.add_(mask)
        shares = (
            scores.softmax(-1).to(DTYPE).view(-1, TILE).index_select(0, reads.shares)
        )
        output = _sums(
            values.view(-1, size), reads.value_rows, reads.value_ends, shares
        )
        return output.view(n, -1).to(query.dtype)

    def _find_reads(self, heads: int, group: int, keys: Tensor) -> _Reads:
        _, n_tiles, _, size, _ = keys.shape
        kind = (
            torch.int32
            if keys.numel() // min(TILE, size) <= _MAX_INT32
            else torch.int64
        )

        tile = torch.arange(self.columns.start // TILE, self.columns.stop // TILE)
        bounds = torch.tensor([[part.start, part.stop] for part in self.tiles]) // TILE
        used = (tile >= bounds[:, :1]) & (tile < bounds[:, 1:])

        row = torch.arange(len(self.tiles))[:, None, None, None]
        of_cache = (row * n_tiles + tile[:, None, None]) * heads + torch.arange(heads)[
            :, None
        ]
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
    """Return 0 and the running sums."""
    return functional.pad(lengths.cumsum(0), (1, 0)).to(kind)


def _sums(table: Tensor, rows: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    """Sum weighted rows of a table between consecutive ends."""
    return functional.embedding_bag(
        rows,
        table,
        ends,
        mode="sum",
        per_sample_weights=weights.view(-1),
        include_last_offset=True,
    )
