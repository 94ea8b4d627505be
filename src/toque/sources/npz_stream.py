"""Streaming reader of integer arrays in `.npy` and `.npz` files.

Nothing is unpickled, and the size in a header is checked against the bytes that are there before
anything is allocated. `numpy.load` would hold a whole `.npz` member in memory.
"""

from __future__ import annotations

import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from toque.errors import DataError
from toque.storage.npy_header import read_header

BROKEN_ARCHIVE: Final = (
    OSError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    NotImplementedError,  # of a newer format, or packed in an unknown way
    RuntimeError,  # an encrypted member
    UnicodeDecodeError,  # a member's name
)
"""What zipfile raises for an archive that it cannot read."""

_NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"
MAX_ID = (1 << 32) - 1
MAX_EXPANSION = 200
"""Highest compression ratio accepted. Token ids compress two- to tenfold, a bomb a thousandfold."""
MIN_BOMB_BYTES = 256 << 20


def is_array_file(path: Path) -> bool:
    """Whether the file is `.npy`, or a zip archive of `.npy` members only, by its content."""
    try:
        with path.open("rb") as file:
            start = file.read(6)
        if start == _NPY:
            return True
        if start[:4] != _ZIP:
            return False
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        return bool(names) and all(name.endswith(".npy") for name in names)
    except BROKEN_ARCHIVE:
        return False


@dataclass
class ArrayStream:
    """The elements of one array of integers, read in order."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    file: IO[bytes]
    taken: int = 0

    def take(self, count: int) -> NDArray[np.uint32]:
        """The next `count` elements.

        Raises:
            DataError: the file ends too early, or an element is negative or over 32 bits.
        """
        n_bytes = count * self.dtype.itemsize
        data = self.file.read(n_bytes)
        if len(data) != n_bytes:
            raise DataError(
                f"{self.path} ends inside its array {self.name}, after "
                f"{self.taken + len(data) // self.dtype.itemsize:,} of "
                f"{math.prod(self.shape):,} numbers. It is cut short; fetch or write it again."
            )
        values = np.frombuffer(data, self.dtype)
        wrong = (values < 0) | (values > MAX_ID)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise DataError(
                f"{self.path} holds {values[at]} at position {self.taken + at:,} of its array "
                f"{self.name}. Token ids are whole numbers from 0; a mark such as -100 is a label, "
                "not a token. Write the ids themselves."
            )
        self.taken += count
        return values.astype(np.uint32)


@dataclass(frozen=True)
class ArrayFile:
    """An open `.npy` file (its one array is called "array") or `.npz` archive."""

    path: Path
    names: tuple[str, ...]
    how: str
    archive: zipfile.ZipFile | None

    @contextmanager
    def stream(self, name: str) -> Iterator[ArrayStream]:
        """The array of that name, its header checked against the bytes that are there.

        Raises:
            DataError: damaged, of Python objects, or not of integers.
        """
        with self._opened(name) as (file, n_bytes):
            try:
                shape, fortran, dtype = read_header(file)
            except ValueError as error:
                raise DataError(
                    f"{self.path}: the array {name} has no readable header ({error}). It is "
                    "damaged; fetch or write it again."
                ) from error
            self._refuse_other_types(name, shape, dtype, fortran=fortran)
            body = n_bytes - file.tell()
            claimed = math.prod(shape) * dtype.itemsize
            if body != claimed:
                raise DataError(
                    f"{self.path}: the array {name} claims the shape {shape} of {dtype}, "
                    f"{claimed:,} bytes, and {body:,} are there. It is cut short or damaged; fetch "
                    "or write it again."
                )
            yield ArrayStream(self.path, name, shape, dtype, file)

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[IO[bytes], int]]:
        if self.archive is None:
            with self.path.open("rb") as file:
                yield file, self.path.stat().st_size
            return
        member = self.archive.getinfo(f"{name}.npy")
        if member.file_size > max(MIN_BOMB_BYTES, MAX_EXPANSION * member.compress_size):
            raise DataError(
                f"{self.path}: the array {name} claims {member.file_size:,} bytes in "
                f"{member.compress_size:,} compressed ones. No text does; it is damaged or "
                "a decompression bomb. Take it out of data.sources."
            )
        with self.archive.open(member) as packed:
            yield packed, member.file_size

    def _refuse_other_types(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic], *, fortran: bool
    ) -> None:
        wrong = ""
        if dtype.hasobject:
            wrong = (
                "holds Python objects, which only unpickling reads, and unpickling runs whatever "
                "code the file brings"
            )
        elif dtype.kind not in "iub" or (dtype.kind == "b" and name != "attention_mask"):
            wrong = f"is of {dtype}. Token ids are whole numbers, e.g. uint16 or int32"
        elif len(shape) not in (1, 2) or (fortran and len(shape) == 2):
            order = ", column by column (Fortran order)" if fortran else ""
            wrong = (
                f"has the shape {shape}{order}. Token ids lie in one dimension, or in rows of two "
                "(numpy.ascontiguousarray)"
            )
        if wrong:
            raise DataError(f"{self.path}: the array {name} {wrong}. {self.how}")


@contextmanager
def array_file(path: Path, *, how: str) -> Iterator[ArrayFile]:
    """Open a `.npy` or `.npz` file; any failure while reading it becomes a DataError.

    Args:
        path: the file.
        how: a sentence for errors that says how such a file is written.

    Raises:
        DataError: of another kind, unreadable or damaged.
    """
    try:
        with path.open("rb") as file:
            start = file.read(6)
        if start == _NPY:
            yield ArrayFile(path, ("array",), how, None)
        elif start[:4] == _ZIP:
            with zipfile.ZipFile(path) as archive:
                members = [name for name in archive.namelist() if name.endswith(".npy")]
                names = tuple(name.removesuffix(".npy") for name in members)
                yield ArrayFile(path, names, how, archive)
        else:
            raise DataError(
                f"{path} is no token file: it begins {start!r}. Token files are .npy or .npz. {how}"
            )
    except BROKEN_ARCHIVE as error:
        raise DataError(
            f"The token file {path} cannot be read: {error}. It may be cut short or damaged; fetch "
            "or write it again."
        ) from error
