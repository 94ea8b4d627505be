"""Memory-mapped and read `.npy` files, their headers checked against the file sizes."""

from __future__ import annotations

import math
import os
import resource
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from toque.errors import DataError
from toque.storage.npy_header import read_header

_OTHER_FILES: Final = 128
"""Descriptors left to everything else."""


@final
class OpenFiles:
    """Token files read with `pread`, piece by piece: resident memory does not grow with them."""

    def __init__(self) -> None:
        self.opened: dict[int, tuple[int, int]] = {}
        """Shard -> the file's descriptor, and where in it the ids begin."""
        self._paths: dict[int, Path] = {}
        weakref.finalize(self, _close, self.opened)

    def add(self, shard: int, path: Path, array: NDArray[np.generic]) -> None:
        """Open the file behind `array`, a result of `mapped_array`.

        Raises:
            DataError: it cannot be opened.
        """
        try:
            _allow_open_files(2 * len(self.opened) + _OTHER_FILES)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(
                f"{path} cannot be opened: {error.strerror}. If there are too many open files, "
                'allow more with "ulimit -n 65536" and start again.'
            ) from error
        self._paths[shard] = path
        self.opened[shard] = (descriptor, os.fstat(descriptor).st_size - array.nbytes)

    def read(
        self, shards: Sequence[int], first: Sequence[int], sizes: Sequence[int]
    ) -> list[bytes]:
        """`sizes` bytes of each shard's ids, from `first` on.

        Raises:
            DataError: a file became shorter, or cannot be read; it is named.
        """
        opened, pread = self.opened, os.pread
        try:
            parts = [
                pread(opened[shard][0], size, opened[shard][1] + start)
                for shard, start, size in zip(shards, first, sizes, strict=True)
            ]
        except OSError as error:
            raise DataError(f"A file of the store cannot be read: {error.strerror}.") from error
        if sum(map(len, parts)) != sum(sizes):
            cut = next(
                shard
                for shard, part, size in zip(shards, parts, sizes, strict=True)
                if len(part) < size
            )
            raise _cut_short(self._paths[cut], "fewer bytes")
        return parts


def _allow_open_files(n: int) -> None:
    """Raise the soft limit of open files to `n`, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < n and (hard == resource.RLIM_INFINITY or soft < hard):
        more = 2 * n if hard == resource.RLIM_INFINITY else min(2 * n, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))


def _close(opened: dict[int, tuple[int, int]]) -> None:
    for descriptor, _ in opened.values():
        os.close(descriptor)


def _cut_short(path: Path, left: str) -> DataError:
    return DataError(
        f"{path} was cut short while it was being read: {left} are left. Something else writes "
        "into the store. Restore the file, or prepare the data again, and continue with the same "
        "command."
    )


def mapped_array(path: Path) -> NDArray[np.generic]:
    """The numbers in a `.npy` file of one dimension, mapped read-only; no claimed size is made.

    Raises:
        DataError: no `.npy`, of something else than numbers, or of another size than it claims.
    """
    again = "Restore the file, or remove the store and prepare the data again."
    try:
        with path.open("rb") as file:
            shape, _, dtype = read_header(file)
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
