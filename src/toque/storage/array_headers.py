"""Checks of `.npy` and safetensors headers in untrusted files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open

from toque.errors import CheckpointError

MAX_HEADER_BYTES: Final = 100_000_000
"""Limit in the safetensors library. A forged header must not make Toque allocate gigabytes."""
Header = tuple[tuple[int, ...], bool, np.dtype[np.generic]]
"""Shape of a `.npy` array, True if it is in Fortran order, and its type."""


def read_npy_header(file: IO[bytes]) -> Header:
    """Read the header of a `.npy` array and leave the file at the array's first number.

    Raises:
        ValueError: The header is invalid.
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
    except Exception as error:
        # numpy evaluates the header as a Python literal, which may raise any error.
        first_line = str(error).partition("\n")[0]
        raise ValueError(first_line[:200] or type(error).__name__) from error
    shape = header[0]
    if min(shape, default=0) < 0:
        raise ValueError(f"the shape {shape}")
    return header


def check_safetensors_header(path: Path) -> None:
    """Refuse a header that is too large, is not JSON, or repeats a name.

    Readers differ in which of two tensors with the same name they use. The safetensors library
    itself checks sizes, offsets and overlaps.

    Raises:
        CheckpointError: The header is not valid.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER_BYTES, path.stat().st_size - 8):
            raise CheckpointError(
                f"{path} declares a header of {length:,} bytes, which is more than the file or "
                "the limit allows. The file is damaged or malicious. Replace it with a good copy."
            )
        text = file.read(length)
    try:
        json.loads(text, object_pairs_hook=_refuse_repeated_names)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors file: {error}. Replace it with a good copy."
        ) from error


def _refuse_repeated_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Raise ValueError if it has two members of the same name."""
    members = dict(pairs)
    if len(members) < len(pairs):
        [(repeated, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"its header has {repeated!r} more than once")
    return members


@contextmanager
def open_weights(file: Path, *, missing: str = ".") -> Iterator[Any]:
    """Check the header of an untrusted safetensors file, and open it for reading.

    Args:
        file: The safetensors file.
        missing: End of the error message if the file does not exist.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    try:
        check_safetensors_header(file)
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing{missing}") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is damaged or truncated ({error}). Copy or download it again."
        ) from error


def sort_metadata(data: bytes) -> bytes:
    """Sort a safetensors file's metadata, so that equal tensors give bitwise identical files."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # The library pads the header with spaces, so that tensors are aligned to eight bytes.
    padded = text.ljust(len(text) + -len(text) % 8)
    return len(padded).to_bytes(8, "little") + padded + data[8 + length :]
