"""Token files (`.npy`, `.npz`): documents as token ids.

The array is `ids` (or `tokens`, `input_ids`, `token_ids`, or the only array). One dimension is one
document, or several documents with an array `ends`. Each row of a two-dimensional array is a
document without an end token. The ids are streamed, because `numpy.load` would read an entire
`.npz` member into memory. Nothing is unpickled, and the size in a header is checked first.
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
from typing import IO, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toque.errors import DataError
from toque.sources.decompress import MAX_EXPANSION, MIN_BOMB_BYTES
from toque.sources.records import Block, BlockExamples, document_example
from toque.storage.array_headers import read_npy_header

Ids = NDArray[np.uint32]
PART_TOKENS = 1 << 19
"""Maximum number of ids per block. Longer documents are divided into parts."""
_IDS = ("ids", "tokens", "input_ids", "token_ids")
_NOT_READ = ("offsets", "attention_mask")
_HOW = (
    "Save flat ids and the ends of the documents: numpy.savez(file, "
    "ids=numpy.concatenate(documents), ends=numpy.cumsum([len(d) for d in documents]))."
)
BROKEN_ARCHIVE = (
    OSError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    NotImplementedError,  # an unknown version or compression
    RuntimeError,  # an encrypted member
    UnicodeDecodeError,  # the name of a member
)
"""Exceptions that zipfile raises for an archive that it cannot read."""
_PART_FIELDS = np.dtype(("<i8", 3))
"""Type of a `_Part` in a block."""
_NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"
MAX_ID = (1 << 32) - 1


class _Part(NamedTuple):
    """Consecutive ids of a document."""

    document: int
    """Number of the document, from 1."""
    tokens: int
    ends: bool
    """True if the document ends with this part."""


@dataclass(frozen=True)
class TokenReader:
    """`RecordReader` of token files."""

    version: int = 1
    recorded_name: ClassVar[str] = "toque.data.token_files:token_reader"

    def schema(self, path: Path) -> str:
        """Return the schema, equal for all files."""
        return "tokens"

    def blocks(self, path: Path) -> Iterator[Block]:
        """Read blocks of about PART_TOKENS ids: documents, or parts of long ones."""
        with _array_file(path) as file, file.stream(_name_of_ids(file)) as ids:
            if len(ids.shape) == 2:
                yield from _row_blocks(file, ids)
            else:
                yield from _document_blocks(file, ids)

    def examples(self, block: Block) -> BlockExamples:
        """Make the documents of a block, which `_pack_parts` wrote. Empty documents are dropped."""
        n_parts = int(np.frombuffer(block.payload, "<i8", count=1)[0])
        header = np.frombuffer(block.payload, _PART_FIELDS, count=n_parts + 1)
        ids = np.frombuffer(block.payload, "<u4", offset=header.nbytes)
        numbers, lengths, ends = header[1:].T
        documents = np.split(ids, np.cumsum(lengths)[:-1])
        examples = [
            document_example(ids=document.tobytes(), ends=bool(is_end))
            for document, is_end in zip(documents, ends, strict=True)
            if len(document)
        ]
        empty = numbers[lengths == 0].tolist()
        dropped = {"no tokens": empty} if empty else {}
        return BlockExamples(examples, n_parts, len(examples), dropped)


def _name_of_ids(file: ArrayFile) -> str:
    """Return the name of the array with the token ids.

    Raises:
        DataError: The file has no such array, or also an array that is not supported.
    """
    if other := next((name for name in _NOT_READ if name in file.names), None):
        raise DataError(
            f"{file.path} has the array {other}, which is not supported. Use flat ids with an "
            f"array `ends`, or rows of ids without padding. {_HOW}"
        )
    known_names = [name for name in _IDS if name in file.names]
    other_names = [name for name in file.names if name != "ends"]
    if known_names:
        return known_names[0]
    if len(other_names) == 1:
        return other_names[0]
    raise DataError(
        f"{file.path} has the arrays {', '.join(file.names[:8]) or '(none)'}, but none has a known "
        f"name for token ids. Name the array {', '.join(_IDS[:-1])} or {_IDS[-1]}. {_HOW}"
    )


def _document_blocks(file: ArrayFile, ids: ArrayStream) -> Iterator[Block]:
    """Read blocks of documents, or of parts of long documents."""
    n_ids = ids.shape[0]
    if n_ids == 0:
        raise DataError(
            f"{file.path} has no token ids. Write it again, or remove it from data.sources."
        )
    group: list[_Part] = []
    size = 0
    for number, length in enumerate(_document_lengths(file, n_ids).tolist(), start=1):
        for at in range(0, max(1, length), PART_TOKENS):
            n_tokens = min(PART_TOKENS, length - at)
            part = _Part(number, n_tokens, ends=at + n_tokens == length)
            if group and size + part.tokens > PART_TOKENS:
                yield _pack_parts(file.path, group, ids.take(size))
                group = []
                size = 0
            group.append(part)
            size += part.tokens
    yield _pack_parts(file.path, group, ids.take(size))


def _document_lengths(file: ArrayFile, n_ids: int) -> NDArray[np.int64]:
    """Compute the number of ids per document from the array `ends`.

    Raises:
        DataError: `ends` does not fit the ids.
    """
    if "ends" not in file.names:
        return np.array([n_ids], np.int64)
    with file.stream("ends") as stream:
        count = stream.shape[0]
        # Some documents may be empty, but many more documents than ids are an error.
        if len(stream.shape) != 1 or count == 0 or count > 2 * n_ids + 2:
            raise _bad_ends(file, f"its shape is {stream.shape} for {n_ids:,} ids")
        ends = stream.take(count).astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    decreases = np.flatnonzero(lengths < 0)
    if len(decreases):
        at = int(decreases[0])
        raise _bad_ends(file, f"it decreases to {ends[at]:,} at document {at + 1:,}")
    if ends[-1] != n_ids:
        raise _bad_ends(
            file, f"its last value is {ends[-1]:,}, but there are {n_ids:,} ids"
        )
    return lengths


def _bad_ends(file: ArrayFile, problem: str) -> DataError:
    return DataError(
        f"The array `ends` of {file.path} must increase to the number of ids, but {problem}. {_HOW}"
    )


def _row_blocks(file: ArrayFile, ids: ArrayStream) -> Iterator[Block]:
    """Read blocks of an array's rows."""
    n_rows, width = ids.shape
    if n_rows == 0 or not 0 < width <= PART_TOKENS:
        raise DataError(
            f"{file.path} has ids of shape {ids.shape}. Rows must have 1 to {PART_TOKENS:,} ids. "
            f"Write longer documents as one flat array. {_HOW}"
        )
    rows_per_block = PART_TOKENS // width
    for start in range(0, n_rows, rows_per_block):
        numbers = range(start + 1, min(start + rows_per_block, n_rows) + 1)
        parts = [_Part(number, width, ends=False) for number in numbers]
        yield _pack_parts(file.path, parts, ids.take(len(parts) * width))


