"""Files with the rows that a program passes in memory. They are read like any other source.

The rows are written one by one as JSON lines, so they need little memory. The file name is a hash
of the content, so equal rows are the same source and reuse its store.
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
from typing import Any, cast

import msgspec

from toque.errors import DataError, argument
from toque.storage.atomic import atomic_file, disk_faults, sha256_of
from toque.storage.bucket_lock import died_here, this_machine
from toque.storage.no_follow import refuse_links

ROWS = "rows"  # folder of the files, inside the store
_NAME = re.compile(r"[0-9a-f]{16}\.jsonl")
_NEW = re.compile(
    r"\.?new-(.+)-([0-9]+)(\.[0-9a-f]{8})?\.jsonl(\.[0-9a-f]{16}\.partial)?"
)
"""Name of an unfinished file, with the machine and the id of the process that writes it."""
_BATCH_ROWS = 4096  # number of rows per conversion of a frame
_MISSING = ("NAType", "NaTType")  # pandas types for missing values
_BYTES = (bytes, bytearray, memoryview)
_FORMS = (
    "a list of dicts, another iterable of dicts or texts, a datasets.Dataset, or a frame of pandas "
    "or polars"
)


def write_rows(
    data: object, store: Path, *, name: str, say: Callable[[str], None] = lambda _: None
) -> Path:
    """Write rows to a file in the store's folder, and return its path.

    Args:
        data: Rows to write. A text becomes the row {"text": ...}.
        store: The folder of the store.
        name: The name of the argument that contains `data`, for errors.
        say: Function that reports unread data, such as an index.

    Raises:
        DataError: The rows cannot be read or written.
    """
    refuse_links(store, DataError)
    rows = _iterate_rows(data, name, say)
    folder = store / ROWS
    digest = hashlib.sha256()
    encoder = msgspec.json.Encoder(enc_hook=_to_json_type)
    number = 0

    with disk_faults(store, "saving the rows"):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(folder)
        # The random part makes the names of a process's threads unique.
        process = f"{_host()}-{os.getpid()}.{secrets.token_hex(4)}"
        unfinished = folder / f"new-{process}.jsonl"
        with atomic_file(unfinished) as file:
            for number, row in enumerate(_report_failure(rows, name), start=1):
                line = _encode_row(encoder, row, f"Row {number:,} of {argument(name)}")
                digest.update(line)
                file.write(line)
            if not number:
                raise DataError(f"{argument(name)} has no rows. Pass {_FORMS}.")
        path = folder / f"{digest.hexdigest()[:16]}.jsonl"
        unfinished.replace(path)
        return path


def _remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files of killed processes on this machine.

    Other ranks of the run may be writing their files. A lock would make them wait for each other,
    and a program may take a long time to produce its rows.
    """
    for path in folder.iterdir():
        match = _NEW.fullmatch(path.name)
        if match is None or match[1] != _host():
            continue
        if died_here({"machine": this_machine(), "pid": int(match[2])}):
            path.unlink(missing_ok=True)


def _host() -> str:
    return socket.gethostname()[:64].replace("/", "-")


def forget_rows(store: Path, retained_names: Collection[str]) -> None:
    """Remove the files of rows from a store's folder, except `retained_names`.

    Also remove the folders if they are then empty.
    """
    for path in (store / ROWS).glob("*.jsonl"):
        if _NAME.fullmatch(path.name) and path.name not in retained_names:
            path.unlink(missing_ok=True)
    for folder in (store / ROWS, store):
        with suppress(OSError):  # the folder has other files or does not exist
            folder.rmdir()


def verify_rows(store: Path) -> int:
    """Compare each file of rows in a store with the hash in its name. Return the number of files.

    Raises:
        DataError: The content of a file does not match its name.
    """
    paths = [
        path for path in (store / ROWS).glob("*.jsonl") if _NAME.fullmatch(path.name)
    ]
    for path in paths:
        if sha256_of(path)[:16] != path.stem:
            raise DataError(
                f"{path} is damaged: its SHA-256 does not match its name. The prepared store is "
                "not affected. To write the file again, pass the same rows from Python."
            )
    return len(paths)


