"""Token column: the prompts or the targets of all rows, across the files of the shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from toque.data.store.npy_files import OpenFiles, mapped_array
from toque.data.store.ragged import Pieces
from toque.errors import DataError

Ids = NDArray[np.generic]
HELD_AT_MOST: Final = 16 << 20
"""Bytes of a side whose ids are kept in memory; a larger one is read from its files row by row, at
a microsecond more for each example. Neither is mapped: a map of a file that something cuts short
kills the process (SIGBUS), and the pages of a map that were read count as its memory, too."""


class TokenColumn:
    """The prompts of all rows, or the targets. Says where they lie; files open when first read.

    Args:
        name: "prompt" or "target".
        shards: the folders that hold them.
        bounds: the number of each shard's first row, and of all rows.
        dtype: of the ids.

    Raises:
        DataError: a shard does not say where its rows end.
    """

    def __init__(
        self,
        name: str,
        shards: Sequence[Path],
        bounds: Sequence[int],
        dtype: np.dtype[np.generic],
    ) -> None:
        self.name, self.dtype = name, dtype
        self._shards, self._bounds = shards, bounds
        self.held: dict[int, memoryview] = {}
        """Ids by shard as bytes, as far as they were asked for and are kept in memory."""
        self.lengths = np.zeros(bounds[-1], np.int32)
        """[rows] tokens of each."""
        # Of three million rows either array is 12 MB.
        self._starts = np.zeros(bounds[-1], np.uint32)
        for shard, (first, last) in enumerate(pairwise(bounds)):
            self._fill(shard, first, last)
        n_bytes = int(self.lengths.sum(dtype=np.int64)) * dtype.itemsize
        self._files = OpenFiles() if n_bytes > HELD_AT_MOST else None

    def row(self, row: int, shard: int) -> Ids:
        """The ids of a row of `shard`.

        Raises:
            DataError: a shard became shorter since it was opened.
        """
        if shard not in self.held:
            return self.pieces(np.array([row]), [shard]).joined()
        start = int(self._starts[row])
        ids = np.frombuffer(self.held[shard], self.dtype)
        return ids[start : start + int(self.lengths[row])]

    def pieces(self, rows: NDArray[np.int64], shards: Sequence[int]) -> Pieces:
        """The ids of rows, each of which lies in the shard given beside it.

        Raises:
            DataError: a shard became shorter since it was opened.
        """
        lengths = self.lengths[rows].astype(np.int64)
        first = self._starts[rows] * np.int64(self.dtype.itemsize)
        if self._files is not None:
            for shard in set(shards).difference(self._files.opened):
                self._files.add(shard, self._path(shard), self._mapped(shard))
            wanted = (lengths * self.dtype.itemsize).tolist()
            return Pieces(lengths, self._files.read(shards, first.tolist(), wanted), self.dtype)
        held = self.held
        if len(held) < len(self._shards):
            for shard in set(shards).difference(held):
                held[shard] = memoryview(self._mapped(shard).tobytes())
        last = first + lengths * self.dtype.itemsize
        cuts = zip(shards, first.tolist(), last.tolist(), strict=True)
        return Pieces(lengths, [held[shard][start:end] for shard, start, end in cuts], self.dtype)

    def _mapped(self, shard: int) -> Ids:
        """All ids of a shard, mapped.

        Raises:
            DataError: they are of another type than the rest of the store, or not as many as its
                rows have.
        """
        path = self._path(shard)
        ids = mapped_array(path)
        if ids.dtype != self.dtype:
            raise DataError(
                f"{path} holds {ids.dtype} and the store's first ids are {self.dtype}: it is of "
                "another store. Prepare the data again."
            )
        first, last = self._bounds[shard : shard + 2]
        n_ids = int(self.lengths[first:last].sum(dtype=np.int64))
        if len(ids) != n_ids:
            raise DataError(
                f"{path} holds {len(ids)} ids and its rows have {n_ids}. The store is damaged; "
                "prepare the data again."
            )
        return ids

    def _path(self, shard: int) -> Path:
        return self._shards[shard] / f"{self.name}_tokens.npy"

    def _fill(self, shard: int, first: int, last: int) -> None:
        path = self._shards[shard] / f"{self.name}_ends.npy"
        ends = mapped_array(path)
        lengths = np.diff(ends, prepend=0)
        if len(ends) != last - first or (lengths < 0).any() or ends[-1:].sum() >= 1 << 32:
            raise DataError(
                f"{path} does not say where {last - first} rows end, one after the other and below "
                "2^32. The store is damaged; prepare the data again."
            )
        self.lengths[first:last] = lengths
        self._starts[first + 1 : last] = ends[:-1]
