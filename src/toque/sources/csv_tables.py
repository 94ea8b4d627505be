"""CSV and TSV files, split into rows as `csv` parses them: a quoted line break splits no record.

An unclosed quote costs one line, not the rest of the file.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final

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
    attempted,
    pack,
    unreadable,
)

UNCLOSED = "unclosed quote"
WRONG_COUNT = "wrong number of fields"
MAX_GIVEN_UP = 20  # rows with an unclosed quote; of more, the quotes do not quote
_DELIMITERS = (",", "\t", ";", "|")
_NAMED_DELIMITERS = (*_DELIMITERS, "^", "~", ":", "#")  # the last four only if a first line says so
# Excel's first line for the delimiter, maybe quoted or padded with delimiters: "sep=;"
_NAMES_DELIMITER = re.compile(rb'"?sep=(\\t|\t|[,;|^~:#])"?[,;|\t ]*(?:\r\n|\n|\r)+', re.IGNORECASE)
_MAX_RESPLIT = 1 << 16
_MIN_FITTING = 0.7
_BOTH = (True, False)
_LINE_BREAK = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class Dialect:
    """Dialect of a table: how it is delimited and quoted, and the names in its first row."""

    delimiter: str
    quoted: bool
    columns: tuple[str, ...]
    share: float  # share of the first rows that have as many fields as the header
    n_rows: int  # first rows that were seen whole
    n_before: int = 0  # lines before the header: one that names the delimiter, and blank ones

    @property
    def fits(self) -> bool:
        """True if most of the first rows have as many fields as the header."""
        return self.share >= _MIN_FITTING

    @property
    def name(self) -> str:
        """Its common name."""
        return "tsv" if self.delimiter == "\t" else "csv"


def dialect_of(
    path: Path,
    start: bytes,
    *,
    whole: bool,
    n_known: Callable[[tuple[str, ...]], int],
    alone: Collection[str] = (),
) -> Dialect | None:
    """The dialect whose header has the most known columns; None when the first row is no header.

    A single name is a header if it is one of `alone`: the first line of a text looks the same. A
    first line such as "sep=;" names the delimiter.
    """
    named = _NAMES_DELIMITER.match(start)
    start = start[named.end() :] if named else start

    def dialects(delimiters: Iterable[str]) -> list[Dialect]:
        read = (_delimited(start, delimiter, whole=whole) for delimiter in delimiters)
        return [d for d in read if d and (len(d.columns) > 1 or d.columns[0] in alone)]

    found = dialects([named[1].decode().replace("\\t", "\t")]) if named else []
    found = found or dialects(_DELIMITERS)
    if not found and b"\n" not in start and not whole:
        raise DataError(
            f"{path} begins with a line of over {len(start):,} bytes that is no JSON. A recipe "
            "source is JSON, JSON lines, CSV, Parquet or web pages; check the export that wrote "
            "this file."
        )
    # The texts of a single column may hold commas without being quoted: tabs fit more of its rows.
    best = max(found, key=lambda d: (n_known(d.columns), len(d.columns), d.share), default=None)
    return replace(best, n_before=count_lines(named[0])) if best and named else best


def _delimited(start: bytes, delimiter: str, *, whole: bool) -> Dialect | None:
    """The dialect with this delimiter; None if the first row cannot be read."""
    end = row_end(start, 0, delimiter, quoted=True, last=whole)
    if end is None or end < 0:
        return None
    names = _fields(start[:end].decode(errors="replace"), delimiter, quoted=True)
    if not names:
        return None
    last = {name.strip(): at for at, name in enumerate(names)}
    columns = tuple(  # of equal names the last counts, as in JSON; the others are still to be named
        name.strip() + (f" (column {at + 1})" if last[name.strip()] != at else "")
        for at, name in enumerate(names)
    )
    rows = {q: _first_rows(start[end:], delimiter, quoted=q, last=whole) for q in _BOTH}
    n = len(columns)
    # Tab-separated files are often written without quoting: take whichever fits more rows.
    shares = {q: max(rows[q].share(n), rows[q].share(n + 1)) for q in _BOTH}
    quoted = delimiter == "," or shares[True] >= shares[False]
    found = rows[quoted]
    if n > 1 and found.share(n + 1) > found.share(n):
        # Every row ends in a delimiter, or R writes row names without a name for them.
        all_end = found.n_open[n + 1] == found.n_fields[n + 1]
        columns = (*columns, "") if all_end else ("", *columns)
    share = found.share(len(columns))
    return Dialect(delimiter, quoted, columns, share, found.n_fields.total())


@dataclass(frozen=True)
class _FirstRows:
    """How many fields the first rows below a header have."""

    n_fields: Counter[int]  # rows by their number of fields; 0 where they cannot be read
    n_open: Counter[int]  # those of them with nothing behind their last delimiter

    def share(self, n_columns: int) -> float:
        """Share of the rows that have so many fields; 0 when there is no row."""
        return self.n_fields[n_columns] / (self.n_fields.total() or 1)


def _first_rows(rows: bytes, delimiter: str, *, quoted: bool, last: bool) -> _FirstRows:
    """The rows in the start of a file that are known to be whole; `last` as of `row_end`."""
    found, at, most = _FirstRows(Counter(), Counter()), 0, HEAD_BYTES
    while (end := row_end(rows, at, delimiter, quoted=quoted, last=last)) and most >= at < end:
        most = most if at else end + HEAD_BYTES  # behind a long first row as many as elsewhere
        fields = _fields(rows[at:end].decode(errors="replace"), delimiter, quoted=quoted) or []
        found.n_fields[len(fields)] += 1
        found.n_open[len(fields)] += fields[-1:] == [""]
        at = end
    return found


def _row_pattern(delimiter: str, *, quoted: bool) -> re.Pattern[bytes]:
    d = re.escape(delimiter).encode()
    plain = rb"[^" + d + rb"\r\n]*+"
    if not quoted:
        return re.compile(plain + rb"(?:" + d + plain + rb")*+")
    field = rb'(?:"(?:[^"]++|"")*+"' + plain + rb'|(?!")' + plain + rb")"
    return re.compile(field + rb"(?:" + d + field + rb")*+", re.DOTALL)


_ROWS: Final = {(d, q): _row_pattern(d, quoted=q) for d in _NAMED_DELIMITERS for q in _BOTH}


def row_end(text: bytes, at: int, delimiter: str, *, quoted: bool, last: bool) -> int | None:
    """End of the row at `at`, with its line break; None if the text ends first, -1 in a quote.

    `last`: the text reaches the end of the file.
    """
    match = _ROWS[delimiter, quoted].match(text, at)
    if match is None:
        return -1
    end = match.end()
    if end == len(text):
        return end if last and end > at else None
    if text[end : end + 1] not in (b"\r", b"\n"):
        return -1  # only an opening quote stops a row elsewhere
    if text[end : end + 2] == b"\r\n":
        return end + 2
    if end + 1 == len(text) and text[end : end + 1] == b"\r" and not last:
        return None
    return end + 1


def table_blocks(path: Path, dialect: Dialect, *, encoding: str = UTF_8) -> Iterator[Block]:
    """Blocks of about a mebibyte of rows after the header; an unreadable row is one of its own."""
    delimiter, quoted = dialect.delimiter, dialect.quoted
    buffer, line, n_given_up, in_long_line = b"", 1, 0, False
    n_to_skip = 1 + dialect.n_before

    def block_of(rows: bytes) -> Iterator[Block]:
        nonlocal line
        if rows.strip():
            meta = {"columns": dialect.columns, "delimiter": delimiter, "quoted": quoted}
            yield pack(path, line, "table", rows, **meta)
        line += count_lines(rows)

    for chunk in chain(chunks(path, encoding=encoding), [None]):
        last = chunk is None
        if chunk is not None:
            following = _LINE_BREAK.search(chunk) if in_long_line else None
            if in_long_line and following is None:
                continue
            buffer += chunk[following.end() :] if following else chunk
            in_long_line = False
        at = start = 0
        while at < len(buffer):
            end = row_end(buffer, at, delimiter, quoted=quoted, last=last)
            n_bytes = (len(buffer) if end in (None, -1) else end) - at
            if end is not None and end > 0 and n_bytes <= MAX_RECORD_BYTES:
                at = end
                if n_to_skip:
                    line, start, n_to_skip = line + count_lines(buffer[start:at]), at, n_to_skip - 1
                elif at - start > CHUNK_BYTES:
                    yield from block_of(buffer[start:at])
                    start = at
                continue
            if not last and n_bytes <= MAX_RECORD_BYTES:
                break  # more may follow
            yield from block_of(buffer[start:at])
            following = _LINE_BREAK.search(buffer, at)
            in_long_line = following is None and not last
            yield unreadable(path, line, UNCLOSED if end == -1 and not in_long_line else TOO_LONG)
            n_given_up += 1
            if n_given_up > MAX_GIVEN_UP:
                raise DataError(
                    f"{path}: more than {MAX_GIVEN_UP} rows open a quote that never closes or run "
                    f"on for over {MAX_RECORD_BYTES >> 20} MiB (the last at line {line}). The file "
                    "is damaged, or its quotes are not quoting. Export it again with standard CSV "
                    "quoting, or as JSON lines."
                )
            line += 1
            at = start = following.end() if following else len(buffer)
        yield from block_of(buffer[start:at])
        buffer = buffer[at:]


def table_records(contents: Contents) -> Numbered:
    """The rows of a block by column name, or the reason why a row cannot be read."""
    text, meta = contents.body, contents.meta
    columns: Sequence[str] = meta["columns"]
    delimiter, quoted = meta["delimiter"], meta["quoted"]
    at, line = 0, contents.first
    while at < len(text):
        end = row_end(text, at, delimiter, quoted=quoted, last=True)
        if end is None or end <= at:
            end = _next_line(text, at)
            yield line, UNCLOSED
        else:
            row = text[at:end]
            if row.strip():
                values = attempted(_row_values, row, delimiter, quoted=quoted)
                if isinstance(values, list) and len(values) != len(columns):
                    values = WRONG_COUNT
                    if count_lines(row) > 1 and len(row) <= _MAX_RESPLIT:
                        # A stray quote has swallowed rows: drop the first line only.
                        end = _next_line(text, at)
                if isinstance(values, list):
                    yield line, dict(zip(columns, values, strict=True))
                else:
                    yield line, values
        line += count_lines(text[at:end])
        at = end


def _row_values(row: bytes, delimiter: str, *, quoted: bool) -> list[str] | str:
    try:
        fields = _fields(row.decode(), delimiter, quoted=quoted)
    except UnicodeDecodeError:
        return NOT_UTF_8
    return UNCLOSED if fields is None else fields


def _fields(row: str, delimiter: str, *, quoted: bool) -> list[str] | None:
    """The fields of one row; None if `csv` does not see exactly one row in it."""
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
    following = _LINE_BREAK.search(text, at)
    return following.end() if following else len(text)