def _pack_parts(path: Path, parts: list[_Part], ids: Ids) -> Block:
    """Make a block with the number of parts, the fields of each part, and the ids."""
    header = np.array([(len(parts), 0, 0), *parts], np.dtype("<i8"))
    payload = header.tobytes() + ids.astype("<u4", copy=False).tobytes()
    return Block(0, str(path), parts[0].document, payload, last=parts[-1].ends)


def is_array_file(path: Path) -> bool:
    """Check by its content whether a file is `.npy`, or a zip archive of `.npy` members only."""
    try:
        with _array_file(path) as file:
            names = file.archive.namelist() if file.archive else [".npy"]
    except DataError:
        return False
    return bool(names) and all(name.endswith(".npy") for name in names)


@dataclass
class ArrayStream:
    """Stream of an array of integers."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    file: IO[bytes]
    position: int = 0

    def take(self, count: int) -> NDArray[np.uint32]:
        """Read the next `count` elements.

        Raises:
            DataError: The file is truncated, or a number is not a token id.
        """
        n_bytes = count * self.dtype.itemsize
        data = self.file.read(n_bytes)
        if len(data) != n_bytes:
            raise DataError(
                f"{self.path} ends inside its array {self.name}, after "
                f"{self.position + len(data) // self.dtype.itemsize:,} of "
                f"{math.prod(self.shape):,} numbers. It is truncated. Download or write it again."
            )
        values = np.frombuffer(data, self.dtype)
        is_invalid = (values < 0) | (values > MAX_ID)
        if is_invalid.any():
            at = int(is_invalid.argmax())  # the first invalid id
            raise DataError(
                f"{self.path} has {values[at]} at position {self.position + at:,} of its array "
                f"{self.name}. Token ids are integers of at least 0. Markers such as -100 are "
                "labels, not tokens. Write the ids."
            )
        self.position += count
        return values.astype(np.uint32)


class ArrayFile(NamedTuple):
    """An open `.npz` archive, or a `.npy` file with an array named "array"."""

    path: Path
    names: tuple[str, ...]
    archive: zipfile.ZipFile | None

    @contextmanager
    def stream(self, name: str) -> Iterator[ArrayStream]:
        """Open an array, and check its header against the size of the file.

        Raises:
            DataError: The array is damaged, or is not an array of token ids.
        """
        with self._open_member(name) as (file, n_bytes):
            try:
                shape, fortran, dtype = read_npy_header(file)
            except ValueError as error:
                raise DataError(
                    f"{self.path}: the header of the array {name} is damaged ({error}). Download "
                    "or write the file again."
                ) from error

            if problem := _problem_of_array(shape, dtype, fortran=fortran):
                raise DataError(f"{self.path}: the array {name} {problem}. {_HOW}")

            body_bytes = n_bytes - file.tell()
            expected_bytes = math.prod(shape) * dtype.itemsize
            if body_bytes != expected_bytes:
                raise DataError(
                    f"{self.path}: the array {name} has {body_bytes:,} bytes, but its header "
                    f"requires {expected_bytes:,} for the shape {shape} of {dtype}. It is "
                    "truncated or damaged. Download or write it again."
                )

            yield ArrayStream(self.path, name, shape, dtype, file)

    @contextmanager
    def _open_member(self, name: str) -> Iterator[tuple[IO[bytes], int]]:
        """Open the file of an array. Also return its size in bytes."""
        if self.archive is None:
            with self.path.open("rb") as file:
                yield file, self.path.stat().st_size
            return
        member = self.archive.getinfo(f"{name}.npy")
        if member.file_size > max(MIN_BOMB_BYTES, MAX_EXPANSION * member.compress_size):
            raise DataError(
                f"{self.path}: the array {name} expands from {member.compress_size:,} to "
                f"{member.file_size:,} bytes. The file is damaged or a decompression bomb. Remove "
                "the file from data.sources."
            )
        with self.archive.open(member) as packed:
            yield packed, member.file_size


def _problem_of_array(
    shape: tuple[int, ...], dtype: np.dtype[np.generic], *, fortran: bool
) -> str:
    """Describe why an array cannot have token ids, or return ""."""
    if dtype.hasobject:
        return "has Python objects. They are not read, because unpickling may run code"
    if dtype.kind not in "iu":
        return f"has the type {dtype}. Token ids are integers, e.g. uint16 or int32"
    if len(shape) == 1 or (len(shape) == 2 and not fortran):
        return ""
    order = " in Fortran order" if fortran else ""
    return (
        f"has the shape {shape}{order}. Token ids have one dimension, or two in C "
        "order (numpy.ascontiguousarray)"
    )


@contextmanager
def _array_file(path: Path) -> Iterator[ArrayFile]:
    """Open a `.npy` or `.npz` file.

    Raises:
        DataError: The file cannot be read.
    """
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
                f"{path} is not a token file, because it begins with {start!r}. Token files are "
                f".npy or .npz. {_HOW}"
            )
    except BROKEN_ARCHIVE as error:
        raise DataError(
            f"The token file {path} cannot be read: {error}. It may be truncated or damaged. "
            "Download or write it again."
        ) from error
