"""What a source file is, by its content: how it is laid out and whose schema its records have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from toque.cooking.schemas.columns import refuse_cut_schema, schema_of_records, shape_of
from toque.cooking.schemas.html_pages import is_page, page_blocks
from toque.cooking.schemas.mealmaster import is_mealmaster, mealmaster_blocks
from toque.errors import DataError
from toque.sources.csv_tables import Dialect, dialect_of, table_blocks
from toque.sources.decompress import head
from toque.sources.hf_datasets import arrow_blocks, arrow_columns, is_arrow
from toque.sources.json_records import json_blocks, layout_of, sample_records
from toque.sources.parquet import MAGIC, columns_of, parquet_blocks
from toque.sources.records import Block

_MARKUP_NAMES = ("@type", "@graph", "@context")


class UnknownFormatError(DataError):
    """A file that is of none of the formats; it may be plain text."""


@dataclass(frozen=True)
class Recognised:
    """A file's schema, by the name the report says it with, and its blocks."""

    schema: str
    blocks: Callable[[], Iterator[Block]]


def recognise(path: Path, columns: Mapping[str, str]) -> Recognised:
    """What `path` holds.

    Args:
        path: the file, plain or compressed.
        columns: "title", "ingredients", "steps" to the fields that hold them, where the user
            has named them; or "text" to the field of documents; or "prompt" and "target".

    Raises:
        UnknownFormatError: it is of no known kind.
        TextRecordsError: its records hold a text, or prompts and answers, and no recipe.
        DataError: it cannot be read, or lacks a part of a recipe.
    """
    start, whole = head(path)
    bare = start.lstrip()
    if start.startswith(MAGIC):
        return _columnar(path, columns, "parquet", columns_of(path), parquet_blocks)
    if is_arrow(start):
        return _columnar(path, columns, "arrow", arrow_columns(path), arrow_blocks)
    if bare[:1] in (b"{", b"["):
        return _json(path, start, columns, whole=whole)
    if is_page(start):
        return Recognised("web-page", lambda: page_blocks(path))
    if is_mealmaster(start):
        return Recognised("mealmaster", lambda: mealmaster_blocks(path))
    dialect = dialect_of(path, start, whole=whole)
    if dialect is None:
        raise _unknown(path, start)
    shape = shape_of(dialect.columns)
    if len(shape.missing) == 3 and not columns and not (dialect.fits and _are_names(dialect)):
        raise _unknown(path, start)  # prose has commas too
    what = "a table of tab-separated values" if dialect.name == "tsv" else "a CSV table"
    refuse_cut_schema(path, what, dialect.columns, columns)
    schema = dialect.name if shape.schema == "generic" or columns else shape.schema
    return Recognised(schema, lambda: table_blocks(path, dialect))


def is_columnar(path: Path) -> bool:
    """Whether the file is Parquet or Arrow, which no reader of plain text can read.

    Raises:
        DataError: it cannot be read.
    """
    start, _ = head(path, 8)
    return start.startswith(MAGIC) or is_arrow(start)


def _json(path: Path, start: bytes, columns: Mapping[str, str], *, whole: bool) -> Recognised:
    layout = layout_of(start, whole=whole)
    sample = sample_records(start, layout, whole=whole)
    fields = list(dict.fromkeys(name for record in sample for name in record))
    marked = any(name in fields for name in _MARKUP_NAMES)
    if sample and not marked:
        what = "a file of JSON lines" if layout.form == "lines" else "a JSON file of records"
        refuse_cut_schema(path, what, fields, columns)
    schema: str = schema_of_records(sample, in_dict=layout.form == "dict")
    if schema == "generic" or columns:
        schema = "json-lines" if layout.form == "lines" else "json"
    return Recognised(schema, lambda: json_blocks(path, layout))


def _columnar(
    path: Path,
    columns: Mapping[str, str],
    kind: str,
    there: Mapping[str, bool],
    blocks: Callable[[Path, list[str]], Iterator[Block]],
) -> Recognised:
    """A table of Parquet or Arrow; of `there`, the columns, those of bytes are not read."""
    refuse_cut_schema(path, f"a table of {kind.capitalize()}", list(there), columns)
    shape = shape_of(tuple(there), tuple(columns.items()))
    needed = set(shape.roles.values())
    read = [name for name, is_data in there.items() if name in needed or not is_data]
    if "text" in columns or "target" in columns:
        read = list(columns.values())
    schema = kind if shape.schema == "generic" else shape.schema
    return Recognised(schema, lambda: blocks(path, read))


def _are_names(dialect: Dialect) -> bool:
    """Whether a first row reads as column names rather than as prose."""
    return all(len(name) <= 40 and len(name.split()) <= 4 for name in dialect.columns)


def _unknown(path: Path, start: bytes) -> UnknownFormatError:
    first = next(line for line in start.splitlines() if line.strip())[:60]
    return UnknownFormatError(
        f"{path} is of no known recipe format: it begins {first!r}. Recipes are read from JSON, "
        "JSON lines, CSV or TSV with a header row, Parquet, web pages with schema.org data, and "
        "Meal-Master text. For plain text to pretrain on, give the source format: text."
    )
