"""Checksums: of files, and of JSON that carries a checksum of itself.

The last member of such a JSON object is `"self_sha256": "<64 hex digits>"`: SHA-256 of the file's
bytes with these digits left out, white space and all. It finds damage, a single flipped bit too;
whoever forges a file can compute it.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final, Literal

KEY: Final = "self_sha256"
_SEAL: Final = re.compile(rb'"self_sha256": "([0-9a-f]{64})"\s*}\s*\Z')

SealState = Literal["whole", "damaged", "absent"]


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.sha256).hexdigest()


def md5_of(path: Path) -> str:
    """MD5 of a file's bytes, in hexadecimal: what buckets compare by, no proof against forgery."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def sealed(blank: bytes) -> bytes:
    """`blank` with its hash filled in.

    Args:
        blank: JSON text of an object whose last member is `"self_sha256": ""`.
    """
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
