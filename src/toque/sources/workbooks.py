"""Excel workbooks (.xlsx), read with openpyxl one row at a time.

A workbook is a table like CSV. The first row with a cell has the names of the columns. Further
sheets with the same names are read too, and the rows of other sheets are counted. Values are texts,
as in an exported CSV. A formula has the value that the spreadsheet program stored. The rows of
hidden sheets are read and counted, because a spreadsheet program does not show them.

A workbook is a ZIP archive of XML files. Its declared size is checked before it is read, and
defusedxml refuses XML entities, which can expand to gigabytes.
"""

from __future__ import annotations

import lzma
import re
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from toque.errors import DataError, needing
from toque.sources.csv_tables import unique_names
from toque.sources.decompress import (
    CHUNK_BYTES,
    MAX_EXPANSION,
    MAX_RECORD_BYTES,
    MIN_BOMB_BYTES,
)
from toque.sources.records import TOO_LONG, Block, Contents, Numbered, pack

_MAX_ROWS: Final = 1_048_576
"""Maximum number of rows of a sheet in Excel."""
_MAX_TITLE_CHARS: Final = 40
_VISIBLE: Final = "visible"
_SHEETS: Final = "xl/worksheets/"
_TEXTS: Final = "xl/sharedStrings.xml"
_FORMULA: Final = re.compile(rb"<(?:[\w.-]{1,32}:)?f[\s/>]")
_OVERLAP: Final = 40
"""Bytes of the previous chunk in which a formula may begin."""
_NO_VALUE: Final = "formula without a value (open and save the workbook in Excel)"
_DAMAGE: Final = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, OSError, RuntimeError,
    SyntaxError, TypeError, ValueError, lzma.LZMAError, struct.error, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip
"""Exceptions that openpyxl and its libraries raise for a damaged workbook."""


def workbook_columns(path: Path) -> tuple[str, ...]:
    """Return the names of the columns.

    Raises:
        DataError: The workbook has no rows, is damaged, or expands like a decompression bomb.
    """
    with _open_workbook(path) as workbook:
        for sheet in workbook.worksheets:
            for _, cells in _filled_rows(path, sheet):
                return _names(cells)
    raise DataError(
        f"{path} is an Excel workbook without rows. Check the export, or remove it from "
        "data.sources."
    )


def workbook_bytes(path: Path) -> int:
    """Return the decompressed size of the sheets and texts, or 0 for a damaged workbook."""
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(
                info.file_size
                for info in archive.infolist()
                if info.filename.startswith(_SHEETS) or info.filename == _TEXTS
            )
    except _DAMAGE:
        return 0


def workbook_blocks(path: Path) -> Iterator[Block]:
    """Read blocks of about a mebibyte of rows. The rows of all sheets are numbered on."""
    writer = _BlockWriter(path)
    columns: tuple[str, ...] = ()
    n_before = 0
    with _open_workbook(path) as workbook:
        uncalculated = _uncalculated_rows(path, workbook)
        for number, sheet in enumerate(workbook.worksheets):
            rows = _filled_rows(path, sheet)
            last_row, header = next(rows, (0, []))
            columns = columns or _names(header)
            title = sheet.title[:_MAX_TITLE_CHARS]
            if header and _names(header) != columns:
                remark = f"rows of the sheet {title!r}, which has other columns"
                writer.remarks[remark] += 1 + sum(1 for _ in rows)
                continue

            for row, cells in rows:
                if n_empty := row - last_row - 1:
                    writer.remarks["empty rows"] += n_empty
                last_row = row
                if sheet.sheet_state != _VISIBLE:
                    writer.remarks[f"rows of the hidden sheet {title!r}"] += 1
                record: dict[str, str] | str = _record(columns, cells)
                if row in uncalculated[number]:
                    record = _NO_VALUE
                yield from writer.add(n_before + row, record)
            n_before += last_row
    yield from writer.flush()


def workbook_records(contents: Contents) -> Numbered:
    """Decode the rows of a block."""
    yield from msgspec.json.decode(contents.body)


@dataclass
class _BlockWriter:
    """Writer of rows into blocks."""

    path: Path
    remarks: Counter[str] = field(default_factory=Counter)
    """Counts of remarks for the report, which the next block has."""
    _rows: list[tuple[int, dict[str, str] | str]] = field(default_factory=list)
    _n_chars: int = 0

    def add(self, number: int, record: dict[str, str] | str) -> Iterator[Block]:
        """Add a row, or the reason why it cannot be read. Return a block if it is full."""
        if not isinstance(record, str):
            n_chars = sum(map(len, record.values()))
            if n_chars > MAX_RECORD_BYTES:
                record = TOO_LONG
            self._n_chars += n_chars
        self._rows.append((number, record))
        if self._n_chars > CHUNK_BYTES:
            yield from self.flush()

    def flush(self) -> Iterator[Block]:
        """Return a block of the rows and remarks since the last block."""
        if self._rows or self.remarks:
            first = self._rows[0][0] if self._rows else 1
            body = msgspec.json.encode(self._rows)
            yield pack(self.path, first, "workbook", body, remarks=dict(self.remarks))
        self._rows = []
        self._n_chars = 0
        self.remarks.clear()


def _names(header: list[str]) -> tuple[str, ...]:
    """Return the names of the columns in a header. A column without a name has its number."""
    names = [name.strip() or _number_name(i) for i, name in enumerate(header)]
    return unique_names(names)


