"""Layouts of record files (JSON, JSON lines, CSV, Excel, Parquet, Arrow), detected by content."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toque.errors import DataError
from toque.sources.columnar import (
    columnar_blocks,
    columnar_format,
    columnar_records,
    columns_of,
)
from toque.sources.csv_tables import dialect_of, table_blocks, table_records
from toque.sources.decompress import (
    SIGN_BYTES,
    UTF_8,
    head,
    is_workbook,
    longer_head,
    opened,
)
from toque.sources.json_records import (
    form_of,
    json_blocks,
    json_records,
    sample_records,
)
from toque.sources.records import (
    PER_REASON,
    Block,
    BlockExamples,
    Contents,
    Example,
    Numbered,
    attempt,
    shortened,
    unpack,
    unused_in,
)
from toque.sources.token_arrays import BROKEN_ARCHIVE
from toque.sources.workbooks import (
    workbook_blocks,
    workbook_columns,
    workbook_records,
)

Columns = Mapping[str, str | tuple[str, ...]]
"""Field names of a source by role. A prompt may have several fields."""
_CHECKED_BYTES = 8192  # number of bytes that are checked for control characters
# Bytes of JSON that are searched for a missing field. The search takes seconds.
_MAX_SEARCHED_BYTES = 256 << 20
_ALONE = ("text", "Text", "TEXT", "messages", "conversations")
"""Names accepted as the only column of a table. Plain text may begin with names such as "title"."""
# Control characters without tab, line breaks and separators, which are common in texts.
_CONTROLS = bytes([*range(9), *range(14, 27), 127])
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of pickles by protocol. Protocols 0 and 1 are text and obsolete since 2003."""
RECORD_FUNCTIONS: Mapping[str, Callable[[Contents], Numbered]] = {
    "json-lines": json_records,
    "json": json_records,
    "table": table_records,
    "parquet": columnar_records,
    "workbook": workbook_records,
    "unreadable": lambda block: iter([(block.first, str(block.meta["reason"]))]),
}
"""Functions that read the records of a block, by the block's kind."""
_DESCRIPTIONS = {
    "json-lines": "a JSON lines file",
    "json": "a JSON file of records",
    "csv": "a CSV table",
    "tsv": "a TSV table",
    "parquet": "a Parquet table",
    "arrow": "an Arrow table",
    "xlsx": "an Excel workbook",
}


def read_records(
    block: Block,
    make: Callable[[Mapping[str, Any], Counter[str]], Example | list[Example] | str],
    used: Collection[str],
) -> BlockExamples:
    """Read the records of a block and make examples from each.

    Args:
        block: Block from the reader's `blocks`.
        make: Function that makes the examples of a record and counts repairs. It may return the
            reason for dropping the record.
        used: Names of the fields that `make` uses.
    """
    examples: list[Example] = []
    per_record: list[int] = []
    dropped: dict[str, list[int]] = {}
    texts: dict[int, str] = {}
    contents = unpack(block)
    notes: Counter[str] = Counter(contents.meta.get("remarks"))
    records = list(RECORD_FUNCTIONS[contents.kind](contents))
    for number, record in records:
        result = record if isinstance(record, str) else attempt(make, record, notes)
        if isinstance(result, str):
            numbers = dropped.setdefault(result, [])
            if len(numbers) < PER_REASON and isinstance(record, dict):
                texts[number] = shortened(str(record))
            numbers.append(number)
        else:
            new_examples = result if isinstance(result, list) else [result]
            examples += new_examples
            per_record.append(len(new_examples))

    unread_columns = contents.meta.get("unread", ())
    return BlockExamples(
        examples,
        read=len(records),
        kept=len(per_record),
        dropped=dropped,
        notes=dict(notes),
        unused=unused_in((record for _, record in records), used, unread_columns),
        texts=texts,
        per_record=per_record,
    )


def columns_in_words(columns: Columns) -> str:
    """Format the columns of a source in the syntax of a configuration.

    >>> columns_in_words({"prompt": ("question", "hint"), "target": "answer"})
    'columns: {prompt: [question, hint], target: answer}'
    """
    entries = []
    for role, field in columns.items():
        value = field if isinstance(field, str) else f"[{', '.join(field)}]"
        entries.append(f"{role}: {value}")
    return f"columns: {{{', '.join(entries)}}}"


class UnknownFormatError(DataError):
    """Error for a file of an unknown format, which may be plain text."""


