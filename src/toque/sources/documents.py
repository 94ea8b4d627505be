r"""Readers of texts that are not recipes: plain files, documents, and prompts with targets.

A column of a source is a field of its records, or a template of fields: "{question}\n\n{hint}".

A document is divided into rows. A hash of the document and of row number // 16 assigns each row to
training or validation. So even a single book has both, and neighbours mostly stay together. Files
over `PART_BYTES` are divided into parts after a paragraph.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from string import Formatter
from typing import Any

import xxhash

from toque.errors import ConfigError
from toque.sources.decompress import UTF_8, chunks
from toque.sources.layouts import Columns, FileLayout, layout_with, read_records
from toque.sources.records import (
    Block,
    BlockExamples,
    Example,
    add_encoding,
    attempt,
    document_example,
    is_filled,
    is_not_finite,
    replace_lone_surrogates,
)

PART_BYTES = 4 << 20
NO_TEXT = "no text"
NO_PROMPT = "no prompt"
NO_TARGET = "no target"
LOST_BYTES = "bytes that are not UTF-8"
CONTROLS = "control characters removed"
SEPARATORS = "vertical tabs, form feeds and other separators made line breaks"
HALF_CHARACTERS = "halves of characters (lone surrogates) made U+FFFD"
_MARK = "\ufeff"
# The lines around a book of Project Gutenberg, and the licence between two books. The line before a
# book may have line breaks. Its length is limited, so that the search stays fast.
_GUTENBERG = r"\*\*\*\s{0,9}+%s OF TH(?:E|IS)(?: COPYRIGHTED)? PROJECT GUTENBERG"
_BEGINS = _GUTENBERG % "START" + r"(?>.{0,999}?\*\*\*)[^\n]{0,99}+\n"
_BOOK = re.compile(_BEGINS, re.DOTALL | re.IGNORECASE)
_LICENCE = re.compile(
    "^" + _GUTENBERG % "END" + rf".*?(?:{_BEGINS}|\Z)",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1b\x7f]")
# Vertical tab, form feed, the separators of ASCII, U+0085, U+2028 and U+2029.
_SEPARATORS = re.compile("[\x0b\x0c\x1c-\x1f\x85\u2028\u2029]")
_BLANK_LINES = re.compile(r"\n{4,}")
_TRAILING = re.compile(r"(?<![ \t])[ \t]++$", re.MULTILINE)
# More combining marks than the thirty that UAX #15 allows in stream-safe text.
_MARKS = re.compile(r"[^\w\s\x00-\u02ff]{31,}")
# Beginnings of the recorded names of `DocumentReader` and `PairReader`.
DOCUMENTS = "toque.cooking.formats:text="
PAIRS = "toque.cooking.formats:pairs="


@dataclass(frozen=True)
class TextReader:
    """Reader of text files, plain or compressed. Each file is a document."""

    version: int = 2
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """Name in manifests, see `RecordReader`."""
        return add_encoding("toque.data.text:text_reader", self.encoding)

    def blocks(self, path: Path) -> Iterator[Block]:
        """Read a file as one block, or as parts of about PART_BYTES after a paragraph or line."""
        data = b""
        first_line = 1
        limit = PART_BYTES
        for chunk in chunks(path, encoding=self.encoding):
            data += chunk
            while len(data) > limit:
                cut = _last_break(data[:limit])
                payload, data = data[:cut], data[cut:]
                yield Block(0, str(path), first_line, payload, last=False)
                first_line += payload.count(b"\n")
                # An early cut does not shift the limits of later parts in the file.
                limit = limit - cut + 1 + PART_BYTES
        yield Block(0, str(path), first_line, data)

    def schema(self, path: Path) -> str:
        """Return the schema, equal for all files."""
        return "text"

    def examples(self, block: Block) -> BlockExamples:
        """Clean the document of a block. An empty one is dropped."""
        notes: Counter[str] = Counter()
        example = attempt(_make_example, block, notes)
        if isinstance(example, str):
            return BlockExamples([], 1, 0, {example: [block.first_line]}, dict(notes))
        return BlockExamples([example], 1, 1, {}, dict(notes))


def _make_example(block: Block, notes: Counter[str]) -> Example | str:
    text = clean_document(block.payload, notes)
    return document_example(text, ends=block.last) if text.strip() else NO_TEXT


def clean_document(data: bytes, notes: Counter[str]) -> str:
    """Decode a document and remove control characters and Project Gutenberg's licence.

    Line breaks become LF, and at most two blank lines are consecutive. `notes` counts the changes.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        notes[LOST_BYTES] += text.count("\ufffd")
    text = text.removeprefix(_MARK).replace("\r\n", "\n").replace("\r", "\n")
    text, n_separators = _SEPARATORS.subn("\n", text)
    text, n_controls = _CONTROLS.subn("", text)
    if n_separators:
        notes[SEPARATORS] += n_separators
    if n_controls:
        notes[CONTROLS] += n_controls

    n_lines = text.count("\n")
    text = _LICENCE.sub("", text)
    # A file may have a preface before the first line of a book.
    if book := _BOOK.search(text):
        text = text[book.end() :]
    n_removed = n_lines - text.count("\n")
    if n_removed:
        notes["lines of Project Gutenberg's licence"] += n_removed
    return _BLANK_LINES.sub("\n\n\n", _TRAILING.sub("", text)).strip("\n")


