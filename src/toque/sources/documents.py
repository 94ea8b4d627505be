r"""Readers of texts that are no recipes: plain files, documents, and prompts with their targets.

A column of a source is a field of its records, or a template over them: "{question}\n\n{hint}".

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
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from string import Formatter
from typing import Any, Final

import xxhash

from toque.errors import ConfigError
from toque.sources.decompress import UTF_8, chunks
from toque.sources.layouts import Columns, FileLayout, layout_with, read_records
from toque.sources.records import (
    Block,
    BlockExamples,
    Example,
    attempted,
    document_example,
    in_encoding,
    is_filled,
    is_not_finite,
    replace_lone_surrogates,
)

PART_BYTES = 4 << 20
NO_TEXT, NO_PROMPT, NO_TARGET = "no text", "no prompt", "no target"
LOST_BYTES = "bytes that are not UTF-8"  # the note that counts them; each costs a character
CONTROLS = "control characters removed"
SEPARATORS = "vertical tabs, form feeds and other separators made line breaks"
HALF_CHARACTERS = "halves of characters (lone surrogates) made U+FFFD"
_MARK = "\ufeff"
# The line at either end of a book of Project Gutenberg, and the licence between two books. The one
# before a book may be several lines long; it is bounded, so that no text takes long.
_GUTENBERG = r"\*\*\*\s{0,9}+%s OF TH(?:E|IS)(?: COPYRIGHTED)? PROJECT GUTENBERG"
_BEGINS = _GUTENBERG % "START" + r"(?>.{0,999}?\*\*\*)[^\n]{0,99}+\n"
_BOOK = re.compile(_BEGINS, re.DOTALL | re.IGNORECASE)
_LICENCE = re.compile(
    "^" + _GUTENBERG % "END" + rf".*?(?:{_BEGINS}|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1b\x7f]")
# Vertical tab, form feed, separators of files, groups, records and units, U+0085, U+2028, U+2029.
_SEPARATORS = re.compile("[\x0b\x0c\x1c-\x1f\x85\u2028\u2029]")
_BLANK_LINES = re.compile(r"\n{4,}")
_TRAILING = re.compile(r"(?<![ \t])[ \t]++$", re.MULTILINE)
# More than the thirty marks of UAX #15's stream-safe text; no mark is a letter or a blank.
_MARKS: Final = re.compile(r"[^\w\s\x00-\u02ff]{31,}")
# Beginnings of the recorded names of `DocumentReader` and `PairReader`.
DOCUMENTS: Final = "toque.cooking.formats:text="
PAIRS: Final = "toque.cooking.formats:pairs="


@dataclass(frozen=True)
class TextReader:
    """Reads text files, plain or compressed; each is one document."""

    version: int = 2
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
    text, n_separators = _SEPARATORS.subn("\n", text)
    text, n_controls = _CONTROLS.subn("", text)
    for note, n in ((SEPARATORS, n_separators), (CONTROLS, n_controls)):
        if n:
            notes[note] += n
    n_lines = text.count("\n")
    text = _LICENCE.sub("", text)
    if book := _BOOK.search(text):  # the first one, or the first whole one of a part of the file
        text = text[book.end() :]
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
    version: int = 2
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
        text = clean_document(_without_halves(value, notes).encode(), notes)
        return document_example(text) if text.strip() else NO_TEXT


@dataclass(frozen=True)
class PairReader:
    """Reads the fields `prompt` and `target` of every record; a `RecordReader`.

    Either may be a template over fields, and a prompt a list of them: see `text_of`. These are the
    user's own texts: control characters are removed, and separators become line breaks. Pairs with
    the same prompt stay on one side of the split, because the model would have seen the answer.
    """

    prompt: str | tuple[str, ...]
    target: str
    version: int = 3
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """Name in manifests; see `RecordReader`."""
        columns = {"prompt": self.prompt, "target": self.target}
        return in_encoding(f"{PAIRS}{json.dumps(columns)}", self.encoding)

    @cached_property
    def _asked(self) -> tuple[str, ...]:
        return fields_in(self.prompt)

    @cached_property
    def _answered(self) -> tuple[str, ...]:
        return fields_in(self.target)

    def blocks(self, path: Path) -> Iterator[Block]:
        """Blocks of `path` by its layout."""
        return self._layout(path).blocks((*self._asked, *self._answered))

    def schema(self, path: Path) -> str:
        """The file's layout, for the report."""
        return f"{self._layout(path).name} pairs"

    def examples(self, block: Block) -> BlockExamples:
        """One example for each record that has both texts."""
        return read_records(block, self.example_of, {*self._asked, *self._answered})

    def _layout(self, path: Path) -> FileLayout:
        columns = named_columns({"prompt": self.prompt, "target": self.target})
        return layout_with(path, columns, encoding=self.encoding)

    def example_of(self, record: Mapping[str, Any], notes: Counter[str]) -> Example | str:
        """The example of a record, or the reason why it has none."""
        prompt, unread = text_of(record, self.prompt, notes)
        if unread:
            return f"{unread} holds no text"  # which the question may need
        if not prompt or prompt.isspace():
            return NO_PROMPT
        target, unread = text_of(record, self.target, notes, is_answer=True)
        if not target or target.isspace():
            return NO_TARGET
        if unread:
            return f"{unread} holds no text"
        # Letter case decides the side of the split for no prompt, and makes two texts different.
        key = xxhash.xxh3_64_intdigest(prompt.casefold().encode())
        record_key = xxhash.xxh3_64_intdigest(f"{prompt}\0{target}".encode())
        return Example(prompt, target, key, 0, record_key)


