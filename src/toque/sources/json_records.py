"""JSON files: layout detection, blocks, and the records in a block.

Layouts: one object per line; one array; an object of records by id; an array under a key such as
"recipes"; one object, or several, each over many lines. Behind an array or object others may
follow; anything else there is counted as a record that cannot be read. Of one huge value only
brackets and strings are scanned, so a gigabyte takes seconds, and memory holds one record and one
chunk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from toque.errors import DataError
from toque.sources.decompress import (
    CHUNK_BYTES,
    LONG_LINE,
    MAX_RECORD_BYTES,
    UTF_8,
    chunks,
    count_lines,
    runs_of_lines,
)
from toque.sources.records import (
    NOT_UTF_8,
    TOO_LONG,
    Block,
    Contents,
    Numbered,
    Raw,
    attempted,
    pack,
    unreadable,
)

MAX_CUT_BYTES = 1 << 20  # of a last record that is cut; of more, the brackets went wrong before
MAX_NESTED = 1000
_DECODER = msgspec.json.Decoder()
_OF_A_RECORD = {"title", "name", "ingredients", "@type", "@graph", "@context", "text"}
_SAMPLE = 20

Depth = Literal[0, 1, 2]  # brackets around a record: side by side, in one value, under a key
JsonForm = Literal["lines", "array", "dict", "wrapped", "objects"]
_DEPTHS: dict[JsonForm, Depth] = {"array": 1, "dict": 1, "wrapped": 2, "objects": 0}
_ENTRY = re.compile(
    rb'\s*+(?:,\s*+)?"((?:[^"\\]++|\\.)*+)"\s*:\s*([{\["\w+-])\s*([{\["\w+-]?)', re.DOTALL
)
_MESSAGES = re.compile(rb'\[\s*\{\s*"(?:role|from|content|value)"\s*:')
_SCALAR = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[^,}\]]*+', re.DOTALL)


def form_of(start: bytes, *, whole: bool) -> JsonForm:
    """The form of a file that begins with `start` ("{" or "[" after white space)."""
    if start.lstrip().startswith(b"["):
        return "array"
    lines = [line for line in start.splitlines() if line.strip()]
    has_several = len(lines) > 1
    if not whole and has_several:
        lines.pop()  # it may be cut
    sample = lines[:50]
    complete = sum(line.lstrip()[:1] == b"{" and line.rstrip()[-1:] == b"}" for line in sample)
    # One object a line, in most of them: a few damaged lines do not matter.
    if has_several and 2 * complete >= len(sample) and not sample[0].rstrip().endswith(b"{"):
        return "lines"
    # One record, or an object of records: the first keys and the kinds of their values tell.
    at, keys, kinds = start.index(b"{") + 1, set[str](), list[tuple[bytes, bytes]]()
    while len(kinds) < 50 and (match := _ENTRY.match(start, at)):
        key, opening, inner = match.groups()
        keys.add(key.decode("utf-8", "replace"))
        # A list of messages is one record's conversation, and no list of records.
        are_messages = _MESSAGES.match(start, match.start(2)) is not None
        kinds.append((b"", b"") if are_messages else (opening, inner))
        value = (_WHOLE_RECORD if opening in (b"{", b"[") else _SCALAR).match(start, match.start(2))
        at = value.end() if value else len(start)
    n_objects = sum(opening == b"{" for opening, _ in kinds)
    if not keys & _OF_A_RECORD:
        if (b"[", b"{") in kinds:
            return "wrapped"
        # Beside records by id there may be a version or a count; beside a record's texts, metadata.
        if n_objects > len(kinds) / 2:
            return "dict"
    # A first line that is longer than what is seen holds a record, and the next one the next.
    return "objects" if whole or has_several else "lines"


def sample_records(start: bytes, form: JsonForm, *, whole: bool) -> list[dict[str, Any]]:
    """The first records of a file that can be decoded, for recognising its schema."""
    found: list[dict[str, Any]] = []
    if form == "lines":
        lines = start.splitlines() if whole else start.splitlines()[:-1] or [start]
        texts: Iterator[bytes | None] = (line for line in lines if line.strip())
    else:
        texts = (piece.text for piece in JsonSplitter(_DEPTHS[form]).pieces([start]) if piece.whole)
    with suppress(DamagedJsonError):  # reading the file will report it
        for text in islice(texts, 5 * _SAMPLE):
            value = attempted(_decoded, text) if text is not None else ""
            if isinstance(value, dict) and value:
                found.append(value)
            if len(found) == _SAMPLE:
                break
    return found


def json_blocks(path: Path, form: JsonForm, *, encoding: str = UTF_8) -> Iterator[Block]:
    """Blocks of about a mebibyte of records."""
    if form == "lines":
        first_line = 1
        for run in runs_of_lines(chunks(path, encoding=encoding)):
            if run.strip():
                yield Block(0, str(path), first_line, run)
            first_line += count_lines(run)
        return
    splitter = JsonSplitter(_DEPTHS[form])
    texts: list[bytes] = []
    numbers: list[int] = []
    size = n_records = 0
    try:
        for piece in splitter.pieces(chunks(path, encoding=encoding)):
            n_records += 1
            # A file on one line has one line number, so its records are numbered instead.
            number = piece.line if splitter.line > 1 or form == "objects" else n_records
            bad = _why_unreadable(path, piece)
            if texts and (bad or size > CHUNK_BYTES):
                yield _records_block(path, texts, numbers)
                texts, numbers, size = [], [], 0
            if bad:
                yield unreadable(path, number, bad)
            elif piece.text is not None:
                # A line break outside strings is white space; inside them JSON does not allow it.
                texts.append(piece.text.replace(b"\n", b" ").replace(b"\r", b" "))
                numbers.append(number)
                size += len(piece.text)
    except DamagedJsonError as error:
        raise DataError(
            f"{path} is no JSON from line {splitter.line} on: it holds {error}. Export it again."
        ) from error
    if texts:
        yield _records_block(path, texts, numbers)
    if not n_records:
        raise DataError(
            f"{path} is JSON ({form}) without a single record in it. A recipe source holds objects "
            "with a title, ingredients and steps; check the export."
        )


def _records_block(path: Path, texts: list[bytes], numbers: list[int]) -> Block:
    return pack(path, numbers[0], "json", b"\n".join(texts), numbers=numbers)


def _why_unreadable(path: Path, piece: JsonPiece) -> str:
    if not piece.whole and (piece.text is None or len(piece.text) > MAX_CUT_BYTES):
        raise DataError(
            f"{path}: the record that begins at line {piece.line} never ends: a quote or bracket "
            "is missing, or the file was cut. Repair it (python -m json.tool names the place), or "
            "fetch it again."
        )
    if piece.text is None:
        return TOO_LONG
    return "" if piece.whole else "cut short"


def json_records(contents: Contents) -> Numbered:
    """The records of a block of either kind."""
    for number, line in _numbered_lines(contents):
        if line.strip():
            yield number, TOO_LONG if line == LONG_LINE else attempted(_decoded, line)


def line_of(contents: Contents, number: int) -> bytes:
    """The bytes of the record with this number, for the report of dropped records."""
    return next((line for n, line in _numbered_lines(contents) if n == number), b"")


def _numbered_lines(contents: Contents) -> Iterator[tuple[int, bytes]]:
    lines = contents.body.splitlines()
    numbers = contents.meta.get("numbers") or range(contents.first, contents.first + len(lines))
    return zip(numbers, lines, strict=True)


def _decoded(line: bytes) -> Raw:
    """A record as an object, or the reason why it cannot be read."""
    if len(line) > MAX_RECORD_BYTES:
        return TOO_LONG
    try:
        value = decode_line(line)
    except UnicodeDecodeError:
        return NOT_UTF_8
    except ValueError:
        return "not JSON"
    return value if isinstance(value, dict) else "not an object"


def decode_line(line: bytes) -> Any:
    """The value of one line; ValueError for no JSON, UnicodeDecodeError for no UTF-8."""
    text = line.decode("utf-8")
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError):
        # NaN, lone surrogates and huge integers are not JSON, but Python and pandas write them.
        try:
            return json.loads(text)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


_INSIDE = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'
_STRING = rb'"' + _INSIDE + rb'"'
_CUT = rb'(?P<cut>"' + _INSIDE + rb"\\?+\Z)"
_BRACKETS = rb"(?P<open>[{\[])|(?P<close>[}\]])|"
_TOKEN = re.compile(
    rb"(?P<string>" + _STRING + rb")|" + _BRACKETS + _CUT + rb'|(?P<word>[^\s"{}\[\],:]++)',
    re.DOTALL,
)
_IN_RECORD = re.compile(_STRING + rb"|" + _BRACKETS + _CUT, re.DOTALL)


def _shallow(depth: int) -> bytes:
    """A pattern for one value of at most `depth` nested brackets, read in one regex match."""
    inner = _STRING + rb'|[^"{}\[\]]++'
    pattern = rb"[{\[](?:" + inner + rb")*+[}\]]"
    for _ in range(depth - 1):
        pattern = rb"[{\[](?:" + inner + rb"|" + pattern + rb")*+[}\]]"
    return pattern


_WHOLE_RECORD = re.compile(_shallow(6), re.DOTALL)
_STRING_REST = re.compile(_INSIDE, re.DOTALL)
_OPENING = {b"}": b"{", b"]": b"["}


class DamagedJsonError(ValueError):
    """Text that cannot be JSON: endless nesting, or a word longer than any number."""


@dataclass(frozen=True)
class JsonPiece:
    """One record's bytes and the line it begins at; `text` is None when it is too long."""

    line: int
    text: bytes | None
    whole: bool = True  # False for the last record of a file that ends in its middle


