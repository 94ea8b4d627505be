"""Layout detection by content: JSON, JSON lines, CSV, TSV, Parquet and Arrow, of any domain."""

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
from toque.sources.columnar import columnar_blocks, columnar_format, columnar_records, columns_of
from toque.sources.csv_tables import dialect_of, table_blocks, table_records
from toque.sources.decompress import UTF_8, head, more_of, opened
from toque.sources.json_records import form_of, json_blocks, json_records, sample_records
from toque.sources.records import (
    PER_REASON,
    Block,
    BlockExamples,
    Contents,
    Example,
    Numbered,
    attempted,
    shortened,
    unpack,
    unused_in,
)
from toque.sources.token_arrays import BROKEN_ARCHIVE

Columns = Mapping[str, str | tuple[str, ...]]
"""The fields of a source by their role; a prompt may be made of several."""
_SEEN_BYTES = 8192
_MOST_SEARCHED = 256 << 20  # bytes of JSON that are searched for a field; they take seconds
# Columns that make rows without any other; a recipe's would be the first line of many a text.
_ALONE = ("text", "Text", "TEXT", "messages", "conversations")
_CONTROLS = bytes([*range(9), *range(14, 27), 127])  # without separators, of which texts have many
# By protocol; those before 2 are text, and obsolete since 2003.
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
READ: Mapping[str, Callable[[Contents], Numbered]] = {
    "json-lines": json_records,
    "json": json_records,
    "table": table_records,
    "parquet": columnar_records,
    "unreadable": lambda contents: iter([(contents.first, str(contents.meta["reason"]))]),
}
"""Kind of a block to the function that reads its records."""
_IN_WORDS = {
    "json-lines": "a file of JSON lines",
    "json": "a JSON file of records",
    "csv": "a CSV table",
    "tsv": "a table of tab-separated values",
    "parquet": "a table of Parquet",
    "arrow": "a table of Arrow",
}
"""Layouts in an error's words."""


def read_records(
    block: Block,
    make: Callable[[Mapping[str, Any], Counter[str]], Example | list[Example] | str],
    used: Collection[str],
) -> BlockExamples:
    """Examples of each record of a block by `make`, which counts its repairs, or a reason."""
    examples: list[Example] = []
    per_record: list[int] = []
    dropped: dict[str, list[int]] = {}
    texts: dict[int, str] = {}
    notes: Counter[str] = Counter()
    contents = unpack(block)
    records = list(READ[contents.kind](contents))
    for number, record in records:
        found = record if isinstance(record, str) else attempted(make, record, notes)
        if not isinstance(found, str):
            made = found if isinstance(found, list) else [found]
            examples += made
            per_record.append(len(made))
            continue
        numbers = dropped.setdefault(found, [])
        if len(numbers) < PER_REASON and not isinstance(record, str):
            texts[number] = shortened(str(record))
        numbers.append(number)
    unused = unused_in((raw for _, raw in records), used, contents.meta.get("unread", ()))
    return BlockExamples(
        examples, len(records), len(per_record), dropped, dict(notes), unused, texts, per_record
    )


def columns_in_words(columns: Columns) -> str:
    """Columns of a source as a configuration has them.

    >>> columns_in_words({"prompt": ("question", "hint"), "target": "answer"})
    'columns: {prompt: [question, hint], target: answer}'
    """
    fields = {
        part: field if isinstance(field, str) else f"[{', '.join(field)}]"
        for part, field in columns.items()
    }
    return f"columns: {{{', '.join(f'{part}: {field}' for part, field in fields.items())}}}"


class UnknownFormatError(DataError):
    """A file of none of the known formats; it may be plain text."""


class RefusedFileError(DataError):
    """A file cannot be read as it is; `why`, in a few words: among others it is left out.

    `columns` are what would let it be read, as the message writes them by `columns_in_words`.
    """

    def __init__(self, message: str, why: str, columns: Sequence[Columns] = ()) -> None:
        super().__init__(message)
        self.why, self.columns = why, columns


class TextRecordsError(DataError):
    """The records are texts or pairs, whose `columns` are named as a source's, not the domain's."""

    def __init__(self, message: str, columns: Mapping[str, str | tuple[str, ...]]) -> None:
        super().__init__(message)
        self.columns = dict(columns)


@dataclass(frozen=True)
class FileLayout:
    """Layout of a file of records."""

    name: str  # "json-lines", "json", "csv", "tsv", "parquet" or "arrow"
    fields: tuple[str, ...]  # column names; of JSON, the field names of the first records
    blocks: Callable[[Sequence[str]], Iterator[Block]]  # of Parquet and Arrow, of these columns
    text_columns: tuple[str, ...] = ()  # those of Parquet or Arrow that do not hold bytes
    sample: tuple[dict[str, Any], ...] = ()  # the first records of JSON that can be decoded
    in_dict: bool = False  # True if JSON records are the values of one object, by id
    fits: bool = True  # True if most of a table's first rows have as many fields as its header

    @property
    def described(self) -> str:
        """The layout in an error's words, e.g. "a CSV table"."""
        return _IN_WORDS[self.name]


