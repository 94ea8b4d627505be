"""JSON files: detection of the form, blocks, and the records in a block.

A file has one object per line, an array, an object with records by id, an array under a key such as
"recipes", or objects over several lines. More arrays or objects may follow. Anything else after
them counts as an unreadable record. In a large value only brackets and strings are scanned, so a
gigabyte takes seconds. Only one record and one chunk are in memory.
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
    attempt,
    pack,
    unreadable_block,
)

MAX_CUT_BYTES = 1 << 20
"""Maximum bytes of an incomplete last record. If it is larger, a bracket is missing earlier.
"""
MAX_NESTED = 1000
_DECODER = msgspec.json.Decoder()
_RECORD_KEYS = {"title", "name", "ingredients", "@type", "@graph", "@context", "text"}
"""Keys of a record, which an object of records does not have."""
_SAMPLE = 20  # records
_SAMPLE_LINES = 50
_SAMPLE_KEYS = 50

Depth = Literal[0, 1, 2]
"""Brackets around each record: 0 for an object, 1 in an array, 2 in an array under a key.
"""
JsonForm = Literal["lines", "array", "dict", "wrapped", "objects"]
_DEPTHS: dict[JsonForm, Depth] = {"array": 1, "dict": 1, "wrapped": 2, "objects": 0}
_ENTRY = re.compile(
    rb'\s*+(?:,\s*+)?"((?:[^"\\]++|\\.)*+)"\s*:\s*([{\["\w+-])\s*([{\["\w+-]?)',
    re.DOTALL,
)
_MESSAGES = re.compile(rb'\[\s*\{\s*"(?:role|from|content|value)"\s*:')
_SCALAR = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[^,}\]]*+', re.DOTALL)


def form_of(start: bytes, *, is_entire_file: bool) -> JsonForm:
    """Detect the form of a file by its first bytes, which begin with "{" or "["."""
    if start.lstrip().startswith(b"["):
        return "array"
    lines = [line for line in start.splitlines() if line.strip()]
    has_several = len(lines) > 1
    if not is_entire_file and has_several:
        lines.pop()  # it may be incomplete
    if has_several and _are_records(lines[:_SAMPLE_LINES]):
        return "lines"

    keys, kinds = _first_entries(start)
    if not keys & _RECORD_KEYS:
        if (b"[", b"{") in kinds:
            return "wrapped"
        # An object of records may also have a version or a count. A record may have metadata.
        n_objects = sum(opening == b"{" for opening, _ in kinds)
        if n_objects > len(kinds) / 2:
            return "dict"
    # If the first line is longer than the sample, each line probably has a record.
    return "objects" if is_entire_file or has_several else "lines"


def _are_records(lines: list[bytes]) -> bool:
    """Check that at least half of the lines are objects. Other lines may be damaged."""
    n_objects = sum(
        line.lstrip()[:1] == b"{" and line.rstrip()[-1:] == b"}" for line in lines
    )
    is_one_over_lines = lines[0].rstrip().endswith(b"{")
    return n_objects >= len(lines) / 2 and not is_one_over_lines


def _first_entries(start: bytes) -> tuple[set[str], list[tuple[bytes, bytes]]]:
    """Return the first keys of an object, and the first two characters of each value.

    They distinguish a record from an object of records.
    """
    at = start.index(b"{") + 1
    keys = set[str]()
    kinds: list[tuple[bytes, bytes]] = []
    while len(kinds) < _SAMPLE_KEYS and (match := _ENTRY.match(start, at)):
        key, opening, inner = match.groups()
        keys.add(key.decode("utf-8", "replace"))
        value_at = match.start(2)
        # A list of messages is the conversation of one record, not a list of records.
        are_messages = _MESSAGES.match(start, value_at) is not None
        kinds.append((b"", b"") if are_messages else (opening, inner))
        pattern = _WHOLE_RECORD if opening in (b"{", b"[") else _SCALAR
        value = pattern.match(start, value_at)
        at = value.end() if value else len(start)
    return keys, kinds


def sample_records(
    start: bytes, form: JsonForm, *, is_entire_file: bool
) -> list[dict[str, Any]]:
    """Decode the first readable records of a file, for the detection of its schema."""
    sample: list[dict[str, Any]] = []
    texts: Iterator[bytes | None]
    if form == "lines":
        lines = start.splitlines()
        if not is_entire_file and len(lines) > 1:
            lines.pop()  # it may be incomplete
        texts = (line for line in lines if line.strip())
    else:
        pieces = JsonSplitter(_DEPTHS[form]).pieces([start])
        texts = (piece.text for piece in pieces if piece.whole)
    with suppress(DamagedJsonError):  # reported later, when the file is read
        for text in islice(texts, 5 * _SAMPLE):
            value = attempt(_decode_record, text) if text is not None else ""
            if isinstance(value, dict) and value:
                sample.append(value)
            if len(sample) == _SAMPLE:
                break
    return sample


def json_blocks(
    path: Path, form: JsonForm, *, encoding: str = UTF_8
) -> Iterator[Block]:
    """Read blocks of about a mebibyte of records.

    Raises:
        DataError: The file is damaged or has no records.
    """
    if form == "lines":
        yield from _line_blocks(path, encoding)
        return

    splitter = JsonSplitter(_DEPTHS[form])
    texts: list[bytes] = []
    numbers: list[int] = []
    size = 0
    n_records = 0

    try:
        for piece in splitter.pieces(chunks(path, encoding=encoding)):
            n_records += 1
            # In a file of one line, the records are numbered instead of the lines.
            number = piece.line if splitter.line > 1 or form == "objects" else n_records

            reason = _why_unreadable(path, piece)
            if texts and (reason or size > CHUNK_BYTES):
                yield _records_block(path, texts, numbers)
                texts, numbers = [], []
                size = 0

            if reason:
                yield unreadable_block(path, number, reason)
            elif piece.text is not None:
                # JSON allows line breaks only as white space outside of strings.
                texts.append(piece.text.replace(b"\n", b" ").replace(b"\r", b" "))
                numbers.append(number)
                size += len(piece.text)
    except DamagedJsonError as error:
        raise DataError(
            f"{path} is not valid JSON at line {splitter.line}: it has {error}. Export it again."
        ) from error

    if texts:
        yield _records_block(path, texts, numbers)
    if not n_records:
        raise DataError(
            f"{path} is JSON ({form}) without records. A recipe needs an object with a title, "
            "ingredients and steps. Check the export."
        )


def _line_blocks(path: Path, encoding: str) -> Iterator[Block]:
    first_line = 1
    for lines in runs_of_lines(chunks(path, encoding=encoding)):
        if lines.strip():
            yield Block(0, str(path), first_line, lines)
        first_line += count_lines(lines)


def _records_block(path: Path, texts: list[bytes], numbers: list[int]) -> Block:
    return pack(path, numbers[0], "json", b"\n".join(texts), numbers=numbers)


def _why_unreadable(path: Path, piece: JsonPiece) -> str:
    """Return the reason why a record cannot be read, or "".

    Raises:
        DataError: The file ends inside a record that is too large for a truncated one.
    """
    if not piece.whole and (piece.text is None or len(piece.text) > MAX_CUT_BYTES):
        raise DataError(
            f"{path}: the record at line {piece.line} has no end. A quote or bracket is missing, "
            "or the file is truncated. Repair it (python -m json.tool prints the position), or "
            "download it again."
        )
    if piece.text is None:
        return TOO_LONG
    return "" if piece.whole else "cut short"


def json_records(contents: Contents) -> Numbered:
    """Decode the records of a block."""
    for number, line in _numbered_lines(contents):
        if line == LONG_LINE:
            yield number, TOO_LONG
        elif line.strip():
            yield number, attempt(_decode_record, line)


def line_of(contents: Contents, number: int) -> bytes:
    """Return the bytes of a record, for the report of dropped records."""
    return next((line for n, line in _numbered_lines(contents) if n == number), b"")


def _numbered_lines(contents: Contents) -> Iterator[tuple[int, bytes]]:
    """Iterate over the records of a block with their numbers."""
    lines = contents.body.splitlines()
    if numbers := contents.meta.get("numbers"):
        return zip(numbers, lines, strict=True)
    return enumerate(lines, start=contents.first)


def _decode_record(line: bytes) -> Raw:
    """Decode a record, or return the reason why it cannot be read."""
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
    """Decode the value of a line.

    Raises:
        UnicodeDecodeError: The line is not UTF-8.
        ValueError: The line is not JSON.
    """
    text = line.decode("utf-8")
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError):
        # Python and pandas write NaN, lone surrogates and huge integers, which msgspec refuses.
        try:
            return json.loads(text)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


_INSIDE = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'
_STRING = rb'"' + _INSIDE + rb'"'
_CUT = rb'(?P<cut>"' + _INSIDE + rb"\\?+\Z)"
_BRACKETS = rb"(?P<open>[{\[])|(?P<close>[}\]])|"
_TOKEN = re.compile(
    rb"(?P<string>"
    + _STRING
    + rb")|"
    + _BRACKETS
    + _CUT
    + rb'|(?P<word>[^\s"{}\[\],:]++)',
    re.DOTALL,
)
_IN_RECORD = re.compile(_STRING + rb"|" + _BRACKETS + _CUT, re.DOTALL)


def _shallow(depth: int) -> bytes:
    """Make a pattern for a value of at most `depth` nested brackets."""
    inner = _STRING + rb'|[^"{}\[\]]++'
    pattern = rb"[{\[](?:" + inner + rb")*+[}\]]"
    for _ in range(depth - 1):
        pattern = rb"[{\[](?:" + inner + rb"|" + pattern + rb")*+[}\]]"
    return pattern


_WHOLE_RECORD = re.compile(_shallow(6), re.DOTALL)
_STRING_REST = re.compile(_INSIDE, re.DOTALL)
_OPENING = {b"}": b"{", b"]": b"["}


class DamagedJsonError(ValueError):
    """Text that is not JSON, or is nested too deeply, or has a word longer than any number."""


@dataclass(frozen=True)
class JsonPiece:
    """Bytes of a record."""

    line: int
    """Line number of the record's first line."""
    text: bytes | None
    """None if the record is too long."""
    whole: bool = True
    """False if the file ends before the record does."""