@dataclass
class JsonSplitter:
    """Splits chunks of a JSON file into the records at one nesting depth."""

    depth: Depth
    max_bytes: int = MAX_RECORD_BYTES
    line: int = 1
    _open: list[bytes] = field(default_factory=list)
    _first: bytes = b""  # bracket that opens the file's first value
    _around: int = 0  # brackets around a record in the value that is open
    _buffer: bytes = b""
    _scan: int = 0
    _counted: int = 0
    _start: int | None = None
    _start_line: int = 0
    _too_long: bool = False
    _string: int | None = None  # how far a string without its end is known; None outside of one
    _beheaded: bool = False  # True if that string is too long to hold, and its beginning is gone

    def pieces(self, chunks: Iterable[bytes]) -> Iterator[JsonPiece]:
        """The records of a file, in order; DamagedJsonError after those before the damage."""
        for chunk in chunks:
            yield from self._feed(chunk)
        if self._start is not None or self._too_long:
            text = None if self._too_long else self._buffer[self._start or 0 :]
            yield JsonPiece(self._start_line, text, whole=False)
        elif rest := self._buffer[self._scan :]:  # a word, or a string without its end
            self._begin(self._scan)
            yield JsonPiece(self._start_line, rest, whole=self.closed)

    @property
    def closed(self) -> bool:
        """True outside of every value: another may follow."""
        return not self._open

    def _feed(self, chunk: bytes) -> Iterator[JsonPiece]:
        self._buffer += chunk
        if self._string is not None:
            rest = _STRING_REST.match(self._buffer, self._string)
            end = rest.end() if rest else self._string
            ended = self._buffer[end : end + 1] == b'"'
            self._string = None if ended else end
            if self._beheaded:
                self._scan, self._beheaded = end + ended, not ended
            if not ended:
                self._let_go()
                return
        while True:
            if self._start is not None or self._too_long:
                piece = self._finish_record()
                if piece is None:
                    break
                yield piece
            else:
                word = self._find_record()
                if word is None:
                    break
                if word:
                    yield JsonPiece(self._start_line, word)
        self._let_go()

    def _find_record(self) -> bytes | None:
        """Go to the next record. None: the buffer ends first. A word: what is no object."""
        for match in _TOKEN.finditer(self._buffer, self._scan):
            kind, at = match.lastgroup, match.start()
            if kind == "cut" or (kind == "word" and match.end() == len(self._buffer)):
                self._scan, self._string = at, at + 1 if kind == "cut" else None
                return None
            self._scan = match.end()
            if kind == "open" and self.closed:
                self._around = self._depth_in(match[0])
            innermost = self._open[-1:]
            inside = len(self._open) == self._around and (self._around < 2 or innermost == [b"["])
            if kind == "open":
                if inside and (self._around or match[0] == b"{"):
                    self._begin(at)
                    self._scan = at
                    return b""
                self._push(match[0])
                continue
            if kind == "close":
                fits = innermost == [_OPENING[match[0]]]
                if fits or len(self._open) > self._around:
                    self._open.pop()
                counts = not fits
            else:
                counts = self.closed or (inside and (kind == "word" or innermost == [b"["]))
            if counts:  # no record, and nothing behind it is lost for it
                self._begin(at)
                self._start = None
                return match[0]
        self._scan = len(self._buffer)
        return None

    def _depth_in(self, bracket: bytes) -> int:
        """Brackets around a record in the next of the file's values."""
        self._first = self._first or bracket
        if bracket == self._first:
            return self.depth
        return 0 if bracket == b"{" else 1  # one record behind an array of them, or such an array

    def _finish_record(self) -> JsonPiece | None:
        """The record that has begun, if it ends in the buffer."""
        if self._scan == self._start and (whole := _WHOLE_RECORD.match(self._buffer, self._scan)):
            self._scan, self._start = whole.end(), None
            return JsonPiece(self._start_line, whole[0])
        nested = len(self._open) - self._around
        for match in _IN_RECORD.finditer(self._buffer, self._scan):
            kind = match.lastgroup
            if kind is None:
                continue
            if kind == "cut":
                self._scan, self._string = match.start(), match.start() + 1
                return None
            if kind == "open":
                self._push(match[0])
                nested += 1
                continue
            self._open.pop()
            nested -= 1
            if nested <= 0:
                self._scan = match.end()
                text = None if self._too_long else self._buffer[self._start : self._scan]
                self._start, self._too_long = None, False
                return JsonPiece(self._start_line, text)
        self._scan = len(self._buffer)
        return None

    def _begin(self, at: int) -> None:
        self.line += self._buffer.count(b"\n", self._counted, at)
        self._counted = at
        self._start, self._start_line = at, self.line

    def _push(self, bracket: bytes) -> None:
        if len(self._open) >= MAX_NESTED:
            raise DamagedJsonError(f"more than {MAX_NESTED} brackets inside each other")
        self._open.append(bracket)

    def _let_go(self) -> None:
        """Drop what is no longer needed, and a record's text once it is too long."""
        if self._start is not None and len(self._buffer) - self._start > self.max_bytes:
            self._start, self._too_long = None, True
        keep = self._scan if self._start is None else self._start
        rest = self._buffer[self._scan :]
        if self._start is None and len(rest) > self.max_bytes:
            if rest[:1] != b'"':
                raise DamagedJsonError(f"a word of over {self.max_bytes:,} characters")
            self._beheaded = True  # one string longer than any record
            if not self._too_long:
                self._begin(self._scan)
                self._start, self._too_long = None, len(self._open) == self._around
            keep = len(self._buffer) - (len(rest) - len(rest.rstrip(b"\\"))) % 2
        self.line += self._buffer.count(b"\n", self._counted, max(keep, self._counted))
        self._buffer = self._buffer[keep:]
        self._counted = max(self._counted - keep, 0)
        self._scan = max(self._scan - keep, 0)
        if self._string is not None:
            self._string = max(self._string - keep, 0)
        if self._start is not None:
            self._start = 0
