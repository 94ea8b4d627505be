"""Parquet and Arrow files, read with pyarrow one batch of rows at a time.

A few kilobytes of Parquet may expand to a cell of gigabytes, and the file's metadata may hide this
size. Therefore the decompressed size in every page's header is checked before pyarrow reads the
page.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from toque.errors import DataError, needing
from toque.sources.decompress import CHUNK_BYTES, MAX_RECORD_BYTES
from toque.sources.records import (
    NOT_UTF_8,
    TOO_LONG,
    Block,
    Contents,
    Numbered,
    attempt,
    pack,
    unreadable_block,
)

_PARQUET = b"PAR1"
_ARROW_FILE = b"ARROW1"
_ARROW_STREAM = b"\xff\xff\xff\xff"
_ARROW_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_MAX_SCHEMA = 64 << 20  # bytes
_BATCH_ROWS = 512
"""Number of rows per Parquet batch. Files with large pages have fewer."""
_BATCH_BYTES = 512 << 20
"""Maximum size of a batch in bytes, if every row is as large as the largest page."""
_DAMAGE = (OSError, ValueError, LookupError, RecursionError)
"""Errors that pyarrow raises on a damaged file, in addition to its own exceptions."""
_MAX_PAGE_BYTES = 128 << 20
"""Maximum size of a decompressed page, in bytes. Typical pages have about 1 MiB."""


class _Bad(NamedTuple):
    """A cell that cannot be read, and the reason for dropping its row."""

    reason: str


_NOT_TEXT = _Bad(NOT_UTF_8)


def columnar_format(start: bytes) -> str:
    """Detect the format by the first bytes of a file. Return "parquet", "arrow" or ""."""
    if start.startswith(_PARQUET):
        return "parquet"
    if start.startswith(_ARROW_FILE):
        return "arrow"
    schema_bytes = int.from_bytes(start[4:8], "little")
    is_stream = start.startswith(_ARROW_STREAM) and 0 < schema_bytes < _MAX_SCHEMA
    return "arrow" if is_stream else ""


def columns_of(path: Path) -> dict[str, bool]:
    """Return, for each column of a file, whether it contains bytes, such as pictures."""
    with _open_table(path) as (schema, _batches):
        return _columns_in(schema)


def _columns_in(schema: Any) -> dict[str, bool]:
    """Return, for each column of a schema, whether it contains bytes."""
    return {field.name: "binary" in str(field.type) for field in schema}


def decompressed_bytes(path: Path) -> int:
    """Read the decompressed size of a Parquet file, except its columns of bytes, from the metadata.

    The size of a damaged file is 0. The file is refused later, when it is read.
    """
    arrow = _pyarrow_for(str(path))
    try:
        metadata = arrow.parquet.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
    except (arrow.ArrowException, *_DAMAGE):
        return 0
    texts = [name for name, has_bytes in _columns_in(schema).items() if not has_bytes]
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return sum(
        chunk.total_uncompressed_size
        for group in groups
        for chunk in _column_chunks(group, texts)
    )


def columnar_blocks(path: Path, columns: Sequence[str]) -> Iterator[Block]:
    """Read blocks of about a mebibyte of rows with these columns."""
    arrow = _pyarrow_for(str(path))
    first_row = 1
    with _open_table(path) as (schema, batches):
        unread = [name for name in schema.names if name not in columns]
        for batch in batches(list(columns)):
            _check_buffers(batch, arrow)
            for part in _parts_of(batch):
                if part.num_rows == 1 and part.nbytes > MAX_RECORD_BYTES:
                    yield unreadable_block(path, first_row, TOO_LONG)
                else:
                    body = _serialise(part, arrow)
                    yield pack(path, first_row, "parquet", body, unread=unread)
                first_row += part.num_rows


def _serialise(batch: Any, arrow: Any) -> bytes:
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


@contextmanager
def _open_table(
    path: Path,
) -> Iterator[tuple[Any, Callable[[list[str]], Iterator[Any]]]]:
    """Yield the schema of a file, and a function that reads batches of columns."""
    arrow = _pyarrow_for(str(path))
    with path.open("rb") as file:
        start = file.read(len(_ARROW_FILE))
        file.seek(max(0, path.stat().st_size - len(_ARROW_STREAM_END)))
        end = file.read()
    is_parquet = start.startswith(_PARQUET)
    try:
        if is_parquet:
            with arrow.parquet.ParquetFile(path, pre_buffer=False) as table:
                yield table.schema_arrow, partial(_parquet_batches, path, table)
            return
        # pyarrow reads a truncated stream without an error.
        if start != _ARROW_FILE and end != _ARROW_STREAM_END:
            raise OSError("the end mark of an Arrow stream is missing")
        with arrow.OSFile(str(path)) as source:
            if start == _ARROW_FILE:
                reader = arrow.ipc.open_file(source)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                batches = reader = arrow.ipc.open_stream(source)
            yield reader.schema, partial(_select_columns, batches, reader.schema)
    except (arrow.ArrowException, *_DAMAGE) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        kind, remedy = "Arrow", "Save or download it again."
        if is_parquet:
            kind, remedy = "Parquet", "Download it again. Its last bytes must be PAR1."
        message = f"{path} is a damaged or truncated {kind} file ({reason}). {remedy}"
        raise DataError(message) from error


def _select_columns(
    batches: Iterator[Any], schema: Any, columns: list[str]
) -> Iterator[Any]:
    """Select the columns of batches by name. Several columns may have the same name."""
    indices = [
        index
        for column in columns
        for index, name in enumerate(schema.names)
        if name == column
    ]
    return (batch.select(indices) for batch in batches)


def _parquet_batches(path: Path, table: Any, columns: list[str]) -> Iterator[Any]:
    """Read the batches of a Parquet file.

    Raises:
        DataError: A page is too large.
    """
    with path.open("rb") as file:
        for number in range(table.num_row_groups):
            chunks = _column_chunks(table.metadata.row_group(number), columns)
            largest = max((_largest_page(file, chunk) for chunk in chunks), default=1)
            if largest > _MAX_PAGE_BYTES:
                raise DataError(
                    f"Row group {number} of {path} has a page of {largest:,} bytes after "
                    f"decompression. The limit is {_MAX_PAGE_BYTES:,}. Write the file with smaller "
                    "pages (pyarrow: data_page_size), without that row, or as JSON."
                )
            n_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, largest)))
            yield from table.iter_batches(n_rows, [number], columns)


def _column_chunks(row_group: Any, columns: Sequence[str]) -> Iterator[Any]:
    """Iterate over the column chunks of these columns, including their nested fields."""
    prefixes = tuple(f"{name}." for name in columns)
    for chunk in map(row_group.column, range(row_group.num_columns)):
        if f"{chunk.path_in_schema}.".startswith(prefixes):
            yield chunk


def _largest_page(file: BinaryIO, chunk: Any) -> int:
    """Return the decompressed size in bytes of the largest page in a column chunk."""
    offsets = (chunk.dictionary_page_offset, chunk.data_page_offset)
    position = min(offset for offset in offsets if offset)
    end = position + chunk.total_compressed_size
    largest = 0
    while position < end:
        file.seek(position)
        header = _read_integers(file)
        decompressed_size, compressed_size = header[2], header[3]
        largest = max(largest, decompressed_size)
        position = file.tell() + max(0, compressed_size)
    return largest


def _read_integers(file: BinaryIO) -> dict[int, int]:
    """Read the integers of a struct in Thrift's compact protocol, by field number.

    A field begins with a byte of two numbers: the step from the previous field number, and the
    type. Types: 1 true, 2 false, 3 byte, 4 to 6 integers, 7 double, 8 text, 12 struct.
    """
    integers: dict[int, int] = {}
    number = 0
    while head := file.read(1)[0]:
        step, kind = divmod(head, 16)
        number = number + step if step else _read_varint(file) >> 1
        if kind in (4, 5, 6):
            zigzag = _read_varint(file)
            integers[number] = zigzag >> 1 ^ -(zigzag & 1)
        elif kind == 12:
            _read_integers(file)
        elif kind == 8:
            file.seek(_read_varint(file), os.SEEK_CUR)
        elif kind > 2:
            file.seek({3: 1, 7: 8}[kind], os.SEEK_CUR)
    return integers


def _read_varint(file: BinaryIO) -> int:
    """Read an integer of 7 bits per byte, least significant first. The last byte is below 128."""
    value = shift = 0
    byte = 128
    while byte & 128 and shift < 64:
        byte = file.read(1)[0]
        value |= (byte & 127) << shift
        shift += 7
    return value


def columnar_records(contents: Contents) -> Numbered:
    """Decode the rows of a block. Their numbers are row numbers in the file."""
    arrow = _pyarrow_for("a block of Parquet rows")
    table = arrow.ipc.open_stream(arrow.py_buffer(contents.body)).read_all()
    # The last of equal names counts, as in JSON and CSV.
    names = enumerate(table.column_names)
    values = {name: _cells(table.column(at), arrow) for at, name in names}
    for row in range(table.num_rows):
        number = contents.first + row
        record = {name: column[row] for name, column in values.items()}
        bad_cells = [value for value in record.values() if isinstance(value, _Bad)]
        n_chars = sum(len(value) for value in record.values() if isinstance(value, str))
        if bad_cells:
            yield number, bad_cells[0].reason
        elif n_chars > MAX_RECORD_BYTES:
            yield number, TOO_LONG
        else:
            yield number, record


def _cells(column: Any, arrow: Any) -> list[Any]:
    """Convert a column to Python values. A cell that cannot be read becomes `_Bad`."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        if not arrow.types.is_string(column.type):
            return [_NOT_TEXT for _ in range(len(column))]
        values = column.cast(arrow.binary()).to_pylist()
    except (ArithmeticError, ValueError):
        # Find the row of the bad cell, such as a date after the year 9999.
        cells = (attempt(_read_cell, cell) for cell in column)
        values = [_Bad(cell) if isinstance(cell, str) else cell[0] for cell in cells]
    return [_decode(value) if isinstance(value, bytes) else value for value in values]