class RefusedFileError(DataError):
    """Error for a file that cannot be read with the current settings. In a folder it is skipped.

    Attributes:
        why: Short reason for the list of skipped files.
        columns: Suggested columns of the source with which the file can be read.
        fields: Field names of the file's records, if they are known.
    """

    def __init__(
        self,
        message: str,
        why: str,
        columns: Sequence[Columns] = (),
        fields: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.why = why
        self.columns = columns
        self.fields = fields


class TextRecordsError(DataError):
    """Error for records that are texts or pairs, not records of the domain.

    Attributes:
        columns: Fields of the records by their role in a source.
    """

    def __init__(self, message: str, columns: Columns) -> None:
        super().__init__(message)
        self.columns = dict(columns)


@dataclass(frozen=True)
class FileLayout:
    """Layout of a file of records."""

    name: str  # "json-lines", "json", "csv", "tsv", "parquet", "arrow" or "xlsx"
    fields: tuple[str, ...]
    """Column names. For JSON, the field names of the first records."""
    blocks: Callable[[Sequence[str]], Iterator[Block]]
    """Function that reads the blocks. For Parquet and Arrow it reads the given columns only."""
    # Columns of Parquet or Arrow that do not contain bytes.
    text_columns: tuple[str, ...] = ()
    sample: tuple[dict[str, Any], ...] = ()  # first JSON records that can be decoded
    in_dict: bool = False  # True if JSON records are the values of one object, by id
    # True if most of a table's first rows have as many fields as its header.
    fits: bool = True

    @property
    def described(self) -> str:
        """Description of the layout for errors, e.g. "a CSV table"."""
        return _DESCRIPTIONS[self.name]


def structured_layout(
    path: Path, start: bytes, *, is_entire_file: bool, encoding: str = UTF_8
) -> FileLayout | None:
    """Return the layout of a Parquet, Arrow, Excel or JSON file, or None for any other file.

    Args:
        path: The file.
        start: The file's first bytes in UTF-8.
        is_entire_file: Whether `start` is the entire file.
        encoding: The file's text encoding.
    """
    if name := columnar_format(start):
        columns = columns_of(path)
        texts = tuple(column for column, is_bytes in columns.items() if not is_bytes)
        blocks = partial(columnar_blocks, path)
        return FileLayout(name, tuple(columns), blocks, text_columns=texts)
    if is_workbook(start):
        fields = workbook_columns(path)
        return FileLayout("xlsx", fields, lambda _: workbook_blocks(path))
    if start.lstrip()[:1] not in (b"{", b"["):
        return None

    form = form_of(start, is_entire_file=is_entire_file)
    sample = tuple(sample_records(start, form, is_entire_file=is_entire_file))
    if not sample and (
        more := longer_head(
            path, start, is_entire_file=is_entire_file, encoding=encoding
        )
    ):
        # The first record is longer than the head of the file.
        return structured_layout(
            path, more[0], is_entire_file=more[1], encoding=encoding
        )
    return FileLayout(
        "json-lines" if form == "lines" else "json",
        tuple(dict.fromkeys(name for record in sample for name in record)),
        lambda _: json_blocks(path, form, encoding=encoding),
        sample=sample,
        in_dict=form == "dict",
    )


def table_layout(
    path: Path,
    start: bytes,
    *,
    is_entire_file: bool,
    n_known: Callable[[tuple[str, ...]], int],
    alone: Collection[str] = _ALONE,
    encoding: str = UTF_8,
) -> FileLayout | None:
    """Return the layout of a CSV or TSV file, or None for a file without a header.

    Args:
        path: The file.
        start: The file's first bytes in UTF-8.
        is_entire_file: Whether `start` is the entire file.
        n_known: Function that counts the known names in a header.
        alone: Names accepted as a table's only column.
        encoding: The file's text encoding.
    """
    choose_dialect = partial(dialect_of, path, n_known=n_known, alone=alone)
    dialect = choose_dialect(start, is_entire_file=is_entire_file)
    if dialect is None:
        return None
    if not dialect.n_rows and (
        more := longer_head(
            path, start, is_entire_file=is_entire_file, encoding=encoding
        )
    ):
        # The first row is longer than the head of the file.
        dialect = choose_dialect(more[0], is_entire_file=more[1]) or dialect
    blocks = partial(table_blocks, path, dialect, encoding=encoding)
    return FileLayout(
        dialect.name, dialect.columns, lambda _: blocks(), fits=dialect.fits
    )


def layout_with(
    path: Path, columns: Mapping[str, str], *, encoding: str = UTF_8
) -> FileLayout:
    """Return the layout of a file that must have these fields, given by role.

    Raises:
        UnknownFormatError: The format is unknown.
        DataError: A field is missing.
    """
    layout = layout_for(path, set(columns.values()), encoding=encoding)
    refuse_missing(path, layout, columns)
    return layout


def layout_for(path: Path, names: set[str], *, encoding: str = UTF_8) -> FileLayout:
    """Return the layout of a file. The field names help to recognise the header of a table.

    Raises:
        UnknownFormatError: The format is unknown.
    """
    start, is_entire_file = head(path, encoding=encoding)

    def n_known(fields: tuple[str, ...]) -> int:
        return len(names.intersection(fields))

    layout = structured_layout(
        path, start, is_entire_file=is_entire_file, encoding=encoding
    )
    layout = layout or table_layout(
        path,
        start,
        is_entire_file=is_entire_file,
        n_known=n_known,
        alone=names,
        encoding=encoding,
    )
    if layout is None:
        raise UnknownFormatError(
            f"{path} is not a file of records. It begins with {first_line(start)!r}. A source with "
            "columns must be JSON, JSON lines, CSV or TSV with a header row, Parquet or Arrow. To "
            "pretrain on plain text, set format: text for this source and remove its columns."
        )
    return layout


def refuse_missing(path: Path, layout: FileLayout, columns: Mapping[str, str]) -> None:
    """Raise a DataError if a column that the user named is not in the file."""
    absent = absent_fields(layout, set(columns.values()))
    missing = [f"{role}: {name}" for role, name in columns.items() if name in absent]
    if missing:
        raise DataError(
            f"{path} ({layout.described}) has no column for {', '.join(missing)}. "
            f"Its columns are {shown_names(layout.fields) or 'none'}. Correct the columns of this "
            "source in data.sources, or the templates in data.tasks."
        )


def absent_fields(layout: FileLayout, names: set[str]) -> set[str]:
    """Return the names of fields that no record has. A long JSON file is searched in part."""
    absent = names.difference(layout.fields)
    if not absent or not layout.name.startswith("json"):
        return absent

    # A JSON record may have a field that the first records do not have.
    n_records = 0
    n_bytes = 0
    for block in layout.blocks(()):
        contents = unpack(block)
        n_bytes += len(contents.body)
        for _, record in json_records(contents):
            if isinstance(record, dict) and record:
                n_records += 1
                absent.difference_update(record)
        if not absent or n_bytes >= _MAX_SEARCHED_BYTES:
            break
    # If all records are damaged, the reader reports why.
    return absent if n_records else set()


def shown_names(names: Sequence[str]) -> str:
    """Quote up to twenty names for an error."""
    quoted = [repr(name) for name in names[:20]]
    if len(names) > 20:
        quoted.append("...")
    return ", ".join(quoted)


def first_line(start: bytes) -> bytes:
    """Return the beginning of the first line that is not blank, for errors."""
    return next(line for line in start.splitlines() if line.strip())[:60]


def is_binary(start: bytes) -> bool:
    """Check whether bytes contain NUL, or more control characters than a damaged text.

    >>> is_binary(bytes(4)), is_binary("crème fraîche".encode("latin-1"))
    (True, False)
    """
    start = start[:_CHECKED_BYTES]
    n_controls = len(start) - len(start.translate(None, _CONTROLS))
    return b"\0" in start or n_controls > 1 + len(start) // 50


def is_columnar(path: Path) -> bool:
    """Check whether the file is a table in Parquet, Arrow or Excel, which is not plain text."""
    with opened(path) as (stream, *_):
        start = stream.read(SIGN_BYTES)
        return bool(columnar_format(start)) or is_workbook(start)


def is_pickle(path: Path) -> bool:
    """Check whether a file is a pickle, or a torch archive that contains a pickle."""
    with suppress(*BROKEN_ARCHIVE):  # the reader reports a broken archive
        with path.open("rb") as file:
            start = file.read(2)
            if start in _PICKLES:
                file.seek(-1, 2)
                return file.read(1) == b"."  # the opcode that ends every pickle
        if start == b"PK":
            with zipfile.ZipFile(path) as archive:
                return any(name.endswith(".pkl") for name in archive.namelist())
    return False


def refuse_pickle(path: Path, name: str) -> None:
    """Raise a DataError if the file is a pickle."""
    if is_pickle(path):
        raise DataError(
            f"{name} is a pickle. Toque does not read pickles, because a pickle can run any code. "
            "If you trust the file, convert its records to JSON lines (one json.dumps(record) per "
            "line) or Parquet, and name the new file in data.sources."
        )