def _last_break(data: bytes) -> int:
    """Find the last position after a blank line, a line, a space or a character, in this order.

    Breaks in the first half are ignored.
    """
    half = len(data) // 2
    for mark in (b"\n\n", b"\n", b" "):
        if (at := data.rfind(mark, half)) >= 0:
            return at + len(mark)

    # In UTF-8, bytes 10xxxxxx continue a character, and 11xxxxxx begin one of several bytes.
    at = len(data)
    while at > half and data[at - 1] & 0b1100_0000 == 0b1000_0000:
        at -= 1
    has_first_byte = at > half and data[at - 1] & 0b1000_0000
    return at - 1 if has_first_byte else at


def to_nfc(text: str) -> str:
    """Normalise a text to NFC in linear time.

    `unicodedata.normalize` needs quadratic time for a run of combining marks: 19.5 s for 256,000.
    Therefore long runs are first sorted by combining class (UAX #15).
    """
    return unicodedata.normalize("NFC", _MARKS.sub(_sort_marks, text))


def _sort_marks(run: re.Match[str]) -> str:
    """Put the marks of a run in canonical order, after the decomposition of its characters."""
    # Each character is decomposed by itself, because a run takes quadratic time.
    parts = "".join(unicodedata.normalize("NFD", mark) for mark in run.group())
    ordered: list[str] = []
    for are_marks, group in groupby(parts, key=lambda p: unicodedata.combining(p) > 0):
        characters = list(group)
        if are_marks:
            characters.sort(key=unicodedata.combining)
        ordered += characters
    return "".join(ordered)


@dataclass(frozen=True)
class DocumentReader:
    """`RecordReader` of documents in a field of every record."""

    column: str
    version: int = 2
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """Name in manifests, see `RecordReader`."""
        return add_encoding(f"{DOCUMENTS}{self.column}", self.encoding)

    def blocks(self, path: Path) -> Iterator[Block]:
        """Read blocks of records."""
        return self._layout(path).blocks((self.column,))

    def schema(self, path: Path) -> str:
        """Return the layout of a file, for the report."""
        return f"{self._layout(path).name} documents"

    def examples(self, block: Block) -> BlockExamples:
        """Make a document from each record that has text, cleaned like a text file."""
        return read_records(block, self._example_of, {self.column})

    def _layout(self, path: Path) -> FileLayout:
        return layout_with(path, {"text": self.column}, encoding=self.encoding)

    def _example_of(
        self, record: Mapping[str, Any], notes: Counter[str]
    ) -> Example | str:
        value = record.get(self.column)
        if not isinstance(value, str) or not value.strip():
            return NO_TEXT
        text = clean_document(_replace_surrogates(value, notes).encode(), notes)
        return document_example(text) if text.strip() else NO_TEXT


@dataclass(frozen=True)
class PairReader:
    """`RecordReader` of prompts and targets.

    Both may be templates, and a prompt may be a list of fields, see `text_of`. Control characters
    are removed, and separators become line breaks. Pairs with the same prompt are all for training
    or all for validation, because the model would otherwise see the answer during training.
    """

    prompt: str | tuple[str, ...]
    target: str
    version: int = 3
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """Name in manifests, see `RecordReader`."""
        columns = {"prompt": self.prompt, "target": self.target}
        return add_encoding(f"{PAIRS}{json.dumps(columns)}", self.encoding)

    @cached_property
    def _fields(self) -> tuple[str, ...]:
        return (*fields_in(self.prompt), *fields_in(self.target))

    def blocks(self, path: Path) -> Iterator[Block]:
        """Read blocks of records."""
        return self._layout(path).blocks(self._fields)

    def schema(self, path: Path) -> str:
        """Return the layout of a file, for the report."""
        return f"{self._layout(path).name} pairs"

    def examples(self, block: Block) -> BlockExamples:
        """Make an example from each record that has a prompt and a target."""
        return read_records(block, self.example_of, {*self._fields})

    def _layout(self, path: Path) -> FileLayout:
        columns = named_columns({"prompt": self.prompt, "target": self.target})
        return layout_with(path, columns, encoding=self.encoding)

    def example_of(
        self, record: Mapping[str, Any], notes: Counter[str]
    ) -> Example | str:
        """Make the example of a record, or return the reason for dropping the record."""
        prompt, unread = text_of(record, self.prompt, notes)
        if unread:
            return f"{unread} is not a text"
        if not prompt or prompt.isspace():
            return NO_PROMPT
        target, unread = text_of(record, self.target, notes, is_answer=True)
        if not target or target.isspace():
            return NO_TARGET
        if unread:
            return f"{unread} is not a text"
        # Prompts that differ in case stay on one side of the split, but are not duplicates.
        key = xxhash.xxh3_64_intdigest(prompt.casefold().encode())
        record_key = xxhash.xxh3_64_intdigest(f"{prompt}\0{target}".encode())
        return Example(prompt, target, key, title_key=0, record_key=record_key)


