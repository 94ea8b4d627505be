"""`.npy` files as maps, what their headers claim held against the bytes that are there."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toque.errors import DataError


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
