"""JSON files: layout detection, blocks, and the records in a block.

Layouts: one object per line; one array; an object of records by id; an array under a key such as
"recipes"; one object, or several, each over many lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
from toque.sources.json_stream import DamagedJsonError, Depth, JsonPiece, JsonSplitter, value_end
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

MAX_CUT_BYTES = 1 << 20
"""A file that ends inside a record loses that record. If more than this is left, the brackets went
wrong long before, and the file is refused."""

_DECODER, _RECORDS = msgspec.json.Decoder(), msgspec.json.Decoder(dict[str, Any])
_WRAPPER_FIELDS = {"title", "name", "ingredients", "@type", "@graph", "@context"}
_SAMPLE = 20


JsonForm = Literal["lines", "array", "dict", "wrapped", "objects"]
"""Place of the records in a JSON file."""
_DEPTHS: dict[JsonForm, Depth] = {"array": 1, "dict": 1, "wrapped": 2, "objects": 0}


def form_of(start: bytes, *, whole: bool) -> JsonForm:
    """The form of a file that begins with `start` ("{" or "[" after white space)."""
    if start.lstrip().startswith(b"["):
        return "array"
    lines = [line for line in start.splitlines() if line.strip()]
    if not whole and len(lines) > 1:
        lines.pop()  # it may be cut
    if len(lines) > 1 and _side_by_side(lines):
        return "lines"
    return _object_form(start)


def _side_by_side(lines: list[bytes]) -> bool:
    """True if most lines are one object each; a few damaged lines do not matter."""
    sample = lines[:50]
    complete = sum(line.lstrip()[:1] == b"{" and line.rstrip()[-1:] == b"}" for line in sample)
    return 2 * complete >= len(sample) and not sample[0].rstrip().endswith(b"{")


_ENTRY = re.compile(
    rb'\s*+(?:,\s*+)?"((?:[^"\\]++|\\.)*+)"\s*:\s*([{\["\w+-])\s*([{\["\w+-]?)', re.DOTALL
)


def _object_form(start: bytes) -> JsonForm:
    """Tell one record from an object of records by the first keys and the kinds of their values."""
    at = start.index(b"{") + 1
    entries: list[tuple[str, bytes, bytes]] = []
    while len(entries) < 50 and (match := _ENTRY.match(start, at)):
        key, opening, inner = match.groups()
        entries.append((key.decode("utf-8", "replace"), opening, inner))
        at = _after_value(start, match.start(2))
    keys = {key for key, _, _ in entries}
    if keys & _WRAPPER_FIELDS:
        return "objects"
    if any(opening == b"[" and inner == b"{" for _, opening, inner in entries):
        return "wrapped"
    if any(opening == b"{" for _, opening, _ in entries):
        return "dict"
    return "objects"


_SCALAR = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[^,}\]]*+', re.DOTALL)


def _after_value(start: bytes, at: int) -> int:
    """End of a value; the end of the text if it is unfinished."""
    if start[at : at + 1] in (b"{", b"["):
        end = value_end(start, at)
        return len(start) if end is None else end
    match = _SCALAR.match(start, at)
    return match.end() if match else len(start)


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
    """Blocks of about a mebibyte of records.

    Raises:
        DataError: the file cannot be read, or its brackets are damaged.
    """
    if form == "lines":
        yield from _line_blocks(path, encoding)
        return
    splitter = JsonSplitter(_DEPTHS[form])
    texts: list[bytes] = []
    numbers: list[int] = []
    size = n_records = 0
    for piece in _pieces(path, splitter, encoding):
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
    if texts:
        yield _records_block(path, texts, numbers)
    if not n_records:
        raise DataError(
            f"{path} is JSON ({form}) without a single record in it. A recipe source "
            "holds objects with a title, ingredients and steps; check the export."
        )


def _pieces(path: Path, splitter: JsonSplitter, encoding: str) -> Iterator[JsonPiece]:
    try:
        yield from splitter.pieces(chunks(path, encoding=encoding))
    except DamagedJsonError as error:
        raise DataError(
            f"{path} is no JSON from line {splitter.line} on: it holds {error}. Export it again."
        ) from error


def json_records(contents: Contents) -> Numbered:
    """The records of a block of either kind."""
    for number, line in _numbered_lines(contents):
        if line.strip():
            yield number, TOO_LONG if line == LONG_LINE else attempted(_decoded, line)


def decoded_together(contents: Contents) -> list[tuple[int, dict[str, Any]]] | None:
    """The records of a block of either kind, with their numbers, decoded in one call.

    None if one needs `json_records`: empty lines, damage, JSON that only Python accepts.
    """
    data = contents.body
    n_lines = count_lines(data) + (not data.endswith((b"\n", b"\r")))
    numbers = _numbers(contents, n_lines)
    a_line_each = data.startswith(b"{") and data.count(b"\n{") + 1 == n_lines == len(numbers)
    if len(data) > MAX_RECORD_BYTES or not a_line_each:
        return None
    try:
        found = _RECORDS.decode_lines(data if data.isascii() else data.decode())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return list(zip(numbers, found, strict=True)) if len(found) == n_lines else None


def line_of(contents: Contents, number: int) -> bytes:
    """The bytes of the record with this number, for the report of dropped records."""
    return next((line for n, line in _numbered_lines(contents) if n == number), b"")


def _numbered_lines(contents: Contents) -> Iterator[tuple[int, bytes]]:
    lines = contents.body.splitlines()
    return zip(_numbers(contents, len(lines)), lines, strict=True)


def _numbers(contents: Contents, n_lines: int) -> Sequence[int]:
    return contents.meta.get("numbers") or range(contents.first, contents.first + n_lines)


def _line_blocks(path: Path, encoding: str) -> Iterator[Block]:
    first_line = 1
    for run in runs_of_lines(chunks(path, encoding=encoding)):
        if run.strip():
            yield Block(0, str(path), first_line, run)
        first_line += count_lines(run)


def _records_block(path: Path, texts: list[bytes], numbers: list[int]) -> Block:
    return pack(path, numbers[0], "json", b"\n".join(texts), numbers=numbers)


def _why_unreadable(path: Path, piece: JsonPiece) -> str:
    if not piece.whole and (piece.text is None or len(piece.text) > MAX_CUT_BYTES):
        raise DataError(
            f"{path}: the record that begins at line {piece.line} never ends. A quote or a "
            "bracket is missing there, or the file was cut inside a very long record. Repair "
            "that record (`python -m json.tool` names the place), or fetch the file again."
        )
    if piece.text is None:
        return TOO_LONG
    return "" if piece.whole else "cut short"


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
    """The value of one line.

    Raises:
        ValueError: not JSON (a UnicodeDecodeError when not UTF-8).
    """
    text = line.decode("utf-8")
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError):
        # NaN, lone surrogates and huge integers are not JSON, but Python and pandas write them.
        try:
            return json.loads(text)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
