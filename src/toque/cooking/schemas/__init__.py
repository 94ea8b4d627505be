"""Readers of recipe collections, recognised by their content.

`RecipeReader` reads every known schema; `reader_for` gives the reader of files whose columns the
user has named.
"""

from __future__ import annotations

from toque.cooking.schemas.columns import prompt_of
from toque.cooking.schemas.reader import RecipeReader, reader_for
from toque.sources.layouts import RefusedFileError, TextRecordsError

__all__ = ["RecipeReader", "RefusedFileError", "TextRecordsError", "prompt_of", "reader_for"]