def _iterate_rows(
    data: object, name: str, say: Callable[[str], None]
) -> Iterator[object]:
    """Iterate over the rows of a list, another iterable, a dataset or a frame."""
    label = argument(name)
    _refuse_path_or_dict(data, label)

    frame = cast("Any", data)
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # pandas
        return _pandas_rows(frame, label, say)
    if hasattr(data, "iter_rows"):  # polars
        return cast("Iterator[object]", frame.iter_rows(named=True))
    if hasattr(data, "to_batches"):  # pyarrow
        batches = frame.to_batches(max_chunksize=_BATCH_ROWS)
        return (row for batch in batches for row in batch.to_pylist())

    try:
        if hasattr(data, "collect"):  # a LazyFrame of polars has __iter__, but no rows
            raise TypeError
        return iter(cast("Iterable[object]", data))
    except TypeError as error:
        kind = type(data).__name__
        raise DataError(
            f"{label} is a {kind}, which has no readable rows. Pass {_FORMS}."
        ) from error


def _refuse_path_or_dict(data: object, label: str) -> None:
    """Raise a DataError for a path, and for a dict of splits or of columns."""
    if isinstance(data, str | bytes | Path):
        path = f"{str(data)[:60]!r}"
        raise DataError(
            f"{label} must be rows, not {path}. To read a file, name it in the configuration: "
            f"data={{'sources': [{{'path': {path}}}]}}. To pass rows, use {_FORMS}."
        )
    if isinstance(data, Mapping):
        raise DataError(
            f"{label} is a dict of {', '.join(map(str, data))[:200]}. Pass one split of a "
            "DatasetDict, e.g. data=splits['train'], validation=splits['test']. Convert a dict of "
            "columns with datasets.Dataset.from_dict(columns)."
        )


def _pandas_rows(
    frame: Any, label: str, say: Callable[[str], None]
) -> Iterator[object]:
    """Iterate over the rows of a DataFrame. `say` reports an index that is not read."""
    names = list(frame.columns)
    for name in names:
        if not isinstance(name, str) or names.count(name) > 1:
            raise DataError(
                f"{label} is a DataFrame with the column {name!r}. Column names must be unique "
                "strings. Rename the columns: frame.columns = [...]."
            )
    index = frame.index
    index_names = [str(name) for name in index.names if name is not None]
    if index.dtype.kind not in "iu" or index_names:
        shown = ", ".join(index_names) or index.dtype
        say(
            f"{label} is a DataFrame with an index ({shown}), which is not read. To read it as "
            "a column, pass frame.reset_index()."
        )
    starts = range(0, len(frame), _BATCH_ROWS)
    batches = (frame.iloc[start : start + _BATCH_ROWS] for start in starts)
    return (row for batch in batches for row in batch.to_dict("records"))


def _report_failure(rows: Iterator[object], name: str) -> Iterator[object]:
    """Yield the rows. Convert an exception of the program's iterable into a DataError."""
    number = 0
    try:
        for row in rows:
            number += 1
            yield row
    except Exception as error:
        raise DataError(
            f"{argument(name)} raised {type(error).__name__} after {number:,} rows: {error}. "
            "No rows were saved, and no store was written."
        ) from error


def _encode_row(encoder: msgspec.json.Encoder, row: object, label: str) -> bytes:
    """Encode a row as a JSON line. `label` names the row in errors."""
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise DataError(
            f"{label} is a {type(row).__name__} ({str(row)[:60]!r}). A row must be a text or a "
            "dict with field names as keys."
        )
    try:
        value = msgspec.to_builtins(
            dict(row), builtin_types=_BYTES, enc_hook=_to_json_type
        )
        if keys := _find_bytes(value):
            raise DataError(
                f"{label} contains bytes in {keys}. Decode the bytes to text or remove the field."
            )
        try:
            return encoder.encode(value) + b"\n"
        except UnicodeEncodeError:
            # The reader replaces and counts lone surrogates, which `json` escapes.
            return json.dumps(value).encode() + b"\n"
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{label} cannot be saved as JSON: {error}. Convert its fields to strings, numbers or "
            "lists, or remove them."
        ) from error


def _find_bytes(value: object) -> str:
    """Return the keys that lead to the first bytes in a row, or "". msgspec would write base64.

    >>> _find_bytes({"messages": [{"content": b"x"}]}), _find_bytes({"text": "x"})
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
        if inner_keys := _find_bytes(inner):
            return f"{key!r}, {inner_keys}"
    return ""


def _to_json_type(value: Any) -> object:
    """Convert a value of numpy, torch or pandas, or another mapping, to a type of JSON."""
    if type(value).__name__ in _MISSING:
        return None
    if isinstance(value, Mapping):
        return dict(value)
    for name in ("isoformat", "tolist"):
        if hasattr(value, name):
            return getattr(value, name)()
    raise TypeError(f"{type(value).__name__} is not a text, number or list")
