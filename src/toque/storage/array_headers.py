"""Headers of `.npy` and safetensors files, which may come from anyone, checked before use."""

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
"""The safetensors library's own cap; a crafted header must not make us allocate gigabytes."""
Header = tuple[tuple[int, ...], bool, np.dtype[np.generic]]
"""Shape of a `.npy` array, whether it is in Fortran order, and its type."""


def read_npy_header(file: IO[bytes]) -> Header:
    """The header of a `.npy` array, at whose first number the file then stands, or ValueError."""
    try:
        version = np.lib.format.read_magic(file)
        if version not in {(1, 0), (2, 0)}:
            raise ValueError(f"version {version} of the format")
        first = version == (1, 0)
        read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        header = read(file)
    except OSError:
        raise
    except Exception as error:  # numpy evaluates the header as a Python literal: anything may come
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValueError(reason) from error
    if min(header[0], default=0) < 0:
        raise ValueError(f"the shape {header[0]}")
    return header


def check_safetensors_header(path: Path) -> None:
    """Refuse a header larger than its file or the cap, no JSON, or with a name twice.

    Of two equal names readers take either. The library checks sizes, offsets and overlaps itself.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER_BYTES, path.stat().st_size - 8):
            raise CheckpointError(
                f"{path} claims a header of {length:,} bytes, which it cannot hold. It is damaged "
                "or made to harm; put a whole copy in its place."
            )
        text = file.read(length)
    try:
        json.loads(text, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors file: {error}. Put a whole copy in its place."
        ) from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((doubled, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"its header names {doubled!r} more than once")
    return found


@contextmanager
def opened_weights(file: Path, *, missing: str = ".") -> Iterator[Any]:
    """A safetensors file that may be anyone's, open to read; CheckpointError if it is damaged.

    `missing` ends the sentence about a file that is not there.
    """
    try:
        check_safetensors_header(file)
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing{missing}") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is damaged or cut short ({error}). Copy or download it again."
        ) from error


def with_sorted_metadata(data: bytes) -> bytes:
    """The same safetensors file with its metadata sorted, so that equal tensors are equal files."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight, as the library has it
    return len(text).to_bytes(8, "little") + text + data[8 + length :]
