"""Parquet files, read with pyarrow one batch of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toque.errors import DataError
from toque.sources.blocks import MAX_RECORD_BYTES, TOO_LONG, Header, Numbered, pack
from toque.sources.decompress import CHUNK_BYTES
from toque.sources.records import Block

MAGIC = b"PAR1"
_BATCH_ROWS = 512


def columns_of(path: Path) -> dict[str, bool]:
    """A file's column names, each with whether it holds bytes such as pictures.

    Raises:
        DataError: pyarrow is missing, or the file is damaged.
    """
    with _opened(path) as (_, file):
        return {field.name: "binary" in str(field.type) for field in file.schema_arrow}


def parquet_blocks(path: Path, columns: list[str]) -> Iterator[Block]:
    """Blocks of about a mebibyte of rows, with these columns only.

    Raises:
        DataError: pyarrow is missing, or the file is damaged.
    """
    first_row = 1
    with _opened(path) as (arrow, file):
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
            for part in parts_of(batch):
                yield pack(path, first_row, "parquet", serialised(part, arrow))
                first_row += part.num_rows


def parquet_records(header: Header, body: memoryview, first_row: int) -> Numbered:
    """The rows of a block by column name; their numbers are the rows' in the file."""
    del header
    arrow = pyarrow_for("a block of Parquet rows")
    table = arrow.ipc.open_stream(arrow.py_buffer(body)).read_all()
    values = {name: _cells(table.column(name), arrow) for name in table.column_names}
    for row in range(table.num_rows):
        record = {name: column[row] for name, column in values.items()}
        if any(isinstance(value, _NotText) for value in record.values()):
            yield first_row + row, "not UTF-8"
        elif sum(len(v) for v in record.values() if isinstance(v, str)) > MAX_RECORD_BYTES:
            yield first_row + row, TOO_LONG
        else:
            yield first_row + row, record


class _NotText:
    """A cell whose bytes are not UTF-8."""


def _cells(column: Any, arrow: Any) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        if not arrow.types.is_string(column.type):
            return [_NotText()] * len(column)
        raw = [bytes(cell.as_buffer()) if cell.is_valid else None for cell in column]
        return [_decoded(cell) for cell in raw]
    return [_decoded(v) if isinstance(v, bytes) else v for v in values]


def _decoded(cell: bytes | None) -> Any:
    try:
        return None if cell is None else cell.decode()
    except UnicodeDecodeError:
        return _NotText()


def parts_of(batch: Any) -> Iterator[Any]:
    """A batch in parts of about CHUNK_BYTES, at least a row each."""
    n_parts = max(1, -(-batch.nbytes // CHUNK_BYTES))
    n_rows = max(1, -(-batch.num_rows // n_parts))
    for start in range(0, batch.num_rows, n_rows):
        yield batch.slice(start, n_rows)


def serialised(batch: Any, arrow: Any) -> bytes:
    """A batch as an Arrow stream, with its schema."""
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """Pyarrow and the open file; an error while reading it becomes a DataError."""
    arrow = pyarrow_for(str(path))
    try:
        with arrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            yield arrow, file
    except (arrow.ArrowException, OSError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{path} is a damaged or truncated Parquet file ({why}). Fetch it again; its last "
            "bytes must be PAR1."
        ) from error


def pyarrow_for(what: str) -> Any:
    """The pyarrow module, with the submodules used here imported.

    Raises:
        DataError: pyarrow, which `what` needs, is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{what} needs pyarrow, which is not installed. Run: pip install 'toque[data]' (or "
            "export the table as CSV or JSON lines)."
        ) from error
    return pa
