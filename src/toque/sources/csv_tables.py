"""CSV and TSV files. As in the module `csv`, a quoted line break does not end a row.

An unclosed quote drops one line, not the rest of the file.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toque.errors import DataError
from toque.sources.decompress import (
    CHUNK_BYTES,
    HEAD_BYTES,
    MAX_RECORD_BYTES,
    UTF_8,
    chunks,
    count_lines,
)
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

UNCLOSED = "unclosed quote"
WRONG_COUNT = "wrong number of fields"
MAX_GIVEN_UP = 20
"""Maximum number of unreadable rows. More of them mean that quotes are ordinary characters."""
_DELIMITERS = (",", "\t", ";", "|")
_NAMED_DELIMITERS = (*_DELIMITERS, "^", "~", ":", "#")
"""All delimiters. The last four need a first line such as "sep=#"."""
# Excel's first line with the delimiter: "sep=;", perhaps quoted or padded with delimiters.
_NAMES_DELIMITER = re.compile(
    rb'"?sep=(\\t|\t|[,;|^~:#])"?[,;|\t ]*(?:\r\n|\n|\r)+', re.IGNORECASE
)
_MAX_RESPLIT = 1 << 16
"""Maximum bytes of a row that is divided into lines because it has a wrong number of fields."""
_MIN_FITTING = 0.7
_QUOTED_OR_NOT = (True, False)
_LINE_BREAK = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class Dialect:
    """Dialect of a table: delimiter, quoting and column names."""

    delimiter: str
    quoted: bool
    columns: tuple[str, ...]
    share: float
    """Fraction of the first rows that have as many fields as the header."""
    n_rows: int
    """Number of complete rows in the sample."""
    n_before: int = 0
    """Number of lines before the header: blank lines, or a line with the delimiter."""

    @property
    def fits(self) -> bool:
        """True if most of the first rows have as many fields as the header."""
        return self.share >= _MIN_FITTING

    @property
    def name(self) -> str:
        """Name of the dialect: csv or tsv."""
        return "tsv" if self.delimiter == "\t" else "csv"


def dialect_of(
    path: Path,
    start: bytes,
    *,
    is_entire_file: bool,
    n_known: Callable[[tuple[str, ...]], int],
    alone: Collection[str] = (),
) -> Dialect | None:
    """Choose the dialect with the most known columns. Return None if the first row is not a header.

    A header may have a single column only if its name is in `alone`, because the first line of a
    text looks like such a header. A first line such as "sep=;" names the delimiter.

    Raises:
        DataError: The first line is too long.
    """
    sep_line = _NAMES_DELIMITER.match(start)
    if sep_line:
        start = start[sep_line.end() :]

    def possible_dialects(delimiters: Iterable[str]) -> list[Dialect]:
        dialects: list[Dialect] = []
        for delimiter in delimiters:
            d = _dialect_with(start, delimiter, is_entire_file=is_entire_file)
            if d and (len(d.columns) > 1 or d.columns[0] in alone):
                dialects.append(d)
        return dialects

    possible: list[Dialect] = []
    if sep_line:
        possible = possible_dialects([sep_line[1].decode().replace("\\t", "\t")])
    possible = possible or possible_dialects(_DELIMITERS)
    if not possible and b"\n" not in start and not is_entire_file:
        raise DataError(
            f"{path} begins with a line of over {len(start):,} bytes that is not JSON. Recipes are "
            "read from JSON, JSON lines, CSV, Parquet and web pages. Check the export that wrote "
            "this file."
        )
    # A table of one column may have unquoted commas in its texts. Tabs then fit more of its rows.
    best = max(
        possible,
        key=lambda d: (n_known(d.columns), len(d.columns), d.share),
        default=None,
    )
    if best is None or sep_line is None:
        return best
    return replace(best, n_before=count_lines(sep_line[0]))


def _dialect_with(
    start: bytes, delimiter: str, *, is_entire_file: bool
) -> Dialect | None:
    """Return the dialect with a delimiter, or None if the first row cannot be read."""
    end = row_end(start, 0, delimiter, quoted=True, last=is_entire_file)
    if end is None or end < 0:
        return None
    names = _fields(start[:end].decode(errors="replace"), delimiter, quoted=True)
    if not names:
        return None
    columns = unique_names([name.strip() for name in names])

    rows = {
        quoted: _first_rows(start[end:], delimiter, quoted=quoted, last=is_entire_file)
        for quoted in _QUOTED_OR_NOT
    }
    n = len(columns)  # a row may have one more field, see below
    # Tab-separated files are often written without quoting. Use the form that fits more rows.
    shares = {q: max(rows[q].share(n), rows[q].share(n + 1)) for q in _QUOTED_OR_NOT}
    quoted = delimiter == "," or shares[True] >= shares[False]
    first_rows = rows[quoted]
    if n > 1 and first_rows.share(n + 1) > first_rows.share(n):
        # Either every row ends in a delimiter, or R wrote row names without a column name.
        ends_open = first_rows.n_open[n + 1] == first_rows.n_fields[n + 1]
        columns = (*columns, "") if ends_open else ("", *columns)
    share = first_rows.share(len(columns))
    return Dialect(delimiter, quoted, columns, share, first_rows.n_fields.total())


def unique_names(names: list[str]) -> tuple[str, ...]:
    """Add the column number to all equal names except the last, which counts, as in JSON."""
    last_index = {name: i for i, name in enumerate(names)}
    return tuple(
        name if last_index[name] == i else f"{name} (column {i + 1})"
        for i, name in enumerate(names)
    )


@dataclass(frozen=True)
class _FirstRows:
    """Counts of fields in the first rows below a header."""

    n_fields: Counter[int]
    """Number of rows by number of fields. Unreadable rows count as rows with 0 fields."""
    n_open: Counter[int]
    """Number of rows that end with a delimiter, by number of fields."""

    def share(self, n_columns: int) -> float:
        """Compute the fraction of the rows that have a given number of fields."""
        return self.n_fields[n_columns] / (self.n_fields.total() or 1)


def _first_rows(rows: bytes, delimiter: str, *, quoted: bool, last: bool) -> _FirstRows:
    """Count the fields of the complete rows at the start of a file. See `row_end` for `last`."""
    counts = _FirstRows(Counter(), Counter())
    at = 0
    limit = HEAD_BYTES
    while at <= limit:
        end = row_end(rows, at, delimiter, quoted=quoted, last=last)
        if end is None or end <= at:
            break
        if at == 0:
            limit = end + HEAD_BYTES  # a long first row does not reduce the sample
        row = rows[at:end].decode(errors="replace")
        fields = _fields(row, delimiter, quoted=quoted) or []
        counts.n_fields[len(fields)] += 1
        if fields[-1:] == [""]:
            counts.n_open[len(fields)] += 1
        at = end
    return counts


def _row_pattern(delimiter: str, *, quoted: bool) -> re.Pattern[bytes]:
    """Return a pattern that matches a row without its line break.

    It stops at an unclosed quote.
    """
    d = re.escape(delimiter).encode()
    plain = rb"[^" + d + rb"\r\n]*+"
    if not quoted:
        return re.compile(plain + rb"(?:" + d + plain + rb")*+")
    field = rb'(?:"(?:[^"]++|"")*+"' + plain + rb'|(?!")' + plain + rb")"
    return re.compile(field + rb"(?:" + d + field + rb")*+", re.DOTALL)


_ROWS = {
    (d, q): _row_pattern(d, quoted=q) for d in _NAMED_DELIMITERS for q in _QUOTED_OR_NOT
}


def row_end(
    text: bytes, at: int, delimiter: str, *, quoted: bool, last: bool
) -> int | None:
    """Find the end of the row at `at`, after its line break.

    Return None if the row may continue after the text, and -1 if a quote is not closed. `last` is
    True if the text reaches the end of the file.
    """
    match = _ROWS[delimiter, quoted].match(text, at)
    if match is None:
        return -1
    end = match.end()
    if end == len(text):
        return end if last and end > at else None
    if text[end : end + 1] not in (b"\r", b"\n"):
        return -1  # only an opening quote stops a row before a line break
    if text[end : end + 2] == b"\r\n":
        return end + 2
    if end + 1 == len(text) and text[end : end + 1] == b"\r" and not last:
        return None  # CR may be half of CR LF
    return end + 1


def table_blocks(
    path: Path, dialect: Dialect, *, encoding: str = UTF_8
) -> Iterator[Block]:
    """Read blocks of about a mebibyte of rows. An unreadable row is a separate block."""
    splitter = _TableSplitter(path, dialect)
    for chunk in chunks(path, encoding=encoding):
        yield from splitter.feed(chunk)
    yield from splitter.feed(b"", last=True)


class _TableSplitter:
    """Splitter of a table into blocks of rows."""

    def __init__(self, path: Path, dialect: Dialect) -> None:
        self._path = path
        self._dialect = dialect
        self._buffer = b""
        self._line = 1
        self._n_unreadable = 0
        self._in_long_line = False
        self._n_to_skip = 1 + dialect.n_before  # the header and the lines before it

    def feed(self, chunk: bytes, *, last: bool = False) -> Iterator[Block]:
        """Return blocks of the rows that end in a chunk. `last` is True after the last chunk."""
        if self._in_long_line:
            line_break = _LINE_BREAK.search(chunk)
            if line_break is None:
                return
            chunk = chunk[line_break.end() :]
            self._in_long_line = False
        buffer = self._buffer + chunk
        delimiter, quoted = self._dialect.delimiter, self._dialect.quoted

        start = at = 0  # start of the next block, and of the next row
        while at < len(buffer):
            end = row_end(buffer, at, delimiter, quoted=quoted, last=last)
            stop = len(buffer) if end is None or end < 0 else end
            is_incomplete = stop != end
            is_too_long = stop - at > MAX_RECORD_BYTES
            if is_incomplete and not is_too_long and not last:
                break  # the rest of the row is in the next chunk
            if is_incomplete or is_too_long:
                # Drop one line of the row. The next line may begin a readable row.
                yield from self._flush(buffer[start:at])
                line_break = _LINE_BREAK.search(buffer, at)
                self._in_long_line = line_break is None and not last
                is_unclosed = end == -1 and not self._in_long_line
                yield self._unreadable_row(UNCLOSED if is_unclosed else TOO_LONG)
                at = start = line_break.end() if line_break else len(buffer)
                continue

            at = stop
            if self._n_to_skip:
                self._n_to_skip -= 1
                self._line += count_lines(buffer[start:at])
                start = at
            elif at - start > CHUNK_BYTES:
                yield from self._flush(buffer[start:at])
                start = at
        yield from self._flush(buffer[start:at])
        self._buffer = buffer[at:]

    def _flush(self, rows: bytes) -> Iterator[Block]:
        """Return a block of rows, unless all are blank."""
        if rows.strip():
            dialect = self._dialect
            yield pack(
                self._path,
                self._line,
                "table",
                rows,
                columns=dialect.columns,
                delimiter=dialect.delimiter,
                quoted=dialect.quoted,
            )
        self._line += count_lines(rows)

    def _unreadable_row(self, reason: str) -> Block:
        """Return a block for an unreadable row.

        Raises:
            DataError: Too many rows are unreadable.
        """
        self._n_unreadable += 1
        if self._n_unreadable > MAX_GIVEN_UP:
            raise DataError(
                f"{self._path}: more than {MAX_GIVEN_UP} rows have an unclosed quote or over "
                f"{MAX_RECORD_BYTES >> 20} MiB (the last at line {self._line}). The file is "
                "damaged, or uses quotes as ordinary characters. Export it again with standard "
                "CSV quoting, or as JSON lines."
            )
        block = unreadable_block(self._path, self._line, reason)
        self._line += 1
        return block


def table_records(contents: Contents) -> Numbered:
    """Decode the rows of a block by column name, or give the reason why a row cannot be read."""
    text, meta = contents.body, contents.meta
    columns: Sequence[str] = meta["columns"]
    delimiter, quoted = meta["delimiter"], meta["quoted"]
    at = 0
    line = contents.first
    while at < len(text):
        end = row_end(text, at, delimiter, quoted=quoted, last=True)
        if end is None or end <= at:
            end = _next_line(text, at)
            yield line, UNCLOSED
        elif not text[at:end].isspace():
            row = text[at:end]
            values = attempt(_row_values, row, delimiter, quoted=quoted)
            if isinstance(values, str):
                yield line, values
            elif len(values) == len(columns):
                yield line, dict(zip(columns, values, strict=True))
            else:
                yield line, WRONG_COUNT
                if count_lines(row) > 1 and len(row) <= _MAX_RESPLIT:
                    # A stray quote may have joined several rows. Drop only the first line.
                    end = _next_line(text, at)
        line += count_lines(text[at:end])
        at = end


def _row_values(row: bytes, delimiter: str, *, quoted: bool) -> list[str] | str:
    """Decode the fields of a row, or return the reason why it cannot be read."""
    try:
        fields = _fields(row.decode(), delimiter, quoted=quoted)
    except UnicodeDecodeError:
        return NOT_UTF_8
    return UNCLOSED if fields is None else fields


def _fields(row: str, delimiter: str, *, quoted: bool) -> list[str] | None:
    """Split a row into fields. Return None if `csv` does not read exactly one row."""
    bare = row.rstrip("\r\n")
    if not quoted or '"' not in bare:
        return bare.split(delimiter)
    csv.field_size_limit(MAX_RECORD_BYTES)
    try:
        rows = list(csv.reader([bare], delimiter=delimiter))
    except csv.Error:
        return None
    return rows[0] if len(rows) == 1 else None


def _next_line(text: bytes, at: int) -> int:
    """Return the position after the next line break, or the end of the text."""
    line_break = _LINE_BREAK.search(text, at)
    return line_break.end() if line_break else len(text)
