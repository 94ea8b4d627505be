"""Readers of texts that are no recipes: plain files, documents, and prompts with their targets.

A document's rows are consecutive pieces. The split into training and validation hashes the document
and the piece number // 16, so that a single book has both sides while neighbours mostly stay
together. Files over `PART_BYTES` are read in parts of whole paragraphs, each with its own pieces.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import xxhash

from toque.sources.decompress import UTF_8, chunks
from toque.sources.layouts import FileLayout, layout_with, read_records
from toque.sources.records import (
    Block,
    BlockExamples,
    Example,
    attempted,
    document_example,
    in_encoding,
    is_filled,
)

PART_BYTES = 4 << 20
NO_TEXT, NO_PROMPT, NO_TARGET = "no text", "no prompt", "no target"
LOST_BYTES = "bytes that are not UTF-8"  # the note that counts them; each costs a character
_MARK = "\ufeff"
_START = re.compile(r"\*\*\*\s*+START OF ", re.IGNORECASE)
_END = re.compile(r"^\*\*\*\s*+END OF .*", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_BLANK_LINES = re.compile(r"\n{4,}")
_TRAILING = re.compile(r"(?<![ \t])[ \t]++$", re.MULTILINE)
# More than the thirty marks of UAX #15's stream-safe text; no mark is a letter or a blank.
_MARKS: Final = re.compile(r"[^\w\s\x00-\u02ff]{31,}")
# Beginnings of the recorded names of `DocumentReader` and `PairReader`.
DOCUMENTS: Final = "toque.cooking.formats:text="
PAIRS: Final = "toque.cooking.formats:pairs="
_UNPRINTABLE = dict.fromkeys([*range(9), 11, 12, *range(14, 32), 127])
Columns = Mapping[str, str | tuple[str, ...]]
"""The fields of a source by their role; a prompt may be made of several."""


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
        """The file whole, or in parts of about PART_BYTES that end with a paragraph or line."""
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
    """A document without CR, control characters and Project Gutenberg's licence; `notes` counts."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        notes[LOST_BYTES] += text.count("\ufffd")
    text = text.removeprefix(_MARK).replace("\r\n", "\n").replace("\r", "\n")
    text, n_controls = _CONTROLS.subn("", text)
    if n_controls:
        notes["control characters removed"] += n_controls
    n_lines, start = text.count("\n"), _START.search(text)
    closing = text.find("***", start.end()) if start else -1
    if closing >= 0:  # the line that announces the start of a book
        text = text[text.find("\n", closing + 3) + 1 :]
    text = _END.sub("", text, count=1)
    if text.count("\n") < n_lines:
        notes["lines of Project Gutenberg's licence"] += n_lines - text.count("\n")
    return _BLANK_LINES.sub("\n\n\n", _TRAILING.sub("", text)).strip("\n")


def _last_break(data: bytes) -> int:
    """Place to cut a part: after its last blank line, else line, else space, else character."""
    half = len(data) // 2
    for mark in (b"\n\n", b"\n", b" "):
        if (at := data.rfind(mark, half)) >= 0:
            return at + len(mark)
    at = len(data)
    while at > half and data[at - 1] & 0xC0 == 0x80:
        at -= 1
    return at - 1 if at > half and data[at - 1] & 0x80 else at


def composed(text: str) -> str:
    """The text in NFC, composed in linear time.

    `unicodedata.normalize` sorts a run of combining marks by insertion: 256,000 took 19.5 s. So a
    long run is put in its canonical order first (UAX #15; a stable sort by class).
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
        """Blocks of `path` by its layout."""
        return self._layout(path).blocks((self.column,))

    def schema(self, path: Path) -> str:
        """The file's layout, for the report."""
        return f"{self._layout(path).name} documents"

    def examples(self, block: Block) -> BlockExamples:
        """One document for each record with text, cleaned like a text file."""
        return read_records(block, self._example_of, {self.column})

    def _layout(self, path: Path) -> FileLayout:
        return layout_with(path, {"text": self.column}, encoding=self.encoding)

    def _example_of(self, record: Mapping[str, Any], notes: Counter[str]) -> Example | str:
        value = record.get(self.column)
        if not isinstance(value, str) or not value.strip():
            return NO_TEXT
        text = clean_document(value.encode("utf-8", "replace"), notes)
        return document_example(text) if text.strip() else NO_TEXT


@dataclass(frozen=True)
class PairReader:
    """Reads the fields `prompt` and `target` of every record; a `RecordReader`.

    A prompt of several fields is those that are filled, in this order, with a blank line between
    them. Only control characters are removed: these are the user's own texts. Pairs with the same
    prompt stay on one side of the split, because the model would have seen the answer.
    """

    prompt: str | tuple[str, ...]
    target: str
    version: int = 1
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """Name in manifests; see `RecordReader`."""
        columns = {"prompt": self.prompt, "target": self.target}
        return in_encoding(f"{PAIRS}{json.dumps(columns)}", self.encoding)

    @cached_property
    def _asked(self) -> tuple[str, ...]:
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt

    def blocks(self, path: Path) -> Iterator[Block]:
        """Blocks of `path` by its layout."""
        return self._layout(path).blocks((*self._asked, self.target))

    def schema(self, path: Path) -> str:
        """The file's layout, for the report."""
        return f"{self._layout(path).name} pairs"

    def examples(self, block: Block) -> BlockExamples:
        """One example for each record that has both texts."""
        return read_records(block, self._example_of, {*self._asked, self.target})

    def _layout(self, path: Path) -> FileLayout:
        columns = {f"prompt, part {n}": name for n, name in enumerate(self._asked, start=1)}
        if isinstance(self.prompt, str):
            columns = {"prompt": self.prompt}
        return layout_with(path, columns | {"target": self.target}, encoding=self.encoding)

    def _example_of(self, record: Mapping[str, Any], notes: Counter[str]) -> Example | str:
        parts: list[str] = []
        for name in self._asked:
            value = record.get(name)
            if isinstance(value, list) and all(isinstance(line, str) for line in value):
                value = "\n".join(value)  # choices
            part = _text(value, notes)
            if part and not part.isspace():
                parts.append(part)
            elif not part and is_filled(value):
                return f"{name} holds no text"  # which the question may need
        if not parts:
            return NO_PROMPT
        answer = record.get(self.target)
        several = answer.get("text") if isinstance(answer, dict) else answer
        if isinstance(several, list):  # SQuAD lists answers: the first is taken
            notes["answers beside a question's first left out"] += len(several) > 1
            answer = several[0] if several else None
        prompt, target = "\n\n".join(parts), _text(answer, notes)
        if not target or target.isspace():
            return NO_TARGET
        asked = prompt.casefold().encode()
        key = xxhash.xxh3_64_intdigest(asked)
        whole = xxhash.xxh3_64_intdigest(b"\0".join((asked, target.casefold().encode())))
        return Example(prompt, target, key, 0, whole)


def _text(value: object, notes: Counter[str]) -> str:
    """A field's text; numbers become text, anything else is empty."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    text = str(value).encode("utf-8", "replace").decode()
    if text.isprintable():
        return text
    cleaned = text.translate(_UNPRINTABLE)
    if cleaned != text:
        notes["control characters removed"] += 1
    return cleaned