def _number_name(index: int) -> str:
    return f"(column {index + 1})"


def _record(columns: tuple[str, ...], cells: list[str]) -> dict[str, str]:
    """Return the values of a row by column. Cells after the last column are named by number."""
    names = [*columns]
    names += [_number_name(i) for i in range(len(columns), len(cells))]
    values = cells + [""] * (len(names) - len(cells))
    return dict(zip(names, values, strict=True))


def _filled_rows(path: Path, sheet: Any) -> Iterator[tuple[int, list[str]]]:
    """Read the rows with a cell that is not empty: their numbers, and their cells as texts.

    Raises:
        DataError: A row has a number that Excel does not allow.
    """
    sheet.reset_dimensions()  # the declared dimensions may be too small
    for number, row in enumerate(sheet.iter_rows(values_only=True), start=1):
        if number > _MAX_ROWS:
            raise DataError(
                f"The sheet {sheet.title[:_MAX_TITLE_CHARS]!r} of {path} has more than "
                f"{_MAX_ROWS:,} rows, the limit of Excel. Export it as CSV."
            )
        cells = [_text(value) for value in row]
        while cells and not cells[-1].strip():
            cells.pop()
        if cells:
            yield number, cells


def _text(value: object) -> str:
    """Format the value of a cell as in a CSV file.

    >>> _text(3.0), _text(0.1 + 0.2), _text(datetime(2026, 5, 1)), _text(timedelta(minutes=90))
    ('3', '0.3', '2026-05-01', '1:30:00')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return format(value, ".15g")  # the digits that Excel has
    if isinstance(value, datetime) and value.time() == time():
        return value.date().isoformat()
    if isinstance(value, datetime):
        return value.isoformat(" ", "seconds")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        minutes, seconds = divmod(round(value.total_seconds()), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}"
    return str(value)


def _uncalculated_rows(path: Path, workbook: Any) -> list[set[int]]:
    """Return the rows of each sheet with formulas without values, if none of them has a value.

    Spreadsheet programs store a value with every formula, which may be an empty text. Other
    programs store formulas only.
    """
    sheets = workbook.worksheets
    if not _has_formulas(path):
        return [set() for _ in sheets]
    with _open_workbook(path, data_only=False) as other:
        return [
            _rows_without_values(*pair)
            for pair in zip(sheets, other.worksheets, strict=True)
        ]


def _rows_without_values(values_sheet: Any, formulas_sheet: Any) -> set[int]:
    """Return the rows with formulas of a sheet, or an empty set if a formula has a value."""
    rows = set()
    for sheet in (values_sheet, formulas_sheet):
        sheet.reset_dimensions()
    pairs = zip(
        values_sheet.iter_rows(max_row=_MAX_ROWS, values_only=True),
        formulas_sheet.iter_rows(max_row=_MAX_ROWS),
        strict=True,
    )
    for number, (values, cells) in enumerate(pairs, start=1):
        for value, cell in zip(values, cells, strict=True):
            if cell.data_type == "f":
                if value is not None:
                    return set()
                rows.add(number)
    return rows


def _has_formulas(path: Path) -> bool:
    """Check whether a sheet has a formula."""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.filename.startswith(_SHEETS):
                continue
            with archive.open(info) as stream:
                end = b""
                while chunk := stream.read(CHUNK_BYTES):
                    if _FORMULA.search(end + chunk):
                        return True
                    end = chunk[-_OVERLAP:]
    return False


@contextmanager
def _open_workbook(path: Path, *, data_only: bool = True) -> Iterator[Any]:
    """Open a workbook with the values of its formulas, or with the formulas.

    Raises:
        DataError: The workbook is damaged, or expands like a decompression bomb.
    """
    openpyxl = _openpyxl_for(str(path))
    try:
        _refuse_bomb(path)
        with path.open("rb") as file:
            workbook = openpyxl.load_workbook(
                file, read_only=True, data_only=data_only, keep_links=False
            )
            try:
                yield workbook
            finally:
                workbook.close()
    except _DAMAGE as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise DataError(
            f"{path} is a damaged Excel workbook, or has XML that Toque does not read ({reason}). "
            "Open it in a spreadsheet program and save it again as .xlsx, or export it as CSV."
        ) from error


def _refuse_bomb(path: Path) -> None:
    """Refuse a workbook that expands like a decompression bomb, by its declared size.

    zipfile never reads more than the declared size of a member.
    """
    packed_bytes = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        plain_bytes = sum(info.file_size for info in archive.infolist())
    if plain_bytes > max(MIN_BOMB_BYTES, MAX_EXPANSION * packed_bytes):
        raise DataError(
            f"{path} expands from {packed_bytes:,} to {plain_bytes:,} bytes, over {MAX_EXPANSION} "
            "times as many. It is damaged or a decompression bomb. Remove it from data.sources, or "
            "export it as CSV if you trust it."
        )


def _openpyxl_for(what: str) -> Any:
    """Import openpyxl and the package that protects it from hostile XML."""
    with needing("data", what, otherwise=", or export it as CSV", raised=DataError):
        import defusedxml  # noqa: F401  # openpyxl uses it if it is installed
        import openpyxl
    # It warns about features that have no effect on values, such as data validation.
    warnings.filterwarnings("ignore", module=r"openpyxl\.")
    return openpyxl
