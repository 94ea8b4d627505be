"""Buffers of one layer's keys, or values, in a KV cache: columns that are written one by one.

Letters: R rows, n of them, H key-value heads, W columns, d head size, T columns of a tile.
"""

from __future__ import annotations

import math
import mmap
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

TILE: Final = 32
"""Columns of a tile of keys: in 16 bits a cache line, and few enough that a row's first and last
tile, of which it uses a part, waste little (scores of 96 rows, 6 heads, 128 columns of 64, one
thread: 0.69 ms in tiles of 16, 0.41 in 32, 0.33 in 64)."""


Shape = tuple[int, int, int, int]
"""R, H, W and d."""


class Columns:
    """A buffer [R, H, W, d].

    Args:
        shape: R, H, W and d.
        dtype: Of its numbers.
        device: Where it lies.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        # Zeros, not empty: a masked column must not hold a NaN.
        self.data = zeroed(shape, dtype, device)

    def append(self, column: int, new: Tensor) -> None:
        """Write one column of the first n rows, [n, H, d]."""
        self.data[: len(new), :, column] = new

    def begin(self, rows: slice, column: int) -> None:
        """Make ready rows whose first column this will be."""

    def store(self, rows: slice, columns: slice, many: Tensor) -> None:
        """Write columns of some rows, [rows, H, columns, d]."""
        self.data[rows, :, columns] = many

    def copy_row(self, row: int, of: int, columns: slice) -> None:
        """Overwrite columns of a row with those of another."""
        self.data[row, :, columns] = self.data[of, :, columns]

    def take(self, other: Columns, rows: int, columns: slice, at: int) -> None:
        """Copy columns of a buffer's first rows to the columns from `at` on; it may be this one."""
        length, taken = columns.stop - columns.start, other.data[:rows, :, columns]
        self.data[:rows, :, at : at + length] = taken.clone() if other is self else taken


class Tiles(Columns):
    """A buffer of whole tiles, keys [R, W / T, H, d, T] or values [R, W / T, H, T, d].

    What a query sums lies side by side, and all that a row reads in one piece: with its heads apart
    reading takes half as long again. Columns move to others by whole tiles, by a multiple of T.

    A tile is zeroed when its first column is used: the others are masked, and must not hold a NaN.
    So the memory may be such as a process kept (`glibc_malloc.py`): fresh pages of a cache take 6 %
    of the time of 96 texts of 400 tokens (T5 mini, two Zen 5 cores).

    Args:
        shape: R, H, W and d.
        dtype: Of its numbers.
        device: Where it lies.
        keys: Whether it holds keys.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, *, keys: bool
    ) -> None:
        rows, heads, width, size = shape
        within = (size, TILE) if keys else (TILE, size)
        self.data = torch.empty((rows, width // TILE, heads, *within), dtype=dtype, device=device)
        self._tiles = self.data.transpose(3, 4) if keys else self.data

    def append(self, column: int, new: Tensor) -> None:
        """Write one column of the first n rows, [n, H, d]."""
        if column % TILE == 0:
            self.data[: len(new), column // TILE] = 0
        self._tiles[: len(new), column // TILE, :, column % TILE] = new

    def begin(self, rows: slice, column: int) -> None:
        """Make ready rows whose first column this will be."""
        if column % TILE:
            self.data[rows, column // TILE] = 0

    def store(self, rows: slice, columns: slice, many: Tensor) -> None:
        """Write columns of some rows, [rows, H, columns, d]; others of their tiles become zero."""
        tiles = _tiles(columns)
        before, after = columns.start - tiles.start * TILE, tiles.stop * TILE - columns.stop
        whole = functional.pad(many, (0, 0, before, after))
        by_tile = whole.view(*whole.shape[:2], -1, TILE, whole.shape[-1])
        self._tiles[rows, tiles] = by_tile.transpose(1, 2)

    def copy_row(self, row: int, of: int, columns: slice) -> None:
        """Overwrite columns of a row with those of another."""
        tiles = _tiles(columns)
        self.data[row, tiles] = self.data[of, tiles]

    def take(self, other: Columns, rows: int, columns: slice, at: int) -> None:
        """Copy columns of a buffer's first rows to the columns from `at` on; it may be this one."""
        tiles, first = _tiles(columns), at // TILE
        taken = other.data[:rows, tiles]
        end = first + tiles.stop - tiles.start
        self.data[:rows, first:end] = taken.clone() if other is self else taken


def whole_tiles(columns: slice) -> slice:
    """The columns of all tiles that these columns touch.

    >>> whole_tiles(slice(40, 65))
    slice(32, 96, None)
    """
    return slice(columns.start // TILE * TILE, -(-columns.stop // TILE) * TILE)


def _tiles(columns: slice) -> slice:
    """The numbers of those tiles."""
    whole = whole_tiles(columns)
    return slice(whole.start // TILE, whole.stop // TILE)


def buffer_pair(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, gathers: bool
) -> tuple[Columns, Columns]:
    """A layer's keys and values, zeros; in tiles where they are gathered."""
    if gathers:
        return Tiles(shape, dtype, device, keys=True), Tiles(shape, dtype, device, keys=False)
    return Columns(shape, dtype, device), Columns(shape, dtype, device)


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU, pages take time and memory only when first touched.

    `torch.zeros` writes all of them. NumPy's ask for huge pages, and a short row in a buffer made
    for a long one then clears 2 MiB where it needs 16 KiB: a fifth of the time of 96 rows of 80
    tokens, the longest of 512.
    """
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
