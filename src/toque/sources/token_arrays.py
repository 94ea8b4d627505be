"""Token files (`.npy`, `.npz`): documents that are already token ids.

The array is `ids` (or `tokens`, `input_ids`, `token_ids`, or the only one). Of one dimension it is
one document, or several with an array `ends`; of two, each row is text without an end. Ids are
streamed, nothing is unpickled, and a header's size is checked against the bytes that are there
first; `numpy.load` would hold a whole `.npz` member in memory.
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
from typing import IO, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toque.errors import DataError
from toque.sources.decompress import MAX_EXPANSION, MIN_BOMB_BYTES
from toque.sources.records import Block, BlockExamples, document_example
from toque.storage.array_headers import read_npy_header

Ids = NDArray[np.uint32]
PART_TOKENS = 1 << 19
"""Most ids in a block; a longer document is read in parts, each with its own pieces."""
_IDS = ("ids", "tokens", "input_ids", "token_ids")
_NOT_READ = ("offsets", "attention_mask")
_HOW = (
    "Save flat ids and where documents end: numpy.savez(file, ids=numpy.concatenate(documents), "
    "ends=numpy.cumsum([len(d) for d in documents]))."
)
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
"""Exceptions that zipfile raises for an archive that it cannot read."""
_NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"
MAX_ID = (1 << 32) - 1


class _Part(NamedTuple):
    """Consecutive ids of one document, whose number counts from 1."""

    document: int
    tokens: int
    ends: bool


@dataclass(frozen=True)
class TokenReader:
    """Reads token files; a `RecordReader` whose records are documents."""

    version: int = 1
    recorded_name: ClassVar[str] = "toque.data.token_files:token_reader"

    def schema(self, path: Path) -> str:
        """Schema, the same for every file."""
        return "tokens"

    def blocks(self, path: Path) -> Iterator[Block]:
        """Blocks of whole documents, or parts of long ones, of about PART_TOKENS ids."""
        with _array_file(path) as file, file.stream(_name_of_ids(file)) as ids:
            yield from (_row_blocks if len(ids.shape) == 2 else _document_blocks)(file, ids)

    def examples(self, block: Block) -> BlockExamples:
        """The documents of a block; empty ones are dropped."""
        count = int(np.frombuffer(block.payload, "<i8", count=1)[0])
        parts = np.frombuffer(block.payload, "<i8", count=3 * count, offset=24).reshape(count, 3)
        ids = np.frombuffer(block.payload, "<u4", offset=24 * (count + 1))
        documents = np.split(ids, np.cumsum(parts[:, 1])[:-1])
        examples = [
            document_example(ids=own.tobytes(), ends=bool(ends))
            for own, ends in zip(documents, parts[:, 2].tolist(), strict=True)
            if len(own)
        ]
        empty = parts[parts[:, 1] == 0, 0].tolist()
        return BlockExamples(examples, count, len(examples), {"no tokens": empty} if empty else {})


def _name_of_ids(file: ArrayFile) -> str:
    if other := next((name for name in _NOT_READ if name in file.names), None):
        raise DataError(
            f"{file.path} holds the array {other}, which is not read. Read are flat ids with the "
            f"array ends, each document's end, and rows of ids without padding. {_HOW}"
        )
    found = [name for name in _IDS if name in file.names]
    others = [name for name in file.names if name != "ends"]
    if found:
        return found[0]
    if len(others) == 1:
        return others[0]
    raise DataError(
        f"{file.path} holds the arrays {', '.join(file.names[:8]) or '(none)'}; which of them are "
        f"the token ids cannot be told. Name that array {', '.join(_IDS[:-1])} or {_IDS[-1]}. "
        f"{_HOW}"
    )


def _document_blocks(file: ArrayFile, ids: ArrayStream) -> Iterator[Block]:
    n_ids = ids.shape[0]
    if n_ids == 0:
        raise DataError(f"{file.path} holds no token id. Write it again, or leave it out.")
    group, size = list[_Part](), 0
    for number, left in enumerate(_lengths(file, n_ids).tolist(), start=1):
        at = 0
        while at < left or not at:
            part = _Part(number, min(PART_TOKENS, left - at), ends=at + PART_TOKENS >= left)
            if group and size + part.tokens > PART_TOKENS:
                yield _packed(file.path, group, ids.take(size))
                group, size = [], 0
            group.append(part)
            size += part.tokens
            at += PART_TOKENS
    yield _packed(file.path, group, ids.take(size))


def _lengths(file: ArrayFile, n_ids: int) -> NDArray[np.int64]:
    """Ids in each document, from `ends`, which is checked first."""
    if "ends" not in file.names:
        return np.array([n_ids], np.int64)
    with file.stream("ends") as stream:
        count = stream.shape[0]
        # Some documents may be empty, but ends far longer than the ids are an error.
        if len(stream.shape) != 1 or count == 0 or count > 2 * n_ids + 2:
            raise _bad_ends(file, f"it has the shape {stream.shape} for {n_ids:,} ids")
        ends = stream.take(count).astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    if (lengths < 0).any():
        at = int(np.flatnonzero(lengths < 0)[0])
        raise _bad_ends(file, f"it falls to {ends[at]:,} at document {at + 1:,}")
    if ends[-1] != n_ids:
        raise _bad_ends(file, f"its last is {ends[-1]:,} and there are {n_ids:,} ids")
    return lengths


def _bad_ends(file: ArrayFile, what: str) -> DataError:
    return DataError(
        f"The array ends of {file.path} does not say where documents end: {what}. It rises to the "
        f"number of ids. {_HOW}"
    )


def _row_blocks(file: ArrayFile, ids: ArrayStream) -> Iterator[Block]:
    """Blocks of rows [R, L]."""
    n_rows, width = ids.shape
    if n_rows == 0 or not 0 < width <= PART_TOKENS:
        raise DataError(
            f"{file.path} holds ids of the shape {ids.shape}. Rows are from 1 to {PART_TOKENS:,} "
            f"ids long; longer documents belong in one flat array. {_HOW}"
        )
    at_once = PART_TOKENS // width
    for start in range(0, n_rows, at_once):
        numbers = range(start + 1, min(start + at_once, n_rows) + 1)
        parts = [_Part(number, width, ends=False) for number in numbers]
        yield _packed(file.path, parts, ids.take(len(parts) * width))


def _packed(path: Path, parts: list[_Part], ids: Ids) -> Block:
    """A payload: the number of parts; the document, length and end flag of each; the ids."""
    head = np.array([(len(parts), 0, 0), *parts], np.dtype("<i8"))
    payload = head.tobytes() + ids.astype("<u4", copy=False).tobytes()
    return Block(0, str(path), parts[0].document, payload, last=parts[-1].ends)


def is_array_file(path: Path) -> bool:
    """True if the file is `.npy`, or a zip archive of `.npy` members only, by its content."""
    try:
        with _array_file(path) as file:
            names = file.archive.namelist() if file.archive else [".npy"]
    except DataError:
        return False
    return bool(names) and all(name.endswith(".npy") for name in names)


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
        """The next `count` elements."""
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


class ArrayFile(NamedTuple):
    """An open `.npy` file (its one array is called "array") or `.npz` archive."""

    path: Path
    names: tuple[str, ...]
    archive: zipfile.ZipFile | None

    @contextmanager
    def stream(self, name: str) -> Iterator[ArrayStream]:
        """The array of that name, its header checked against the bytes that are there."""
        with self._opened(name) as (file, n_bytes):
            try:
                shape, fortran, dtype = read_npy_header(file)
            except ValueError as error:
                raise DataError(
                    f"{self.path}: the array {name} has no readable header ({error}). It is "
                    "damaged; fetch or write it again."
                ) from error
            wrong = ""
            if dtype.hasobject:
                wrong = (
                    "holds Python objects, which only unpickling reads, and unpickling runs "
                    "whatever code the file brings"
                )
            elif dtype.kind not in "iu":
                wrong = f"is of {dtype}. Token ids are whole numbers, e.g. uint16 or int32"
            elif len(shape) not in (1, 2) or (fortran and len(shape) == 2):
                order = ", column by column (Fortran order)" if fortran else ""
                wrong = (
                    f"has the shape {shape}{order}. Token ids lie in one dimension, or in rows of "
                    "two (numpy.ascontiguousarray)"
                )
            if wrong:
                raise DataError(f"{self.path}: the array {name} {wrong}. {_HOW}")
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


@contextmanager
def _array_file(path: Path) -> Iterator[ArrayFile]:
    """Open a `.npy` or `.npz` file; any failure while reading it becomes a DataError."""
    try:
        with path.open("rb") as file:
            start = file.read(6)
        if start == _NPY:
            yield ArrayFile(path, ("array",), None)
        elif start[:4] == _ZIP:
            with zipfile.ZipFile(path) as archive:
                members = [name for name in archive.namelist() if name.endswith(".npy")]
                names = tuple(name.removesuffix(".npy") for name in members)
                yield ArrayFile(path, names, archive)
        else:
            raise DataError(
                f"{path} is no token file: it begins {start!r}. Token files are .npy or .npz. "
                f"{_HOW}"
            )
    except BROKEN_ARCHIVE as error:
        raise DataError(
            f"The token file {path} cannot be read: {error}. It may be cut short or damaged; fetch "
            "or write it again."
        ) from error
