"""Block payloads: a header that names the kind, so that a worker can decode it without the file.

JSON lines have no header. Every other kind begins with one line: a NUL, a mark, and JSON with the
kind and what is needed to decode it (the columns of a table, record numbers). A record that
cannot be read at all is a block of its own, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from toque.errors import DataError
from toque.sources.records import Block

MAX_RECORD_BYTES = 8 << 20
"""Longer than any recipe; a longer record is counted as dropped and never held in memory."""

TOO_LONG = "too long"
NOT_UTF_8 = "not UTF-8"
"""The reasons for dropping a record that is too long, or whose bytes are no text."""
_MARK = b"\0toque "
_MOST_NAMED = 100
"""Unused fields named, and characters of a name: some exports have one for every value."""

Raw = dict[str, Any] | str
"""A record's fields by name, or the reason why it cannot be read."""
Numbered = Iterator[tuple[int, Raw]]
"""Records, each with the number of the line, row or record it begins at."""


@dataclass(frozen=True)
class Contents:
    """A block's kind, its bytes, and what is needed to decode them."""

    kind: str
    meta: Mapping[str, Any]
    body: bytes
    first: int
    """Number of its first line, row or record."""


def unused_in(
    records: Iterable[Raw], used: Collection[str], unread: Collection[str] = ()
) -> dict[str, int]:
    """Fields that are filled and not used, with the number of records in which they are.

    `unread` are columns that were not read at all; they count with every record.

    >>> unused_in([{"a": "x", "b": "y"}, {"a": "", "b": "z", "c": 0}], {"b"})
    {'a': 1, 'c': 1}
    """
    whole = [record for record in records if isinstance(record, dict)]
    found = Counter(n for record in whole for n in record if n not in used and is_filled(record[n]))
    found.update(dict.fromkeys(unread, len(whole)))
    return most_named(found)


def is_filled(value: Any) -> bool:
    """Whether a field holds anything: a text that is not blank, a number, a list of some length."""
    if isinstance(value, str):
        return bool(value.strip())
    return value not in (None, [], {}) and value == value  # noqa: PLR0124  # pandas writes NaN


def most_named(found: Counter[str]) -> dict[str, int]:
    """The fields of most records, and one entry for others, none of which has more."""
    named = found.most_common(_MOST_NAMED)
    others = {"(others)": named[-1][1]} if len(named) < len(found) else {}
    return {name[:_MOST_NAMED]: n for name, n in named} | others


def pack(path: Path, number: int, kind: str, body: bytes, **meta: Any) -> Block:
    """A block of `kind` whose first record begins at line, row or record `number`."""
    header = msgspec.json.encode({"kind": kind, **meta})
    return Block(0, str(path), number, b"".join((_MARK, header, b"\n", body)))


def unreadable(path: Path, number: int, reason: str) -> Block:
    """A block for one record that cannot be read."""
    return pack(path, number, "unreadable", b"", reason=reason)


def unpack(block: Block) -> Contents:
    """What `pack` has put into a block; JSON lines, which have no header, are "json-lines".

    Raises:
        DataError: the payload was not made by this version's `pack`.
    """
    if not block.payload.startswith(_MARK):
        return Contents("json-lines", {}, block.payload, block.first_line)
    end = block.payload.index(b"\n")
    try:
        meta = msgspec.json.decode(block.payload[len(_MARK) : end], type=dict[str, Any])
        return Contents(meta.pop("kind"), meta, block.payload[end + 1 :], block.first_line)
    except (msgspec.DecodeError, KeyError) as error:
        raise DataError(
            f"The block of {block.path} from line {block.first_line} has a damaged header "
            f"({error}). This is a fault of the reader, not of the file."
        ) from error
