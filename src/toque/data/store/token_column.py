"""Token column: the prompts or the targets of all rows, across the files of the shards.

Cutting and joining bytes costs a fifth of what it does with arrays: pieces are bytes until they are
whole rows.
"""

from __future__ import annotations

import math
import os
import resource
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from toque.errors import DataError
from toque.storage.array_headers import read_npy_header

Ids = NDArray[np.generic]
_OTHER_FILES: Final = 128  # descriptors left to everything else


class TokenColumn:
    """The prompts of all rows, or the targets; `bounds` are each shard's first row, and all rows.

    Ids are read with `pread`, piece by piece: resident memory does not grow with a store, and a
    file cut short is an error, where reading past the end of a map kills the process.
    """

    def __init__(
        self, name: str, shards: Sequence[Path], bounds: Sequence[int], dtype: np.dtype[np.generic]
    ) -> None:
        self.name, self.dtype = name, dtype
        self._shards, self._bounds = shards, bounds
        self.lengths = np.zeros(bounds[-1], np.int32)  # [rows] tokens of each
        # Of three million rows either array is 12 MB.
        self._starts = np.zeros(bounds[-1], np.uint32)
        for shard, (first, last) in zip(shards, pairwise(bounds), strict=True):
            path = shard / f"{name}_ends.npy"
            ends = mapped_array(path)
            lengths = np.diff(ends, prepend=0)
            if len(ends) != last - first or (lengths < 0).any() or ends[-1:].sum() >= 1 << 32:
                raise DataError(
                    f"{path} does not say where {last - first} rows end, one after the other and "
                    "below 2^32. The store is damaged; prepare the data again."
                )
            self.lengths[first:last] = lengths
            self._starts[first + 1 : last] = ends[:-1]
        self.opened: dict[int, tuple[int, int]] = {}  # by shard: descriptor, place of the ids
        weakref.finalize(self, _close, self.opened)

    def row(self, row: int, shard: int) -> Ids:
        """The ids of a row of `shard`."""
        return self.pieces(np.array([row]), [shard]).joined()

    def pieces(self, rows: NDArray[np.int64], shards: Sequence[int]) -> Pieces:
        """The ids of rows, each of which lies in the shard given beside it."""
        opened, pread = self.opened, os.pread
        for shard in set(shards).difference(opened):
            self._open(shard)
        lengths = self.lengths[rows].astype(np.int64)
        sizes = (lengths * self.dtype.itemsize).tolist()
        first = (self._starts[rows] * np.int64(self.dtype.itemsize)).tolist()
        try:
            parts = [
                pread(opened[shard][0], size, opened[shard][1] + start)
                for shard, start, size in zip(shards, first, sizes, strict=True)
            ]
        except OSError as error:
            raise DataError(f"A file of the store cannot be read: {error.strerror}.") from error
        if sum(map(len, parts)) != sum(sizes):
            cut = next(s for s, p, n in zip(shards, parts, sizes, strict=True) if len(p) < n)
            raise DataError(
                f"{self._path(cut)} was cut short while it was being read: fewer bytes are left. "
                "Something else writes into the store. Restore the file, or prepare the data "
                "again, and continue with the same command."
            )
        return Pieces(lengths, parts, self.dtype)

    def _open(self, shard: int) -> None:
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
                f"{path} holds {len(ids)} ids and its rows have {n_ids}: prepare the data again."
            )
        try:
            wanted = 2 * len(self.opened) + _OTHER_FILES
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            unlimited = hard == resource.RLIM_INFINITY
            if soft < wanted and (unlimited or soft < hard):
                more = 2 * wanted if unlimited else min(2 * wanted, hard)
                resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(
                f"{path} cannot be opened: {error.strerror}. If there are too many open files, "
                'allow more with "ulimit -n 65536" and start again.'
            ) from error
        self.opened[shard] = (descriptor, os.fstat(descriptor).st_size - ids.nbytes)

    def _path(self, shard: int) -> Path:
        return self._shards[shard] / f"{self.name}_tokens.npy"


def _close(opened: dict[int, tuple[int, int]]) -> None:
    for descriptor, _ in opened.values():
        os.close(descriptor)


def mapped_array(path: Path) -> NDArray[np.generic]:
    """The numbers in a `.npy` file of one dimension, mapped read-only; no claimed size is made."""
    again = "Restore the file, or remove the store and prepare the data again."
    try:
        with path.open("rb") as file:
            shape, _, dtype = read_npy_header(file)
            body = path.stat().st_size - file.tell()
        claimed = math.prod(shape) * dtype.itemsize
        if dtype.kind not in "biuf" or len(shape) != 1 or claimed != body:
            raise ValueError(
                f"it claims the shape {shape} of {dtype}, {claimed:,} bytes, and has {body:,}"
            )
        array: NDArray[np.generic] = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path} is no array of a store: {error}. {again}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. {again}") from error
    return array


@dataclass(frozen=True)
class Pieces:
    """The ids of several examples' prompts, or targets."""

    lengths: NDArray[np.int64]  # [examples] ids in each
    parts: Sequence[bytes]  # each one's ids as bytes
    dtype: np.dtype[np.generic]

    @classmethod
    def of(cls, ids: Iterable[Ids]) -> Self:
        """Arrays given one by one, of any integer type."""
        arrays = [np.asarray(some, np.int64) for some in ids]
        lengths = np.array([len(some) for some in arrays], np.int64)
        return cls(lengths, [some.tobytes() for some in arrays], np.dtype(np.int64))

    def joined(self, gaps: Iterable[tuple[int, int]] = ()) -> Ids:
        """All ids side by side; (i, n) among `gaps` puts n zeros after example i.

        >>> three = Pieces.of([np.array([7, 8]), np.array([5]), np.array([9, 6])])
        >>> three.joined([(1, 1), (2, 2)]).tolist()
        [7, 8, 5, 0, 9, 6, 0, 0]
        """
        size = self.dtype.itemsize
        spaced: list[bytes] = [b""] * (2 * len(self.parts))
        spaced[::2] = self.parts
        for example, n in gaps:
            spaced[2 * example + 1] = bytes(n * size)
        return np.frombuffer(b"".join(spaced), self.dtype)

    def without_last(self) -> Pieces:
        """All but the last id of each; none may be empty."""
        size = self.dtype.itemsize
        return Pieces(self.lengths - 1, [part[:-size] for part in self.parts], self.dtype)

    def last(self) -> Ids:
        """[examples] the last id of each; none may be empty."""
        size = self.dtype.itemsize
        return np.frombuffer(b"".join([part[-size:] for part in self.parts]), self.dtype)

    def followed_by(self, other: Pieces) -> Pieces:
        """Each one's ids and then the other's, which are of the same type."""
        pairs = zip(self.parts, other.parts, strict=True)
        return Pieces(self.lengths + other.lengths, [b"".join(p) for p in pairs], self.dtype)
