"""Streaming JSON splitter: the records of one huge value, without loading or decoding it.

A dump is an array of records, an object of records, an array under one key, or records side by
side. Only brackets and strings are scanned, so a gigabyte takes seconds, and memory holds one
record and one chunk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from toque.sources.decompress import MAX_RECORD_BYTES

Depth = Literal[0, 1, 2]
"""Brackets around a record: 0 side by side, 1 in an array or dict, 2 in an array under a key."""

MAX_NESTED = 1000

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


def value_end(text: bytes, at: int) -> int | None:
    """End of the array or object that begins at `at`; None if `text` ends first."""
    match = _WHOLE_RECORD.match(text, at)
    return match.end() if match else None


class DamagedJsonError(ValueError):
    """Text that cannot be JSON: endless nesting, or a word longer than any number."""


@dataclass(frozen=True)
class JsonPiece:
    """One record's bytes and the line it begins at; `text` is None when it is too long."""

    line: int
    text: bytes | None
    whole: bool = True
    """False for the last record of a file that ends in its middle."""


@dataclass
class JsonSplitter:
    """Splits chunks of a JSON file into the records at one nesting depth."""

    depth: Depth
    max_bytes: int = MAX_RECORD_BYTES
    line: int = 1
    closed: bool = False
    """True if the value has ended; what follows it is not read."""
    _open: list[bytes] = field(default_factory=list)
    _buffer: bytes = b""
    _scan: int = 0
    _counted: int = 0
    _start: int | None = None
    _start_line: int = 0
    _too_long: bool = False
    _in_string: bool = False

    def pieces(self, chunks: Iterable[bytes]) -> Iterator[JsonPiece]:
        """The records of a file, in order.

        Raises:
            DamagedJsonError: after the records before the damage.
        """
        for chunk in chunks:
            yield from self._feed(chunk)
            if self.closed:
                return
        if self._start is not None or self._too_long:
            text = None if self._too_long else self._buffer[self._start or 0 :]
            yield JsonPiece(self._start_line, text, whole=False)

    def _feed(self, chunk: bytes) -> Iterator[JsonPiece]:
        self._buffer += chunk
        if self._in_string and not self._leave_string():
            return
        while not self.closed:
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
        """Go to the next record. None: the buffer ends first. A word: a bare value."""
        for match in _TOKEN.finditer(self._buffer, self._scan):
            kind, at = match.lastgroup, match.start()
            if kind == "cut" or (kind == "word" and match.end() == len(self._buffer)):
                self._scan = at
                return None
            self._scan = match.end()
            inside = len(self._open) == self.depth and not (
                self.depth == 2 and self._open[-1] == b"{"
            )
            if kind == "open":
                if inside and (self.depth or match[0] == b"{"):
                    self._begin(at)
                    self._scan = at
                    return b""
                self._push(match[0])
            elif kind == "close":
                self._close()
                if self.closed:
                    return None
            elif inside and (kind == "word" or self._open[-1:] == [b"["]):
                self._begin(at)
                self._start = None
                return match[0]
        self._scan = len(self._buffer)
        return None

    def _finish_record(self) -> JsonPiece | None:
        """The record that has begun, if it ends in the buffer."""
        if self._scan == self._start and (whole := _WHOLE_RECORD.match(self._buffer, self._scan)):
            self._scan, self._start = whole.end(), None
            return JsonPiece(self._start_line, whole[0])
        nested = len(self._open) - self.depth
        for match in _IN_RECORD.finditer(self._buffer, self._scan):
            kind = match.lastgroup
            if kind is None:
                continue
            if kind == "cut":
                self._scan = match.start()
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

    def _close(self) -> None:
        if self._open:
            self._open.pop()
        self.closed = not self._open and self.depth > 0

    def _leave_string(self) -> bool:
        """Skip a string too long to hold; whether its end is in the buffer."""
        end = _STRING_REST.match(self._buffer).end()  # type: ignore[union-attr]  # matches b"" too
        self._scan = end
        if end < len(self._buffer) and self._buffer[end : end + 1] == b'"':
            self._scan = end + 1
            self._in_string = False
            return True
        self._let_go()
        return False

    def _let_go(self) -> None:
        """Drop what is no longer needed, and a record's text once it is too long."""
        if self._start is not None and len(self._buffer) - self._start > self.max_bytes:
            self._start, self._too_long = None, True
        keep = self._scan if self._start is None else self._start
        rest = self._buffer[self._scan :]
        if self._start is None and len(rest) > self.max_bytes:
            if rest[:1] != b'"':
                raise DamagedJsonError(f"a word of over {self.max_bytes:,} characters")
            self._in_string = True  # one string longer than any record
            if not self._too_long:
                self._begin(self._scan)
                self._start, self._too_long = None, len(self._open) == self.depth
            keep = len(self._buffer) - (len(rest) - len(rest.rstrip(b"\\"))) % 2
        self.line += self._buffer.count(b"\n", self._counted, max(keep, self._counted))
        self._buffer = self._buffer[keep:]
        self._counted = max(self._counted - keep, 0)
        self._scan = max(self._scan - keep, 0)
        if self._start is not None:
            self._start = 0
