"""Parquet and Arrow files, read with pyarrow one batch of rows at a time.

A few kilobytes of Parquet may expand to a cell of gigabytes, and the metadata of the file may hide
it. Therefore the header of every page, which has the decompressed size, is checked before pyarrow
reads the page.
"""

from __future__ import annotations

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
_MAX_SCHEMA = 64 << 20
_BATCH_ROWS = 512
"""Rows per batch of Parquet. Large pages reduce it."""
_BATCH_BYTES = 512 << 20
"""Limit of a batch, if every row is as large as the largest page."""
_DAMAGE = (OSError, ValueError, LookupError, RecursionError)
"""Errors that pyarrow raises on a damaged file, in addition to its own exceptions."""
_MAX_PAGE_BYTES = 128 << 20
"""Limit of a decompressed page. Usual pages have about a mebibyte."""


class _Bad(NamedTuple):
    """A cell that cannot be read, and the reason for dropping its row."""

    reason: str


_NOT_TEXT = _Bad(NOT_UTF_8)


def columnar_format(start: bytes) -> str:
    """Recognise the format by the first bytes of a file: "parquet", "arrow" or ""."""
    if start.startswith(_PARQUET):
        return "parquet"
    size = int.from_bytes(start[4:8], "little")
    is_stream = start.startswith(_ARROW_STREAM) and 0 < size < _MAX_SCHEMA
    return "arrow" if is_stream or start.startswith(_ARROW_FILE) else ""


def columns_of(path: Path) -> dict[str, bool]:
    """Return the column names of a file, with True for columns of bytes such as pictures."""
    with _open_table(path) as (_, schema, _batches):
        return _columns_in(schema)


def _columns_in(schema: Any) -> dict[str, bool]:
    return {field.name: "binary" in str(field.type) for field in schema}


def decompressed_bytes(path: Path) -> int:
    """Read the decompressed bytes of a Parquet file from its metadata, without columns of bytes.

    Return 0 for a damaged file, which is refused later, when it is read.
    """
    arrow = _pyarrow_for(str(path))
    try:
        metadata = arrow.parquet.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
    except (arrow.ArrowException, *_DAMAGE):
        return 0
    texts = [
        name for name, holds_bytes in _columns_in(schema).items() if not holds_bytes
    ]
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return sum(
        chunk.total_uncompressed_size
        for group in groups
        for chunk in map(group.column, range(group.num_columns))
        if _is_of(chunk, texts)
    )


def columnar_blocks(path: Path, columns: Sequence[str]) -> Iterator[Block]:
    """Read blocks of about a mebibyte of rows with these columns."""
    first_row = 1
    with _open_table(path) as (arrow, schema, batches):
        unread = [name for name in schema.names if name not in columns]
        for batch in batches(list(columns)):
            _check(batch, arrow)
            for part in _parts_of(batch):
                if part.num_rows == 1 and part.nbytes > MAX_RECORD_BYTES:
                    yield unreadable_block(path, first_row, TOO_LONG)
                else:
                    sink = arrow.BufferOutputStream()
                    with arrow.ipc.new_stream(sink, part.schema) as writer:
                        writer.write_batch(part)
                    body = bytes(sink.getvalue())
                    yield pack(path, first_row, "parquet", body, unread=unread)
                first_row += part.num_rows


@contextmanager
def _open_table(
    path: Path,
) -> Iterator[tuple[Any, Any, Callable[[list[str]], Iterator[Any]]]]:
    """Return pyarrow, the schema of a file, and a function that reads batches of columns."""
    arrow = _pyarrow_for(str(path))
    with path.open("rb") as file:
        start = file.read(len(_ARROW_FILE))
        file.seek(max(0, path.stat().st_size - len(_ARROW_STREAM_END)))
        end = file.read()
    is_parquet = start.startswith(_PARQUET)
    try:
        if is_parquet:
            with arrow.parquet.ParquetFile(path, pre_buffer=False) as table:
                yield arrow, table.schema_arrow, partial(_parquet_batches, path, table)
            return
        if (
            start != _ARROW_FILE and end != _ARROW_STREAM_END
        ):  # pyarrow does not check this
            raise OSError("the end mark of an Arrow stream is missing")
        with arrow.OSFile(str(path)) as source:
            if start == _ARROW_FILE:
                reader = arrow.ipc.open_file(source)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                batches = reader = arrow.ipc.open_stream(source)
            names = list(enumerate(reader.schema.names))

            def select_columns(columns: list[str]) -> Iterator[Any]:
                indices = [
                    at for column in columns for at, name in names if name == column
                ]
                return (batch.select(indices) for batch in batches)

            yield arrow, reader.schema, select_columns
    except (arrow.ArrowException, *_DAMAGE) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        kind, remedy = "Arrow", "Save or download it again."
        if is_parquet:
            kind, remedy = "Parquet", "Download it again. Its last bytes must be PAR1."
        message = f"{path} is a damaged or truncated {kind} file ({reason}). {remedy}"
        raise DataError(message) from error


