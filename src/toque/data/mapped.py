"""`.npy` files as maps, what their headers claim held against the bytes that are there."""

from __future__ import annotations

import math
import mmap
import time
from pathlib import Path
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from toque.errors import DataError

LOOK_EVERY: Final = 0.05
"""Seconds; a look costs a microsecond a file, and a process that is killed costs the run."""


@final
class Watched:
    """Maps whose files are looked at again: reading past the end of one that was cut is a SIGBUS.

    Files are not locked while they are mapped, so something else may cut one short while training
    reads it. A file that is cut in the twentieth of a second between a look and a read still kills
    the process; checkpoints are there for that.
    """

    def __init__(self) -> None:
        self._maps: list[tuple[Path, mmap.mmap, int]] = []
        self._next_look = 0.0

    def add(self, path: Path, array: NDArray[np.generic]) -> None:
        """Look after the map behind `array`, as `mapped_array` gave it."""
        held = getattr(array, "_mmap", None)
        if isinstance(held, mmap.mmap):
            self._maps.append((path, held, held.size()))

    def look(self) -> None:
        """Compare the files' sizes, if it is time.

        Raises:
            DataError: a file became shorter; it is named.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY
        for path, held, size in self._maps:
            if held.size() < size:  # of the file, not of the map
                raise DataError(
                    f"{path} was cut short while it was being read: {held.size():,} bytes are left "
                    f"of {size:,}. Something else writes into the store. Restore the file, or "
                    "prepare the data again, and continue with the same command."
                )


def mapped_array(path: Path) -> NDArray[np.generic]:
    """The array in a `.npy` file of numbers, mapped read-only; nothing of a claimed size is made.

    Raises:
        DataError: no `.npy` of version 1.0, of Python objects, or of another size than it claims.
    """
    again = "Restore the file, or remove the store and prepare the data again."
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"version {version} of the format; stores have 1.0")
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            body = path.stat().st_size - file.tell()
        claimed = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or min(shape, default=0) < 0 or claimed != body:
            raise ValueError(
                f"it claims the shape {shape} of {dtype}, {claimed:,} bytes, and has {body:,}"
            )
        array: NDArray[np.generic] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, SyntaxError, EOFError) as error:
        raise DataError(f"{path} is no array of a store: {error}. {again}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. {again}") from error
    return array
