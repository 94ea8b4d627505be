"""What a block's payload says of itself, so that a worker can read it without its file.

JSON lines travel as they are. Every other kind has one line before its bytes: a NUL, a mark, and
JSON that names the kind and what reading it needs (the columns of a table, record numbers).
A record that cannot be read at all is a block of its own, which says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from toque.errors import DataError
from toque.sources.records import Block

MAX_RECORD_BYTES = 8 << 20
"""No recipe is longer; a longer record is counted and its text never held."""

TOO_LONG = "too long"
_MARK = b"\0toque "

Raw = dict[str, Any] | str
"""A record's fields by name, or the reason why there are none."""
Numbered = Iterator[tuple[int, Raw]]
"""Records with the number of the line, row or record they begin at."""


@dataclass(frozen=True)
class Header:
    """How to read the bytes after it."""

    kind: str
    meta: Mapping[str, Any]


def pack(path: Path, number: int, kind: str, body: bytes, **meta: Any) -> Block:
    """A block of `kind` whose first record begins at line, row or record `number`."""
    header = msgspec.json.encode({"kind": kind, **meta})
    return Block(0, str(path), number, b"".join((_MARK, header, b"\n", body)))


def unreadable(path: Path, number: int, reason: str) -> Block:
    """A block that stands for one record without any text."""
    return pack(path, number, "unreadable", b"", reason=reason)


def unpack(block: Block) -> tuple[Header, memoryview]:
    """The header and the bytes after it; JSON lines have the header "json-lines".

    Raises:
        DataError: the payload was not made by this version's `pack`.
    """
    if not block.payload.startswith(_MARK):
        return Header("json-lines", {}), memoryview(block.payload)
    end = block.payload.index(b"\n")
    try:
        meta = msgspec.json.decode(block.payload[len(_MARK) : end], type=dict[str, Any])
        return Header(meta.pop("kind"), meta), memoryview(block.payload)[end + 1 :]
    except (msgspec.DecodeError, KeyError) as error:
        raise DataError(
            f"The block of {block.path} from line {block.first_line} has a damaged header "
            f"({error}). This is a fault of the reader, not of the file."
        ) from error
