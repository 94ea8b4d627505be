"""Recipe format detection by content: a file's layout, and whose schema its records have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from toque.cooking.schemas.columns import (
    refuse_cut_schema,
    schema_of_records,
    shape_of,
)
from toque.cooking.schemas.html_pages import is_page, page_blocks
from toque.cooking.schemas.mealmaster import is_mealmaster, mealmaster_blocks
from toque.sources.decompress import UTF_8, head
from toque.sources.layouts import (
    Layout,
    RefusedFileError,
    UnknownFormatError,
    first_line,
    structured_layout,
    table_layout,
)
from toque.sources.records import Block

_MARKUP_NAMES = ("@type", "@graph", "@context")


@dataclass(frozen=True)
class Recognised:
    """A file's schema, by its name in the report, and its blocks."""

    schema: str
    blocks: Callable[[], Iterator[Block]]


def recognise(path: Path, columns: Mapping[str, str], *, encoding: str = UTF_8) -> Recognised:
    """The recipe schema of `path`.

    Args:
        path: the file, plain or compressed.
        columns: "title", "ingredients", "steps" to the fields that hold them, where the user
            has named them.
        encoding: of text files.

    Raises:
        UnknownFormatError: it is of no known kind.
        TextRecordsError: its records hold a text, or prompts and answers, instead of recipes.
        DataError: it cannot be read, or lacks a part of a recipe.
    """
    start, whole = head(path, encoding=encoding)
    layout = structured_layout(path, start, whole=whole, encoding=encoding)
    if layout is None and is_page(start):
        return Recognised("web-page", lambda: page_blocks(path, encoding=encoding))
    if layout is None and is_mealmaster(start):
        return Recognised("mealmaster", lambda: mealmaster_blocks(path, encoding=encoding))
    layout = layout or table_layout(path, start, whole=whole, n_known=_n_parts, encoding=encoding)
    if layout is None:
        raise _unknown(path, start)
    if layout.name in ("csv", "tsv"):
        prose = _n_parts(layout.fields) == 0 and not (layout.fits and _are_names(layout.fields))
        if prose and not columns:
            raise _unknown(path, start)  # prose has commas too
    if whole and start.strip() in (b"{}", b"[]"):
        raise RefusedFileError(f"{path} is JSON without a single record in it.", "no record in it")
    json_ld = any(name in layout.fields for name in _MARKUP_NAMES)
    if not layout.name.startswith("json") or (layout.sample and not json_ld):
        refuse_cut_schema(path, layout, columns)
    shape = shape_of(layout.fields, tuple(columns.items()))
    needed = {*layout.text_columns, *shape.roles.values()}
    read = [name for name in layout.fields if name in needed]
    return Recognised(_schema(layout, columns), lambda: layout.blocks(read))


def _schema(layout: Layout, columns: Mapping[str, str]) -> str:
    if layout.name.startswith("json"):
        schema = schema_of_records(layout.sample, in_dict=layout.in_dict)
    else:
        schema = shape_of(layout.fields, tuple(columns.items())).schema
    named = columns and layout.name not in ("parquet", "arrow")
    return layout.name if schema == "generic" or named else schema


def _n_parts(fields: tuple[str, ...]) -> int:
    """How many of a recipe's three parts these fields hold."""
    return 3 - len(shape_of(fields).missing)


def _are_names(fields: tuple[str, ...]) -> bool:
    """Whether a first row reads as column names rather than as prose."""
    return all(len(name) <= 40 and len(name.split()) <= 4 for name in fields)


def _unknown(path: Path, start: bytes) -> UnknownFormatError:
    return UnknownFormatError(
        f"{path} is of no known recipe format: it begins {first_line(start)!r}. Recipes are read "
        "from JSON, JSON lines, CSV or TSV with a header row, Parquet, web pages with schema.org "
        "data, and Meal-Master text. For plain text to pretrain on, give the source format: text."
    )