def structured_layout(
    path: Path, start: bytes, *, whole: bool, encoding: str = UTF_8
) -> FileLayout | None:
    """The layout of a Parquet, Arrow or JSON file by its first bytes, in UTF-8; None for others."""
    if name := columnar_format(start):
        columns = columns_of(path)
        return FileLayout(
            name,
            tuple(columns),
            lambda read: columnar_blocks(path, read),
            text_columns=tuple(column for column, is_data in columns.items() if not is_data),
        )
    if start.lstrip()[:1] not in (b"{", b"["):
        return None
    form = form_of(start, whole=whole)
    sample = tuple(sample_records(start, form, whole=whole))
    if not sample and (more := more_of(path, start, whole=whole, encoding=encoding)):
        return structured_layout(path, more[0], whole=more[1], encoding=encoding)
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
    whole: bool,
    n_known: Callable[[tuple[str, ...]], int],
    alone: Collection[str] = _ALONE,
    encoding: str = UTF_8,
) -> FileLayout | None:
    """The layout of a CSV or TSV file by its known columns; None without a header.

    `alone` are the names of a table's only column.
    """
    dialect = dialect_of(path, start, whole=whole, n_known=n_known, alone=alone)
    if dialect is None:
        return None
    if not dialect.n_rows and (more := more_of(path, start, whole=whole, encoding=encoding)):
        start, whole = more
        dialect = dialect_of(path, start, whole=whole, n_known=n_known, alone=alone) or dialect
    blocks = partial(table_blocks, path, dialect, encoding=encoding)
    return FileLayout(dialect.name, dialect.columns, lambda _: blocks(), fits=dialect.fits)


def layout_with(path: Path, columns: Mapping[str, str], *, encoding: str = UTF_8) -> FileLayout:
    """The layout of a file with these fields, by their role; UnknownFormatError if it has none."""
    layout = layout_for(path, set(columns.values()), encoding=encoding)
    refuse_missing(path, layout, columns)
    return layout


def layout_for(path: Path, names: set[str], *, encoding: str = UTF_8) -> FileLayout:
    """The layout of a file that should have fields of these names, which tell a table's header."""
    start, whole = head(path, encoding=encoding)

    def n_known(fields: tuple[str, ...]) -> int:
        return len(names.intersection(fields))

    layout = structured_layout(path, start, whole=whole, encoding=encoding)
    layout = layout or table_layout(
        path, start, whole=whole, n_known=n_known, alone=names, encoding=encoding
    )
    if layout is None:
        raise UnknownFormatError(
            f"{path} is no file of records: it begins {first_line(start)!r}. A source with columns "
            "is JSON, JSON lines, CSV or TSV with a header row, Parquet or Arrow. For plain text "
            "to pretrain on, give the source format: text, without columns."
        )
    return layout


def refuse_missing(path: Path, layout: FileLayout, columns: Mapping[str, str]) -> None:
    """Raise when a column that the user named is not in the file."""
    absent = absent_fields(layout, set(columns.values()))
    gone = [f"{role}: {name}" for role, name in columns.items() if name in absent]
    if gone:
        raise DataError(
            f"{path} is {layout.described} without the column named for {', '.join(gone)}. "
            f"Its columns are {shown_names(layout.fields) or 'none'}. Correct the columns named "
            "for this source (a configuration has them in data.sources), or the templates of "
            "data.tasks."
        )


def absent_fields(layout: FileLayout, names: set[str]) -> set[str]:
    """Those of these fields that no record of a file has, of one of JSON none in its beginning."""
    absent = names.difference(layout.fields)
    if not absent or not layout.name.startswith("json"):
        return absent
    # A record of JSON may have a field that the first ones lack: read until each is found.
    n_whole, n_bytes = 0, 0
    for block in layout.blocks(()):
        contents = unpack(block)
        n_bytes += len(contents.body)
        for _, record in json_records(contents):
            if isinstance(record, dict) and record:
                n_whole += 1
                absent.difference_update(record)
        if not absent or n_bytes >= _MOST_SEARCHED:
            break
    return absent if n_whole else set()  # of damaged records alone the reader gives the reasons


def shown_names(names: Sequence[str]) -> str:
    """The first twenty of them, quoted, for errors."""
    return ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")


def first_line(start: bytes) -> bytes:
    """The beginning of a file's first line that is not blank, for errors."""
    return next(line for line in start.splitlines() if line.strip())[:60]


def is_binary(start: bytes) -> bool:
    """True if bytes hold NUL, which no text does, or more control characters than damage explains.

    >>> is_binary(bytes(4)), is_binary("crème fraîche".encode("latin-1"))
    (True, False)
    """
    start = start[:_SEEN_BYTES]
    controls = len(start) - len(start.translate(None, _CONTROLS))
    return b"\0" in start or controls > 1 + len(start) // 50


def is_columnar(path: Path) -> bool:
    """True if the file is Parquet or Arrow, which cannot be read as plain text."""
    with opened(path) as (stream, *_):
        return bool(columnar_format(stream.read(8)))


def is_pickle(path: Path) -> bool:
    """True if a file is a pickle, or torch's archive around one."""
    with suppress(*BROKEN_ARCHIVE):  # the reader reports it
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
    """Raise when the file is a pickle."""
    if is_pickle(path):
        raise DataError(
            f"{name} is a pickle, and reading one runs whatever code it brings, so it is not read. "
            "On a machine you trust, write its records as JSON lines once (one json.dumps(record) "
            "a line) or as Parquet, and name that file in data.sources."
        )
