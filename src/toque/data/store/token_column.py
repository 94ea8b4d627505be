"""Token column: the prompts or the targets of all rows, across the files of the shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from toque.data.store.npy_files import OpenFiles, TruncationWatch, mapped_array
from toque.data.store.ragged import Pieces
from toque.errors import DataError

Ids = NDArray[np.generic]
MAPPED_AT_MOST: Final = 16 << 20
"""Bytes. The pages of a map that were read count as the process's memory until something else needs
them; a side larger than this is read instead, at a microsecond more for each example."""


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
        self.maps: dict[int, Ids] = {}
        """Tokens by shard, as far as they were asked for and are mapped."""
        self._bytes: dict[int, memoryview] = {}
        self._watched = TruncationWatch()
        self.lengths = np.zeros(bounds[-1], np.int32)
        """[rows] tokens of each."""
        # Of three million rows either array is 12 MB.
        self._starts = np.zeros(bounds[-1], np.uint32)
        for shard, (first, last) in enumerate(pairwise(bounds)):
            self._fill(shard, first, last)
        n_bytes = int(self.lengths.sum(dtype=np.int64)) * dtype.itemsize
        self._files = OpenFiles() if n_bytes > MAPPED_AT_MOST else None

    def row(self, row: int, shard: int) -> Ids:
        """The ids of a row of `shard`; a view of the map, where there is one.

        Raises:
            DataError: a shard became shorter since it was opened.
        """
        if self._files is not None:
            return self.pieces(np.array([row]), [shard]).joined()
        self._watched.look()
        start = int(self._starts[row])
        return self.tokens(shard)[start : start + int(self.lengths[row])]

    def pieces(self, rows: NDArray[np.int64], shards: Sequence[int]) -> Pieces:
        """The ids of rows, each of which lies in the shard given beside it.

        Raises:
            DataError: a shard became shorter since it was opened.
        """
        lengths = self.lengths[rows].astype(np.int64)
        first = self._starts[rows] * np.int64(self.dtype.itemsize)
        if self._files is not None:
            for shard in set(shards).difference(self._files.opened):
                path = self._path(shard)
                self._files.add(shard, path, self.tokens(shard))
            wanted = (lengths * self.dtype.itemsize).tolist()
            return Pieces(lengths, self._files.read(shards, first.tolist(), wanted), self.dtype)
        self._watched.look()
        opened = self._bytes
        if len(opened) < len(self._shards):
            for shard in set(shards).difference(opened):
                opened[shard] = memoryview(self.tokens(shard).view(np.uint8).data)
        last = first + lengths * self.dtype.itemsize
        cuts = zip(shards, first.tolist(), last.tolist(), strict=True)
        return Pieces(lengths, [opened[shard][start:end] for shard, start, end in cuts], self.dtype)

    def tokens(self, shard: int) -> Ids:
        """All ids of a shard.

        Raises:
            DataError: they are of another type than the rest of the store, or not as many as its
                rows have.
        """
        known = self.maps.get(shard)
        if known is None:
            path = self._path(shard)
            array = mapped_array(path)
            # A plain view: indexing a memmap object costs a Python-level call for every slice.
            known = np.asarray(array)
            if known.dtype != self.dtype:
                raise DataError(
                    f"{path} holds {known.dtype} and the store's first ids are {self.dtype}: it is "
                    "of another store. Prepare the data again."
                )
            first, last = self._bounds[shard : shard + 2]
            n_ids = int(self.lengths[first:last].sum(dtype=np.int64))
            if len(known) != n_ids:
                raise DataError(
                    f"{path} holds {len(known)} ids and its rows have {n_ids}. The store is "
                    "damaged; prepare the data again."
                )
            if self._files is None:
                self._watched.add(path, array)
                self.maps[shard] = known
        return known

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