def named_columns(columns: Columns) -> dict[str, str]:
    """Return the fields of a source's columns by their name in errors, e.g. "prompt, part 2"."""
    named: dict[str, str] = {}
    for role, column in columns.items():
        fields = fields_in(column)
        for n, name in enumerate(fields, start=1):
            named[role if len(fields) == 1 else f"{role}, part {n}"] = name
    return named


def fields_in(column: str | tuple[str, ...]) -> tuple[str, ...]:
    """List the fields of a column: a field, a list of fields, or a template."""
    if isinstance(column, tuple):
        return column
    names = [name for _, name in template_parts(column) if name]
    return tuple(dict.fromkeys(names)) or (column,)


def blank_text(column: str | tuple[str, ...]) -> str:
    r"""Return the text of a column with the names of its fields in braces.

    >>> blank_text("Summarise: {text}"), blank_text("text"), blank_text(("question", "hint"))
    ('Summarise: {text}', '{text}', '{question}\n\n{hint}')
    """
    named = {field: f"{{{field}}}" for field in fields_in(column)}
    return text_of(named, column, Counter())[0]


@lru_cache(maxsize=256)
def template_parts(template: str) -> tuple[tuple[str, str], ...]:
    """Split a template into texts, each with the field after it, or "" at the end.

    >>> template_parts("Q: {question}?"), template_parts("question")
    ((('Q: ', 'question'), ('?', '')), (('question', ''),))

    Raises:
        ConfigError: A brace is not closed, or a field has no name or a format.
    """
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"The template {template!r} in the columns of a source is invalid: {error}. Write a "
            'field in braces, "{question}", and double each literal brace.'
        ) from error
    for _, name, spec, conversion in parts:
        if spec or conversion or name == "":
            raise ConfigError(
                f"The template {template!r} in the columns of a source has a field without a name "
                "or with a format specifier. Write only the name of the field in braces: "
                '"{question}".'
            )
    return tuple((text, name or "") for text, name, *_ in parts)


def text_of(
    record: Mapping[str, Any],
    column: str | tuple[str, ...],
    notes: Counter[str],
    *,
    is_answer: bool = False,
) -> tuple[str, str]:
    """Make the text of a column from a record. Also return the first field without a text, or "".

    Blank lines separate the fields of a list. A paragraph of a template is left out if all its
    fields are blank. If the only field of an answer has a list, the list has alternatives, and the
    first one is used. Any other list has lines.
    """
    fields = fields_in(column)
    has_alternatives = is_answer and len(fields) == 1
    texts: dict[str, str] = {}
    unread = ""
    for name in fields:
        value = record.get(name)
        value = _first_answer(value, notes) if has_alternatives else _join_lines(value)
        texts[name] = plain_text(value, notes)
        if not texts[name] and is_filled(value):
            unread = unread or name

    if isinstance(column, tuple):
        filled = [texts[name] for name in column if texts[name].strip()]
        return "\n\n".join(filled), unread
    if fields == (column,):
        return texts[column], unread
    return _fill_template(column, texts), unread


def _fill_template(template: str, texts: Mapping[str, str]) -> str:
    """Insert the texts of the fields, and leave out paragraphs with blank fields only."""
    paragraphs = []
    for paragraph in template.split("\n\n"):
        parts = template_parts(paragraph)
        names = [name for _, name in parts if name]
        if not names or any(texts[name].strip() for name in names):
            filled = [text + texts.get(name, "") for text, name in parts]
            paragraphs.append("".join(filled))
    return "\n\n".join(paragraphs)


def _first_answer(value: object, notes: Counter[str]) -> object:
    """Choose the first of several answers. In SQuAD they are in a field "text"."""
    if isinstance(value, dict):
        value = value.get("text")
    if not isinstance(value, list):
        return value
    notes["answers beside a question's first left out"] += len(value) > 1
    return value[0] if value else None


def _join_lines(value: object) -> object:
    """Join a list of texts, such as a question's choices. Return any other value unchanged."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return value


def plain_text(value: object, notes: Counter[str]) -> str:
    """Convert a text, a number or a boolean to a text without control characters.

    Any other value becomes "".

    >>> [plain_text(value, Counter()) for value in (True, 1.5, None, float("nan"))]
    ['true', '1.5', '', '']
    """
    if isinstance(value, bool):
        return "true" if value else "false"  # like JSON
    if not isinstance(value, str | int | float) or is_not_finite(value):
        return ""
    text = str(value)
    if text.isprintable():
        return text
    text, n_separators = _SEPARATORS.subn("\n", _replace_surrogates(text, notes))
    text, n_controls = _CONTROLS.subn("", text)
    if n_separators:
        notes[SEPARATORS] += 1
    if n_controls:
        notes[CONTROLS] += 1
    return text


def _replace_surrogates(text: str, notes: Counter[str]) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode. Count the changed texts in `notes`."""
    valid = replace_lone_surrogates(text)
    if "\ufffd" in valid and valid.count("\ufffd") > text.count("\ufffd"):
        notes[HALF_CHARACTERS] += 1
    return valid