def _parquet_batches(path: Path, table: Any, columns: list[str]) -> Iterator[Any]:
    with path.open("rb") as file:
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            largest = 1
            for chunk in map(group.column, range(group.num_columns)):
                if _is_of(chunk, columns):
                    largest = max(largest, _largest_page(file, chunk))
            if largest > _MAX_PAGE_BYTES:
                raise DataError(
                    f"{path} has a page of {largest:,} bytes after decompression in its row group "
                    f"{number}. The limit is {_MAX_PAGE_BYTES:,}. Write the file with smaller "
                    "pages (pyarrow: data_page_size), without that row, or as JSON."
                )
            n_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // largest))
            yield from table.iter_batches(n_rows, [number], columns)


def _is_of(chunk: Any, columns: Sequence[str]) -> bool:
    """Check whether a column chunk of Parquet belongs to one of these columns or is inside one."""
    return any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in columns)


def _largest_page(file: BinaryIO, chunk: Any) -> int:
    """Return the decompressed bytes of the largest page of a column chunk."""
    offsets = (chunk.dictionary_page_offset, chunk.data_page_offset)
    position = min(offset for offset in offsets if offset)
    end = position + chunk.total_compressed_size
    largest = 0
    while position < end:
        file.seek(position)
        # 2 is the decompressed size, 3 the size in the file.
        header = _read_integers(file)
        largest = max(largest, header[2])
        position = file.tell() + max(0, header[3])
    return largest


def _read_integers(file: BinaryIO) -> dict[int, int]:
    """Read the integers of a struct in Thrift's compact protocol, by field number."""
    integers: dict[int, int] = {}
    number = 0
    while head := file.read(1)[0]:
        step, kind = divmod(head, 16)
        number = number + step if step else _varint(file) >> 1
        if kind in (4, 5, 6):
            value = _varint(file)
            integers[number] = value >> 1 ^ -(value & 1)
        elif kind == 12:
            _read_integers(file)
        elif (
            kind > 2
        ):  # a byte, a double or a text. Booleans are kinds 1 and 2, without a value.
            file.seek({3: 1, 7: 8, 8: 0}[kind] or _varint(file), os.SEEK_CUR)
    return integers


def _varint(file: BinaryIO) -> int:
    value = shift = 0
    byte = 128
    while byte & 128 and shift < 64:
        byte = file.read(1)[0]
        value |= (byte & 127) << shift
        shift += 7
    return value


def columnar_records(contents: Contents) -> Numbered:
    """Decode the rows of a block. Their numbers are the rows of the file."""
    arrow = _pyarrow_for("a block of Parquet rows")
    table = arrow.ipc.open_stream(arrow.py_buffer(contents.body)).read_all()
    # The last of equal names counts, as in JSON and CSV.
    names = enumerate(table.column_names)
    values = {name: _cells(table.column(at), arrow) for at, name in names}
    for row in range(table.num_rows):
        number = contents.first + row
        record = {name: column[row] for name, column in values.items()}
        bad = next(
            (value for value in record.values() if isinstance(value, _Bad)), None
        )
        if bad is not None:
            yield number, bad.reason
        elif (
            sum(len(v) for v in record.values() if isinstance(v, str))
            > MAX_RECORD_BYTES
        ):
            yield number, TOO_LONG
        else:
            yield number, record


def _cells(column: Any, arrow: Any) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        if not arrow.types.is_string(column.type):
            return [_NOT_TEXT] * len(column)
        values = column.cast(arrow.binary()).to_pylist()
    except (
        ArithmeticError,
        ValueError,
    ):  # e.g. a date after the year 9999: find its row
        cells = (attempt(_read_cell, cell) for cell in column)
        values = [_Bad(cell) if isinstance(cell, str) else cell[0] for cell in cells]
    return [_decode(value) if isinstance(value, bytes) else value for value in values]


def _read_cell(cell: Any) -> tuple[Any]:
    return (cell.as_py(),)  # a tuple, because a text would be a reason


def _decode(cell: bytes) -> Any:
    try:
        return cell.decode()
    except UnicodeDecodeError:
        return _NOT_TEXT


def _check(batch: Any, arrow: Any) -> None:
    """Refuse offsets and sizes outside of their buffers, which would crash pyarrow.

    Text is validated as bytes: invalid UTF-8 is safe, and costs only its row.
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
    n_parts = max(1, -(-batch.nbytes // CHUNK_BYTES))
    n_rows = max(1, -(-batch.num_rows // n_parts))
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
