"""Runs of whole lines from a JSON-lines file, plain or gzip, in bounded memory.

Newlines are universal, a byte-order mark is dropped, and files that are plainly of another kind
are refused with the reason before any work is done.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from toque.data.example import Block
from toque.errors import DataError

BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 8 << 20
"""A longer line is no recipe; it is counted and its text never held."""

TOO_LONG = b"\0line too long"
"""Stands in a payload for a line over `MAX_LINE_BYTES`, so that it is counted with its number."""

_GZIP = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"
_OTHER_KINDS = {
    b"\xff\xfe": "UTF-16 text. Convert it first: iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16 text. Convert it first: iconv -f UTF-16 -t UTF-8",
    b"PAR1": "a Parquet file, not JSON lines",
    b"PK\x03\x04": "a ZIP archive. Unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd. Decompress it first: zstd -d",
    b"BZh": "compressed with bzip2. Decompress it first: bunzip2",
    b"\xfd7zXZ": "compressed with xz. Decompress it first: unxz",
}


def line_blocks(path: Path) -> Iterator[Block]:
    """Blocks of about a mebibyte of whole lines, in order.

    Raises:
        DataError: the file is missing, unreadable, empty, a damaged gzip, or not JSON lines.
    """
    first_line, is_first = 1, True
    for payload, at_end in _runs_of_lines(path):
        if is_first:
            _refuse_other_json(path, payload, is_whole_file=at_end)
            is_first = False
        yield Block(source=0, path=str(path), first_line=first_line, payload=payload)
        first_line += len(payload.splitlines())
    if is_first:
        raise DataError(
            f"{path} is empty. A recipe source holds one JSON object a line; check that the "
            f"download or export that wrote it has finished."
        )


def decode_line(line: bytes) -> Any:
    """The value of one line.

    Raises:
        ValueError: not JSON (a UnicodeDecodeError when not UTF-8).
    """
    text = line.decode("utf-8")
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        # NaN, lone surrogates and huge integers are no JSON, but Python and pandas write them.
        try:
            return json.loads(text)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


def _runs_of_lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """(whole lines, whether the file ends there); a last line needs no newline."""
    pending, skipping = b"", False
    for chunk, at_end in _chunks(path):
        buffer = chunk if skipping else pending + chunk
        if skipping:
            start = _first_break(buffer)
            if start < 0 and not at_end:
                continue
            buffer = TOO_LONG + (buffer[start:] if start >= 0 else b"")
            skipping = False
        cut = len(buffer) if at_end else _after_last_break(buffer)
        pending = buffer[cut:]
        if len(pending) > MAX_LINE_BYTES:
            pending, skipping = b"", True
        if buffer[:cut].strip():
            yield buffer[:cut], at_end
        elif cut:
            pending = buffer  # blank lines travel with the next block: line numbers stay true


def _first_break(buffer: bytes) -> int:
    found = [at for at in (buffer.find(b"\n"), buffer.find(b"\r")) if at >= 0]
    return min(found, default=-1)


def _after_last_break(buffer: bytes) -> int:
    # A carriage return at the very end may be half of "\r\n".
    return max(buffer.rfind(b"\n"), buffer.rfind(b"\r", 0, max(0, len(buffer) - 1))) + 1


def _chunks(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Decompressed bytes and whether they are the last; the byte-order mark is dropped."""
    if path.is_dir():
        raise DataError(
            f"{path} is a folder; a recipe source is a file of JSON lines (.jsonl, .jsonl.gz). "
            f"Name the files in it one by one."
        )
    try:
        with path.open("rb") as raw:
            stream: BinaryIO = raw
            magic = raw.peek(8)[:8]
            if magic.startswith(_GZIP):
                stream = gzip.GzipFile(fileobj=raw)  # type: ignore[assignment]  # it reads bytes
            chunk = stream.read(BLOCK_BYTES)
            _refuse_other_kinds(path, chunk)
            chunk = chunk.removeprefix(_UTF8_MARK)
            while chunk:
                following = stream.read(BLOCK_BYTES)
                yield chunk, not following
                chunk = following
    except FileNotFoundError as error:
        raise DataError(
            f"{path} does not exist. Check data.sources: paths are relative to the folder the "
            f"command runs in ({Path.cwd()})."
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path} is a damaged or truncated gzip file ({error}). Download or compress it "
            f"again; `gzip -t` on the file tells whether it is whole."
        ) from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}. Check the permissions and the disk."
        ) from error


def _refuse_other_kinds(path: Path, head: bytes) -> None:
    for magic, what in _OTHER_KINDS.items():
        if head.startswith(magic):
            raise DataError(
                f"{path} is {what}. A recipe source holds one JSON object a line, in UTF-8, "
                f"plain or gzip."
            )


def _refuse_other_json(path: Path, payload: bytes, *, is_whole_file: bool) -> None:
    """Refuse a file that is one JSON value over many lines, or no JSON at all."""
    lines = [line.strip() for line in payload.splitlines() if line.strip()]
    first = lines[0]
    found, how = "", f"e.g. `jq -c '.[]' {path.name} > recipes.jsonl`"
    if first.startswith(b"["):
        found = "begins with '[': it is one JSON array, not one object a line"
    elif first == TOO_LONG:
        found = f"begins with a line of over {MAX_LINE_BYTES >> 20} MiB: it is one large value"
    elif first.startswith(b"{") and not _is_json(first) and any(map(_inside, lines[1:3])):
        found = "is one JSON object written over many lines, not one object a line"
    elif is_whole_file and len(lines) == 1 and _holds_records(first):
        found = "is one JSON object holding many, not one object a line"
    elif not any(line.startswith((b"{", TOO_LONG)) for line in lines):
        found = f"holds no line that begins with '{{' (the first begins {first[:40]!r})"
        how = "with the fields title, ingredients and directions"
    if found:
        raise DataError(
            f"{path} {found}. Write one JSON object a line, {how}, and name that file as the "
            f"source."
        )


def _inside(line: bytes) -> bool:
    return line.startswith((b'"', b"}", b"]"))


def _is_json(line: bytes) -> bool:
    try:
        decode_line(line)
    except ValueError:
        return False
    return True


def _holds_records(line: bytes) -> bool:
    value = decode_line(line) if _is_json(line) else None
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(entry, dict) for entry in value.values())
    )
