"""Plain text files as documents: one file, one document.

A document's rows are consecutive pieces. The split into training and validation hashes the document
and the piece number // 16, so that a single book has both sides while neighbours mostly stay
together. Files over `PART_BYTES` are read in parts of whole paragraphs, each with its own pieces.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toque.sources.decompress import UTF_8, InUtf8, opened
from toque.sources.records import (
    Block,
    BlockExamples,
    Example,
    attempted,
    document_example,
    in_encoding,
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


@dataclass(frozen=True)
class TextReader:
    """Reads text files, plain or compressed with gzip or zstd; each is one document."""

    version: int = 1
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """See `RecordReader`."""
        return in_encoding("toque.data.text:text_reader", self.encoding)

    def blocks(self, path: Path) -> Iterator[Block]:
        """The file whole, or in parts of about PART_BYTES that end with a paragraph or line.

        Raises:
            DataError: the file is missing, unreadable or damaged.
        """
        with opened(path) as (plain, _):
            stream = plain if self.encoding == UTF_8 else InUtf8(plain, self.encoding)
            first_line, rest = 1, b""
            while True:
                data = rest + stream.read(PART_BYTES)
                more = stream.read(1)
                if not more:
                    yield Block(0, str(path), first_line, data)
                    return
                cut = _last_break(data)
                payload, rest = data[:cut], data[cut:] + more
                yield Block(0, str(path), first_line, payload, last=False)
                first_line += payload.count(b"\n")

    def schema(self, path: Path) -> str:
        """The same for every file."""
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
    """Where the line ends that announces the start of a book; 0 when there is none."""
    start = _START.search(text)
    closing = text.find("***", start.end()) if start else -1
    return text.find("\n", closing + 3) + 1 if closing >= 0 else 0


def _last_break(data: bytes) -> int:
    """Where to cut a part: after its last blank line, else line, else space, else character."""
    half = len(data) // 2
    for mark in (b"\n\n", b"\n", b" "):
        at = data.rfind(mark, half)
        if at >= 0:
            return at + len(mark)
    at = len(data)
    while at > half and data[at - 1] & 0xC0 == 0x80:
        at -= 1
    return at - 1 if at > half and data[at - 1] & 0x80 else at