def _read_cell(cell: Any) -> tuple[Any]:
    return (cell.as_py(),)  # a tuple, because a text would be a reason


def _decode(cell: bytes) -> Any:
    """Decode a cell as UTF-8, or return `_NOT_TEXT`."""
    try:
        return cell.decode()
    except UnicodeDecodeError:
        return _NOT_TEXT


def _check_buffers(batch: Any, arrow: Any) -> None:
    """Refuse offsets and sizes outside of their buffers, which would crash pyarrow.

    Text is validated as bytes. Invalid UTF-8 is safe, and later drops only its row.
    """
    for column in batch.columns:
        kind = column.type
        if arrow.types.is_string(kind):
            column.view(arrow.binary()).validate(full=True)
        elif arrow.types.is_large_string(kind):
            column.view(arrow.large_binary()).validate(full=True)
        else:
            column.validate(full=True)


def _parts_of(batch: Any) -> Iterator[Any]:
    """Divide a batch into parts of about CHUNK_BYTES. A row that is too long is a separate part."""
    n_parts = max(1, math.ceil(batch.nbytes / CHUNK_BYTES))
    n_rows = max(1, math.ceil(batch.num_rows / n_parts))
    for start in range(0, batch.num_rows, n_rows):
        part = batch.slice(start, n_rows)
        if part.nbytes > MAX_RECORD_BYTES:
            yield from (part.slice(i, 1) for i in range(part.num_rows))
        else:
            yield part


def _pyarrow_for(what: str) -> Any:
    """Import pyarrow with its submodules."""
    with needing(
        "data", what, otherwise=", or export it as CSV or JSON lines", raised=DataError
    ):
        import pyarrow as pa
        import pyarrow.ipc
        import pyarrow.parquet
    return pa
