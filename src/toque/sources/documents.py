"""Documents: plain text files, each a document, and one field of tables and JSON records.

A document's rows are consecutive pieces. The split into training and validation hashes the document
and the piece number // 16, so that a single book has both sides while neighbours mostly stay
together. Files over `PART_BYTES` are read in parts of whole paragraphs, each with its own pieces.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from toque.sources.decompress import UTF_8, chunks
from toque.sources.layouts import READ, FileLayout, layout_with
from toque.sources.records import (
    Block,
    BlockExamples,
    Example,
    attempted,
    document_example,
    in_encoding,
    unpack,
    unused_in,
)

PART_BYTES = 4 << 20
NO_TEXT = "no text"
LOST_BYTES = "bytes that are not UTF-8"
"""The note that counts them; each costs a character."""
_MARK = "\ufeff"
_START = re.compile(r"\*\*\*\s*+START OF ", re.IGNORECASE)
_END = re.compile(r"^\*\*\*\s*+END OF .*", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_BLANK_LINES = re.compile(r"\n{4,}")
_TRAILING = re.compile(r"(?<![ \t])[ \t]++$", re.MULTILINE)
_MARKS: Final = re.compile(r"[^\w\s\x00-\u02ff]{31,}")
"""More than the thirty marks of UAX #15's stream-safe text; no mark is a letter or a blank."""
DOCUMENTS: Final = "toque.cooking.formats:text="
"""Beginning of its recorded names."""


@dataclass(frozen=True)
class TextReader:
    """Reads text files, plain or compressed with gzip or zstd; each is one document."""

    version: int = 1
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """Name in manifests; see `RecordReader`."""
        return in_encoding("toque.data.text:text_reader", self.encoding)

    def blocks(self, path: Path) -> Iterator[Block]:
        """The file whole, or in parts of about PART_BYTES that end with a paragraph or line.

        Raises:
            DataError: the file is missing, unreadable or damaged.
        """
        data, first_line, most = b"", 1, PART_BYTES
        for chunk in chunks(path, encoding=self.encoding):
            data += chunk
            while len(data) > most:
                cut = _last_break(data[:most])
                payload, data = data[:cut], data[cut:]
                yield Block(0, str(path), first_line, payload, last=False)
                first_line += payload.count(b"\n")
                # What is left of this part, one byte seen beyond it, and as much again.
                most = most - cut + 1 + PART_BYTES
        yield Block(0, str(path), first_line, data)

    def schema(self, path: Path) -> str:
        """Schema, the same for every file."""
        return "text"

    def examples(self, block: Block) -> BlockExamples:
        """The block's document, cleaned; an empty one is dropped."""
        notes: Counter[str] = Counter()
        found = attempted(_example, block, notes)
        if isinstance(found, str):
            return BlockExamples([], 1, 0, {found: [block.first_line]}, dict(notes))
        return BlockExamples([found], 1, 1, {}, dict(notes))


def _example(block: Block, notes: Counter[str]) -> Example | str:
    text = clean_document(block.payload, notes)
    return document_example(text, ends=block.last) if text.strip() else NO_TEXT


def clean_document(data: bytes, notes: Counter[str]) -> str:
    """A document's text without CR, control characters and the Project Gutenberg licence.

    Repairs are counted in `notes`.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        notes[LOST_BYTES] += text.count("\ufffd")
    text = text.removeprefix(_MARK).replace("\r\n", "\n").replace("\r", "\n")
    text, n_controls = _CONTROLS.subn("", text)
    if n_controls:
        notes["control characters removed"] += n_controls
    n_lines = text.count("\n")
    text = _END.sub("", text[_licence_end(text) :], count=1)
    if text.count("\n") < n_lines:
        notes["lines of Project Gutenberg's licence"] += n_lines - text.count("\n")
    return _BLANK_LINES.sub("\n\n\n", _TRAILING.sub("", text)).strip("\n")


def _licence_end(text: str) -> int:
    """End of the line that announces the start of a book; 0 when there is none."""
    start = _START.search(text)
    closing = text.find("***", start.end()) if start else -1
    return text.find("\n", closing + 3) + 1 if closing >= 0 else 0


def _last_break(data: bytes) -> int:
    """Place to cut a part: after its last blank line, else line, else space, else character."""
    half = len(data) // 2
    for mark in (b"\n\n", b"\n", b" "):
        at = data.rfind(mark, half)
        if at >= 0:
            return at + len(mark)
    at = len(data)
    while at > half and data[at - 1] & 0xC0 == 0x80:
        at -= 1
    return at - 1 if at > half and data[at - 1] & 0x80 else at


@dataclass(frozen=True)
class DocumentReader:
    """Reads the field `column` of every record; a `RecordReader`."""

    column: str
    version: int = 1
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """Name in manifests; see `RecordReader`."""
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

    def _layout(self, path: Path) -> FileLayout:
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
                found = attempted(_field_example, value, notes)
            if isinstance(found, Example):
                examples.append(found)
            else:
                dropped.setdefault(found, []).append(number)
        unread = contents.meta.get("unread", ())
        unused = unused_in((raw for _, raw in records), (self.column,), unread)
        return BlockExamples(examples, len(records), len(examples), dropped, dict(notes), unused)


def _field_example(text: str, notes: Counter[str]) -> Example | str:
    text = clean_document(text.encode("utf-8", "replace"), notes)
    return document_example(text) if text.strip() else NO_TEXT


def composed(text: str) -> str:
    r"""The text in NFC, composed in linear time.

    `unicodedata.normalize` sorts a run of combining marks by insertion, which takes quadratic time
    when their classes alternate: 256,000 marks took 19.5 s. So a long run is put in its canonical
    order first (UAX #15; a stable sort by class).

    >>> composed("cafe\u0301"), composed("\u0301\u0323" * 99) == "\u0323" * 99 + "\u0301" * 99
    ('café', True)
    """
    return unicodedata.normalize("NFC", _MARKS.sub(_in_order, text))


def _in_order(run: re.Match[str]) -> str:
    """A run with its marks in canonical order; some characters are made of several marks."""
    parts = (part for character in run.group() for part in unicodedata.normalize("NFD", character))
    groups = groupby(parts, key=lambda part: unicodedata.combining(part) > 0)
    return "".join(
        "".join(sorted(group, key=unicodedata.combining) if are_marks else group)
        for are_marks, group in groups
    )
