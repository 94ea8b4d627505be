"""Rows of a program, from its memory to a file that is read like any other.

Rows are written as JSON lines while they come, so that memory holds a few of them; the file's name
is a hash of its content, so that the same rows are the same source, and their store is reused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from toque.errors import DataError, argument
from toque.storage.atomic import atomic_file, disk_faults, sha256_of
from toque.storage.bucket_lock import died_here, this_machine
from toque.storage.no_follow import refuse_links

ROWS: Final = "rows"  # folder of such files in a store's
_NAME: Final = re.compile(r"[0-9a-f]{16}\.jsonl")
_NEW: Final = re.compile(r"\.?new-(.+)-([0-9]+)(\.[0-9a-f]{8})?\.jsonl(\.[0-9a-f]{16}\.partial)?")
"""A file that is being written, by the machine and the id of the process that writes it."""
_AT_ONCE: Final = 4096  # rows taken from a frame at a time
_MISSING: Final = ("NAType", "NaTType")  # pandas' own missing values
_BYTES: Final = (bytes, bytearray, memoryview)
_FORMS: Final = (
    "a list of dicts, another iterable of dicts or texts, a datasets.Dataset, or a frame of pandas "
    "or polars"
)


def write_rows(
    data: object, store: Path, *, name: str, say: Callable[[str], None] = lambda _: None
) -> Path:
    """The file of these rows in the store's folder, written there; DataError where it cannot be.

    A text is the row {"text": ...}. `name` is the argument that `data` was given as, for errors;
    `say` hears of what is not read.
    """
    refuse_links(store, DataError)
    rows, folder, digest = _rows_of(data, name, say), store / ROWS, hashlib.sha256()
    encoder, number = msgspec.json.Encoder(enc_hook=_plain), 0
    with disk_faults(store, "keeping the rows"):
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        # Two threads may write here, too.
        made = folder / f"new-{_host()}-{os.getpid()}.{secrets.token_hex(4)}.jsonl"
        with atomic_file(made) as file:
            for number, row in enumerate(_each(rows, name), start=1):
                line = _line(encoder, row, f"Row {number:,} of {argument(name)}")
                digest.update(line)
                file.write(line)
            if not number:
                raise DataError(f"{argument(name)} has no row. Give {_FORMS}.")
        path = folder / f"{digest.hexdigest()[:16]}.jsonl"
        made.replace(path)
        return path


def _sweep(folder: Path) -> None:
    """Remove what killed processes of this machine left; the other ranks of a run write here, too.

    No lock is held meanwhile, because the rows of a program may take long to come.
    """
    for path in folder.iterdir():
        found = _NEW.fullmatch(path.name)
        if found is None or found[1] != _host():
            continue
        if died_here({"machine": this_machine(), "pid": int(found[2])}):
            path.unlink(missing_ok=True)


def _host() -> str:
    return socket.gethostname()[:64].replace("/", "-")


def forget_rows(store: Path, kept: Collection[str]) -> None:
    """Remove the files of rows in a store's folder, save those named, and folders left empty."""
    for path in (store / ROWS).glob("*.jsonl"):
        if _NAME.fullmatch(path.name) and path.name not in kept:
            path.unlink(missing_ok=True)
    for folder in (store / ROWS, store):
        with suppress(OSError):  # it holds something else, or was never made
            folder.rmdir()


def verify_rows(store: Path) -> int:
    """Compare each file of rows in a store's folder with the hash in its name; the files' number.

    Raises:
        DataError: one holds other rows than its name says.
    """
    kept = [path for path in (store / ROWS).glob("*.jsonl") if _NAME.fullmatch(path.name)]
    for path in kept:
        if sha256_of(path)[:16] != path.stem:
            raise DataError(
                f"{path} was damaged: its SHA-256 is not the one in its name. Give the rows again "
                "from Python, which writes it anew; a prepared store is not affected."
            )
    return len(kept)


