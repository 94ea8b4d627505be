"""JSON files: decoding with a single type of error, checksums in the file, appended lines.

The last member of a sealed JSON object is `"self_sha256": "<64 hex digits>"`, the SHA-256 of the
file without these digits. The seal detects damage, not forgery.
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
    """Decode a JSON value of type `kind`.

    Raises:
        msgspec.DecodeError: The text is not valid UTF-8 or JSON, or its value has another type.
    """
    try:
        if isinstance(text, bytes):
            # msgspec does not check the encoding of members that are not in `kind`.
            text = text.decode()
        return msgspec.json.decode(text, type=kind)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"byte {error.start:,} is not UTF-8") from error
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error


def read_json(path: Path, kind: type[Kind]) -> Kind | None:
    """Read a JSON value of type `kind`. Return None if the file is missing or not valid."""
    try:
        return decode_json(path.read_bytes(), kind)
    except (OSError, msgspec.DecodeError):
        return None


def read_json_object(
    path: Path, *, error: type[ToqueError], advice: str
) -> dict[str, Any]:
    """Read a JSON object from a file. Return {} if the file does not exist.

    Args:
        path: The JSON file.
        error: Class of the error for a damaged file.
        advice: End of the error's message.
    """
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as failure:
        raise error(f"{path} cannot be read as JSON: {failure}. {advice}") from failure
    if not isinstance(value, dict):
        raise error(f"{path} is not a JSON object. {advice}")
    return value


def add_seal(blank: bytes) -> bytes:
    """Fill in the hash of a JSON object that ends in the member `"self_sha256": ""`."""
    before, key, after = blank.rpartition(f'"{KEY}": "'.encode())
    return before + key + hashlib.sha256(blank).hexdigest().encode() + after


def check_seal(text: bytes) -> SealState:
    """Compare the seal of a JSON text with its content.

    >>> check_seal(add_seal(b'{"a": 1, "self_sha256": ""}'))
    'whole'
    >>> check_seal(add_seal(b'{"a": 1, "self_sha256": ""}').replace(b"1", b"3"))
    'damaged'
    >>> check_seal(b'{"a": 1}')
    'absent'
    """
    seal = _SEAL.search(text)
    if seal is None:
        return "absent"
    blank = text[: seal.start(1)] + text[seal.end(1) :]
    is_valid = hashlib.sha256(blank).hexdigest().encode() == seal.group(1)
    return "whole" if is_valid else "damaged"


@final
class JsonLines:
    """File of JSON lines to append to. A line that a killed writer left incomplete is ended."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = open_append(path)
        size = os.fstat(self._descriptor).st_size
        self._is_torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        """True if the last line is incomplete."""

    def append(self, lines: Sequence[bytes]) -> OSError | None:
        """Write all lines or none. Return the error if writing fails."""
        text = b"".join(line + b"\n" for line in lines)
        if self._is_torn:
            text = b"\n" + text

        size_before = os.fstat(self._descriptor).st_size
        written = 0
        try:
            while written < len(text):
                written += os.write(self._descriptor, text[written:])
        except OSError as error:
            if written:
                self._remove_after(size_before)
            return error
        self._is_torn = False
        return None

    def _remove_after(self, size: int) -> None:
        """Cut the file to `size` bytes. If this fails, the last line remains incomplete."""
        try:
            os.ftruncate(self._descriptor, size)
        except OSError:
            self._is_torn = True

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def append_json_lines(path: Path, lines: Sequence[bytes]) -> OSError | None:
    """Append all lines or none to `path`. Return the error if writing fails."""
    try:
        with contextlib.closing(JsonLines(path)) as file:
            return file.append(lines)
    except OSError as error:
        return error
