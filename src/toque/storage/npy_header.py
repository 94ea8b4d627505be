"""Headers of `.npy` arrays, from files that may come from anyone."""

from __future__ import annotations

from typing import IO

import numpy as np

Header = tuple[tuple[int, ...], bool, np.dtype[np.generic]]
"""Shape, whether it is in Fortran order, and type."""


def read_header(file: IO[bytes]) -> Header:
    """The header of an array of format 1.0 or 2.0; the file stands at its first number then.

    Raises:
        ValueError: it cannot be read, or claims a negative size.
        OSError: the file cannot be read.
    """
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            header = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            header = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"version {version} of the format")
    except OSError:
        raise
    except Exception as error:  # numpy evaluates the header as a Python literal: anything may come
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValueError(reason) from error
    if min(header[0], default=0) < 0:
        raise ValueError(f"the shape {header[0]}")
    return header
