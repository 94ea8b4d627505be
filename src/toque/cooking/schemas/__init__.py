"""Readers of recipe collections as their users have them, recognised by content.

`recipe_reader` reads every known schema; `schema_of` names a file's; `reader_spec` names a
reader for files whose columns the user has named.
"""

from __future__ import annotations

from typing import Any

from toque.cooking.schemas.columns import TextRecordsError
from toque.cooking.schemas.detect import UnknownFormatError, is_columnar
from toque.cooking.schemas.reader import (
    FormatReader,
    reader_named,
    reader_spec,
    recipe_reader,
    schema_of,
)

__all__ = [
    "FormatReader",
    "TextRecordsError",
    "UnknownFormatError",
    "is_columnar",
    "reader_spec",
    "recipe_reader",
    "schema_of",
]


def __getattr__(name: str) -> Any:
    """Readers with columns are loaded by name, as every reader is, so the name carries them."""
    return reader_named(name)