@dataclass
class JsonSplitter:
    """Splitter of a JSON file into the records at a nesting depth.

    The buffer has the bytes that are not yet part of a piece. All positions are in the buffer.
    """

    depth: Depth
    max_bytes: int = MAX_RECORD_BYTES
    line: int = 1
    _open: list[bytes] = field(default_factory=list)
    _first: bytes = b""
    """Opening bracket of the first value of the file."""
    _around: int = 0
    """Number of brackets around a record in the current value."""
    _buffer: bytes = b""
    _scan: int = 0
    """Position up to which the buffer was scanned."""
    _counted: int = 0
    """Position up to which line breaks were counted."""
    _start: int | None = None
    """Start of the current record, or None outside of records and in one that is too long."""
    _start_line: int = 0
    _too_long: bool = False
    """True inside a record that is too long."""
    _string: int | None = None
    """Position up to which an unfinished string was scanned."""
    _drops_string: bool = False
    """True if the first bytes of this string were dropped, because it is too long."""

    def pieces(self, chunks: Iterable[bytes]) -> Iterator[JsonPiece]:
        """Split chunks into records, in order.

        Raises:
            DamagedJsonError: The text is not JSON. All earlier records are already returned.
        """
        for chunk in chunks:
            yield from self._feed(chunk)
        if self._in_record:
            text = None if self._too_long else self._buffer[self._start :]
            yield JsonPiece(self._start_line, text, whole=False)
        elif rest := self._buffer[self._scan :]:  # a word, or a string without its end
            self._begin(self._scan)
            yield JsonPiece(self._start_line, rest, whole=self.closed)

    @property
    def closed(self) -> bool:
        """True outside of all values, where another value may follow."""
        return not self._open

    def _feed(self, chunk: bytes) -> Iterator[JsonPiece]:
        """Return the records that end in a chunk."""
        self._buffer += chunk
        if self._string is None or self._finish_string(self._string):
            yield from self._split_buffer()
        self._drop_scanned()

    def _split_buffer(self) -> Iterator[JsonPiece]:
        """Return the records that end in the buffer."""
        while True:
            if not self._in_record:
                yield from self._find_record()
            piece = self._finish_record() if self._in_record else None
            if piece is None:
                return
            yield piece

    @property
    def _in_record(self) -> bool:
        """True inside a record, including a record that is too long."""
        return self._start is not None or self._too_long

    def _finish_string(self, position: int) -> bool:
        """Continue to scan an unfinished string. Return whether it ends in the buffer."""
        rest = _STRING_REST.match(self._buffer, position)
        end = rest.end() if rest else position
        is_finished = self._buffer[end : end + 1] == b'"'
        if self._drops_string:
            # Without its first bytes, the string is not a token, so skip it.
            self._scan = end + 1 if is_finished else end
            self._drops_string = not is_finished
        self._string = None if is_finished else end
        return is_finished

    def _find_record(self) -> Iterator[JsonPiece]:
        """Move to the next record, or to the end of the buffer.

        Return the tokens before it that are not part of a record. They count as records.
        """
        for match in _TOKEN.finditer(self._buffer, self._scan):
            kind, at = match.lastgroup, match.start()
            if kind == "cut":
                self._scan, self._string = at, at + 1
                return
            if kind == "word" and match.end() == len(self._buffer):
                self._scan = at  # the word may continue in the next chunk
                return

            self._scan = match.end()
            if kind == "open":
                if self.closed:
                    self._around = self._depth_in(match[0])
                if self._is_between_records and (self._around or match[0] == b"{"):
                    self._begin(at)
                    self._scan = self._start = at
                    return
                self._push(match[0])
                continue

            if kind == "close":
                is_unreadable = not self._close(match[0])
            elif self.closed:
                is_unreadable = True
            else:  # a string in an object is the key of a record
                is_value = kind == "word" or self._open[-1] == b"["
                is_unreadable = is_value and self._is_between_records
            if is_unreadable:
                self._begin(at)
                yield JsonPiece(self._start_line, match[0])

        self._scan = len(self._buffer)

    @property
    def _is_between_records(self) -> bool:
        """True directly inside the brackets around records."""
        if len(self._open) != self._around:
            return False
        return self._around < 2 or self._open[-1] == b"["

    def _close(self, bracket: bytes) -> bool:
        """Close the innermost bracket. Return whether the closing bracket fits.

        A bracket that does not fit never closes the brackets around records.
        """
        fits = self._open[-1:] == [_OPENING[bracket]]
        if fits or len(self._open) > self._around:
            self._open.pop()
        return fits

    def _depth_in(self, bracket: bytes) -> int:
        """Return how many brackets surround each record in the next top-level value."""
        self._first = self._first or bracket
        if bracket == self._first:
            return self.depth
        # A file may mix arrays of records and single records, in any order.
        return 0 if bracket == b"{" else 1

    def _finish_record(self) -> JsonPiece | None:
        """Return the current record if it ends in the buffer."""
        if self._scan == self._start and (
            record := _WHOLE_RECORD.match(self._buffer, self._scan)
        ):
            self._scan, self._start = record.end(), None
            return JsonPiece(self._start_line, record[0])
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
                text: bytes | None = None
                if not self._too_long:
                    text = self._buffer[self._start : self._scan]
                self._start, self._too_long = None, False
                return JsonPiece(self._start_line, text)
        self._scan = len(self._buffer)
        return None

    def _begin(self, at: int) -> None:
        """Find the line number of a record that begins at a position."""
        self.line += self._buffer.count(b"\n", self._counted, at)
        self._counted = at
        self._start_line = self.line

    def _push(self, bracket: bytes) -> None:
        if len(self._open) >= MAX_NESTED:
            raise DamagedJsonError(f"more than {MAX_NESTED} nested brackets")
        self._open.append(bracket)

    def _drop_scanned(self) -> None:
        """Remove scanned bytes from the buffer, and the text of a record that is too long."""
        if self._start is not None and len(self._buffer) - self._start > self.max_bytes:
            self._start, self._too_long = None, True
        keep = self._scan if self._start is None else self._start
        if self._start is None and len(self._buffer) - self._scan > self.max_bytes:
            keep = self._drop_string()
        self.line += self._buffer.count(b"\n", self._counted, max(keep, self._counted))
        self._buffer = self._buffer[keep:]
        self._counted = max(self._counted - keep, 0)
        self._scan = max(self._scan - keep, 0)
        if self._string is not None:
            self._string = max(self._string - keep, 0)
        if self._start is not None:
            self._start = 0

    def _drop_string(self) -> int:
        """Give up an unfinished string that is longer than any record.

        Returns:
            Position of the first byte that is needed to find the end of the string.

        Raises:
            DamagedJsonError: The long token is not a string.
        """
        token = self._buffer[self._scan :]
        if token[:1] != b'"':
            raise DamagedJsonError(f"a word of over {self.max_bytes:,} characters")
        self._drops_string = True
        if not self._too_long:
            self._begin(self._scan)
            self._too_long = len(self._open) == self._around
        # An odd number of backslashes at the end may escape the next character.
        n_backslashes = len(token) - len(token.rstrip(b"\\"))
        return len(self._buffer) - n_backslashes % 2
