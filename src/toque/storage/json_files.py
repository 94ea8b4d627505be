"""JSON files: decoding that fails in one way, a checksum of itself, lines appended whole.

The last member of a sealed JSON object is `"self_sha256": "<64 hex digits>"`: SHA-256 of the file's
bytes with these digits left out. It finds damage; whoever forges a file can compute it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, final

import msgspec

from toque.errors import ToqueError
from toque.storage.no_follow import open_append

KEY: Final = "self_sha256"
_SEAL: Final = re.compile(rb'"self_sha256": "([0-9a-f]{64})"\s*}\s*\Z')

SealState = Literal["whole", "damaged", "absent"]
Kind = TypeVar("Kind")


def decode_json(text: bytes | str, kind: type[Kind]) -> Kind:
    """The value in `text`, of the form `kind`; whatever cannot be decoded is a DecodeError."""
    # msgspec passes over the bytes of members that `kind` does not have, so they are decoded first.
    try:
        return msgspec.json.decode(text if isinstance(text, str) else text.decode(), type=kind)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"byte {error.start:,} is not UTF-8") from error
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error


def read_json(path: Path, kind: type[Kind]) -> Kind | None:
    """The value in a file; None where it is absent, damaged or of another form."""
    try:
        return decode_json(path.read_bytes(), kind)
    except (OSError, msgspec.DecodeError):
        return None


def json_object(path: Path, *, error: type[ToqueError], todo: str) -> dict[str, Any]:
    """The object in a file, {} without a file; `error` with what is `todo` where it is damaged."""
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as failure:
        raise error(f"{path} cannot be read as JSON: {failure}. {todo}") from failure
    if not isinstance(value, dict):
        raise error(f"{path} holds no JSON object. {todo}")
    return value


def sealed(blank: bytes) -> bytes:
    """JSON text of an object whose last member is `"self_sha256": ""`, with its hash filled in."""
    before, key, after = blank.rpartition(f'"{KEY}": "'.encode())
    return before + key + hashlib.sha256(blank).hexdigest().encode() + after


def seal_of(text: bytes) -> SealState:
    """State of a text's seal: the hash in it is right, is another, or is not in its place.

    >>> seal_of(sealed(b'{"a": 1, "self_sha256": ""}'))
    'whole'
    >>> seal_of(sealed(b'{"a": 1, "self_sha256": ""}').replace(b"1", b"3"))
    'damaged'
    >>> seal_of(b'{"a": 1}')
    'absent'
    """
    found = _SEAL.search(text)
    if found is None:
        return "absent"
    blank = text[: found.start(1)] + text[found.end(1) :]
    return "whole" if hashlib.sha256(blank).hexdigest().encode() == found.group(1) else "damaged"


@final
class JsonLines:
    """A file of JSON lines to append to, though never to half a line that a killed writer left."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = open_append(path)
        size = os.fstat(self._descriptor).st_size
        self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def append(self, lines: Sequence[bytes]) -> OSError | None:
        """Hand the lines, all or none, to the system; the error of one that refused."""
        text = b"".join(line + b"\n" for line in lines)
        if self._torn:
            text = b"\n" + text
        before, written = os.fstat(self._descriptor).st_size, 0
        try:
            while written < len(text):
                written += os.write(self._descriptor, text[written:])
        except OSError as error:
            if written:  # no line is better than half a line
                was_torn, self._torn = self._torn, True
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, before)
                    self._torn = was_torn
            return error
        self._torn = False
        return None

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def append_json_lines(path: Path, lines: Sequence[bytes]) -> OSError | None:
    """Append to `path`, all lines or none; the error of a file system that refused, if it did."""
    try:
        with contextlib.closing(JsonLines(path)) as file:
            return file.append(lines)
    except OSError as error:
        return error