def named_columns(columns: Columns) -> dict[str, str]:
    """The fields of a source's columns, by what an error calls them."""
    return {
        role if len(fields) == 1 else f"{role}, part {n}": name
        for role, given in columns.items()
        for fields in (fields_in(given),)
        for n, name in enumerate(fields, start=1)
    }


def fields_in(column: str | tuple[str, ...]) -> tuple[str, ...]:
    """The fields of a column: one, a list of them, or those in the braces of a template."""
    if isinstance(column, tuple):
        return column
    found = [name for _, name in template_parts(column) if name]
    return tuple(dict.fromkeys(found)) or (column,)


def blank_text(column: str | tuple[str, ...]) -> str:
    r"""The text that a column makes of a record, with each field's name in braces in its place.

    >>> blank_text("Summarise: {text}"), blank_text("text"), blank_text(("question", "hint"))
    ('Summarise: {text}', '{text}', '{question}\n\n{hint}')
    """
    named = {field: f"{{{field}}}" for field in fields_in(column)}
    return text_of(named, column, Counter())[0]


@lru_cache(maxsize=256)
def template_parts(template: str) -> tuple[tuple[str, str], ...]:
    """Texts of a template, each with the field that follows it, "" at its end.

    >>> template_parts("Q: {question}?"), template_parts("question")
    ((('Q: ', 'question'), ('?', '')), (('question', ''),))

    Raises:
        ConfigError: a brace stands alone, or a field has a format.
    """
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"The template {template!r} in columns of a source cannot be read: {error}. A field "
            'stands in braces, "{question}"; a brace that is text is written twice.'
        ) from error
    for _, name, spec, conversion in parts:
        if spec or conversion or name == "":
            raise ConfigError(
                f"The template {template!r} in columns of a source has a field without a name, or "
                'with a format. Write the name of a field alone in braces: "{question}".'
            )
    return tuple((text, name or "") for text, name, *_ in parts)


def text_of(
    record: Mapping[str, Any],
    column: str | tuple[str, ...],
    notes: Counter[str],
    *,
    is_answer: bool = False,
) -> tuple[str, str]:
    """The text that a column makes of a record, and a field of it that is filled with no text.

    Several fields are those that are filled, with a blank line between them. A paragraph of a
    template is left out where all its fields are blank. A list in the only field of an answer holds
    alternatives, and its first is taken; elsewhere it holds lines.
    """
    fields = fields_in(column)
    read = {
        name: _field(record.get(name), name, notes, alternatives=is_answer and len(fields) == 1)
        for name in fields
    }
    unread = next((name for _, name in read.values() if name), "")
    if isinstance(column, str) and fields == (column,):
        return read[column][0], unread
    if isinstance(column, str):
        return _filled(column, {name: text for name, (text, _) in read.items()}), unread
    texts = (read[name][0] for name in column)
    return "\n\n".join(text for text in texts if text and not text.isspace()), unread


def _filled(template: str, texts: Mapping[str, str]) -> str:
    """The template with the texts of its fields, without paragraphs whose fields are all blank."""
    paragraphs = []
    for paragraph in template.split("\n\n"):
        parts = template_parts(paragraph)
        names = [name for _, name in parts if name]
        if not names or any(texts[name].strip() for name in names):
            paragraphs.append("".join(text + texts.get(name, "") for text, name in parts))
    return "\n\n".join(paragraphs)


def _field(
    value: object, name: str, notes: Counter[str], *, alternatives: bool = False
) -> tuple[str, str]:
    """A field's text, and its name where it is filled with none."""
    if alternatives:
        value = value.get("text") if isinstance(value, dict) else value
        if isinstance(value, list):  # SQuAD lists answers: the first is taken
            notes["answers beside a question's first left out"] += len(value) > 1
            value = value[0] if value else None
    elif isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)  # choices
    text = plain_text(value, notes)
    return text, name if not text and is_filled(value) else ""


def plain_text(value: object, notes: Counter[str]) -> str:
    """A field's text as UTF-8 without control characters; of other types, numbers and truths.

    >>> [plain_text(value, Counter()) for value in (True, 1.5, None, float("nan"))]
    ['true', '1.5', '', '']
    """
    if isinstance(value, bool):
        return "true" if value else "false"  # as JSON writes them
    if not isinstance(value, str | int | float) or is_not_finite(value):
        return ""
    text = str(value)
    if text.isprintable():
        return text
    text, n_separators = _SEPARATORS.subn("\n", _without_halves(text, notes))
    text, n_controls = _CONTROLS.subn("", text)
    if n_separators:
        notes[SEPARATORS] += 1
    if n_controls:
        notes[CONTROLS] += 1
    return text


def _without_halves(text: str, notes: Counter[str]) -> str:
    """A text that UTF-8 can hold; `notes` counts the texts that it could not."""
    entire = replace_lone_surrogates(text)
    if "\ufffd" in entire and entire.count("\ufffd") > text.count("\ufffd"):
        notes[HALF_CHARACTERS] += 1
    return entire
