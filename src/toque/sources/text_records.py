"""Documents in one field of tables and JSON records: each record is a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from toque.sources.blocks import unpack, unused_in
from toque.sources.decompress import UTF_8
from toque.sources.detect import READ, Layout, layout_with
from toque.sources.plain_text import NO_TEXT, clean_document
from toque.sources.records import (
    Block,
    BlockExamples,
    Example,
    attempted,
    document_example,
    in_encoding,
)

DOCUMENTS: Final = "toque.cooking.formats:text="
"""Beginning of its recorded names."""


@dataclass(frozen=True)
class DocumentReader:
    """Reads the field `column` of every record; a `RecordReader`."""

    column: str
    version: int = 1
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """See `RecordReader`."""
        return in_encoding(f"{DOCUMENTS}{self.column}", self.encoding)

    def blocks(self, path: Path) -> Iterator[Block]:
        """Blocks of `path` by its layout.

        Raises:
            DataError: the file is of no known kind, has no such field, or is damaged.
        """
        return self._layout(path).blocks((self.column,))

    def schema(self, path: Path) -> str:
        """The file's layout, for the report."""
        return f"{self._layout(path).name} documents"

    def _layout(self, path: Path) -> Layout:
        return layout_with(path, {"text": self.column}, encoding=self.encoding)

    def examples(self, block: Block) -> BlockExamples:
        """One document for each record with text, cleaned like a text file."""
        examples: list[Example] = []
        dropped: dict[str, list[int]] = {}
        notes: Counter[str] = Counter()
        contents = unpack(block)
        records = list(READ[contents.kind](contents))
        for number, raw in records:
            value = None if isinstance(raw, str) else raw.get(self.column)
            found: Example | str = raw if isinstance(raw, str) else NO_TEXT
            if isinstance(value, str) and value.strip():
                found = attempted(_example, value, notes)
            if isinstance(found, Example):
                examples.append(found)
            else:
                dropped.setdefault(found, []).append(number)
        unread = contents.meta.get("unread", ())
        unused = unused_in((raw for _, raw in records), (self.column,), unread)
        return BlockExamples(examples, len(records), len(examples), dropped, dict(notes), unused)


def _example(text: str, notes: Counter[str]) -> Example | str:
    text = clean_document(text.encode("utf-8", "replace"), notes)
    return document_example(text) if text.strip() else NO_TEXT
