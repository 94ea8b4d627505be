"""JSON files: decoding with one error type, checksums inside the file, appended lines.

The last member of a sealed JSON object is `"self_sha256": "<64 hex digits>"`, the SHA-256 of the
file without these digits. The seal detects damage. It does not prevent forgery.
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
    """Decode a value of type `kind`.

    Raises:
        msgspec.DecodeError: The text is not UTF-8, not JSON, or has another form.
    """
    # msgspec does not check the bytes of members that `kind` lacks, so decode the text first.
    try:
        return msgspec.json.decode(
            text if isinstance(text, str) else text.decode(), type=kind
        )
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"byte {error.start:,} is not UTF-8") from error
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error


def read_json(path: Path, kind: type[Kind]) -> Kind | None:
    """Read a value from a file. Return None if the file is missing, damaged or has another form."""
    try:
        return decode_json(path.read_bytes(), kind)
    except (OSError, msgspec.DecodeError):
        return None


def json_object(path: Path, *, error: type[ToqueError], todo: str) -> dict[str, Any]:
    """Read a JSON object from a file. Return {} if the file does not exist.

    Args:
        path: The JSON file.
        error: The class of the error for a damaged file.
        todo: The advice at the end of its message.
    """
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as failure:
        raise error(f"{path} cannot be read as JSON: {failure}. {todo}") from failure
    if not isinstance(value, dict):
        raise error(f"{path} is not a JSON object. {todo}")
    return value


def sealed(blank: bytes) -> bytes:
    """Fill in the hash of a JSON object that ends in the member `"self_sha256": ""`."""
    before, key, after = blank.rpartition(f'"{KEY}": "'.encode())
    return before + key + hashlib.sha256(blank).hexdigest().encode() + after


def seal_of(text: bytes) -> SealState:
    """Check the seal of a JSON text: right, wrong ("damaged") or absent.

    >>> seal_of(sealed(b'{"a": 1, "self_sha256": ""}'))
    'whole'
    >>> seal_of(sealed(b'{"a": 1, "self_sha256": ""}').replace(b"1", b"3"))
    'damaged'
    >>> seal_of(b'{"a": 1}')
    'absent'
    """
    seal = _SEAL.search(text)
    if seal is None:
        return "absent"
    blank = text[: seal.start(1)] + text[seal.end(1) :]
    is_right = hashlib.sha256(blank).hexdigest().encode() == seal.group(1)
    return "whole" if is_right else "damaged"


@final
class JsonLines:
    """File of JSON lines to append to. A line that a killed writer left unfinished is ended."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = open_append(path)
        size = os.fstat(self._descriptor).st_size
        self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def append(self, lines: Sequence[bytes]) -> OSError | None:
        """Write all lines or none. Return the error if the file system refuses."""
        text = b"".join(line + b"\n" for line in lines)
        if self._torn:
            text = b"\n" + text

        size_before = os.fstat(self._descriptor).st_size
        written = 0
        try:
            while written < len(text):
                written += os.write(self._descriptor, text[written:])
        except OSError as error:
            if written:  # remove the unfinished line
                was_torn = self._torn
                self._torn = True
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, size_before)
                    self._torn = was_torn
            return error
        self._torn = False
        return None

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def append_json_lines(path: Path, lines: Sequence[bytes]) -> OSError | None:
    """Append all lines or none to `path`. Return the error if the file system refuses."""
    try:
        with contextlib.closing(JsonLines(path)) as file:
            return file.append(lines)
    except OSError as error:
        return error