def _rows_of(data: object, name: str, say: Callable[[str], None]) -> Iterator[object]:
    """The rows of what is iterated over otherwise than by them, too."""
    given, frame = argument(name), cast("Any", data)
    if isinstance(data, str | bytes | Path):
        raise DataError(
            f"{given} is {str(data)[:60]!r}, no rows. Files are named in the configuration: "
            f"data={{'sources': [{{'path': {str(data)[:60]!r}}}]}}. Here give {_FORMS}."
        )
    if isinstance(data, Mapping):
        raise DataError(
            f"{given} is a dict of {', '.join(map(str, data))[:200]}. Of a DatasetDict give a "
            "split, e.g. data=found['train'], validation=found['test']; of columns make "
            "datasets.Dataset.from_dict(columns)."
        )
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        return _pandas_rows(frame, given, say)
    if hasattr(data, "iter_rows"):
        return cast("Iterator[object]", frame.iter_rows(named=True))
    if hasattr(data, "to_batches"):
        batches = frame.to_batches(max_chunksize=_AT_ONCE)
        return (row for batch in batches for row in batch.to_pylist())
    try:  # polars' LazyFrame seems to be one
        return iter(cast("Iterable[object]", None if hasattr(data, "collect") else data))
    except TypeError as error:
        kind = type(data).__name__
        raise DataError(
            f"{given} is a {kind}, whose rows cannot be read. Give {_FORMS}."
        ) from error


def _pandas_rows(frame: Any, given: str, say: Callable[[str], None]) -> Iterator[object]:
    names = list(frame.columns)
    odd = [n for n in names if not isinstance(n, str) or names.count(n) > 1]
    if odd:
        raise DataError(
            f"{given} is a frame with the column {odd[0]!r}: every column needs a text of its own "
            "as its name. Rename it: frame.columns = [...]."
        )
    index = frame.index
    if index.dtype.kind not in "iu" or any(name is not None for name in index.names):
        shown = ", ".join(str(name) for name in index.names if name is not None)
        say(
            f"{given} is a frame with an index of its own ({shown or index.dtype}), which is no "
            "column and is not read; frame.reset_index() makes it one."
        )
    return (
        row
        for at in range(0, len(frame), _AT_ONCE)
        for row in frame.iloc[at : at + _AT_ONCE].to_dict("records")
    )


def _each(rows: Iterator[object], name: str) -> Iterator[object]:
    """The rows, and a DataError where the program's iterable raises."""
    number = 0
    try:
        for row in rows:
            number += 1
            yield row
    except Exception as error:
        raise DataError(
            f"{argument(name)} raised {type(error).__name__} after {number:,} rows: {error}. "
            "Nothing of it is kept, and no store was begun."
        ) from error


def _line(encoder: msgspec.json.Encoder, row: object, which: str) -> bytes:
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise DataError(
            f"{which} is a {type(row).__name__} ({str(row)[:60]!r}). A row is a dict of fields by "
            "their names, or a text."
        )
    try:
        plain = msgspec.to_builtins(dict(row), builtin_types=_BYTES, enc_hook=_plain)
        if place := _place_of_bytes(plain):
            raise DataError(
                f"{which} holds bytes in {place}. Decode them to text, or leave it out."
            )
        try:
            return encoder.encode(plain) + b"\n"
        except UnicodeEncodeError:  # half a character, which the reader replaces and counts
            return json.dumps(plain).encode() + b"\n"
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{which} cannot be kept as JSON: {error}. Make its fields texts, numbers or lists of "
            "them, or leave them out."
        ) from error


def _place_of_bytes(value: object) -> str:
    """The place of the first bytes in a row, which JSON would hold as base64; "" for no bytes.

    >>> _place_of_bytes({"messages": [{"content": b"x"}]}), _place_of_bytes({"text": "x"})
    ("'messages', 0, 'content'", '')
    """
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, inner in items:
        if isinstance(key, _BYTES) or isinstance(inner, _BYTES):
            return repr(key)
        if below := _place_of_bytes(inner):
            return f"{key!r}, {below}"
    return ""


def _plain(value: Any) -> object:
    """A value that JSON can hold, of numpy, torch, pandas or a mapping of another type."""
    if type(value).__name__ in _MISSING:
        return None
    if isinstance(value, Mapping):
        return dict(value)
    for name in ("isoformat", "tolist"):
        if hasattr(value, name):
            return getattr(value, name)()
    raise TypeError(f"a {type(value).__name__} is no text, number or list")
