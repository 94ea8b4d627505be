"""Pickle detection by content: pickles are refused, because reading one runs code from it."""

from __future__ import annotations

import zipfile
from pathlib import Path

from toque.errors import DataError
from toque.sources.npz_stream import BROKEN_ARCHIVE

_PROTOCOLS = (2, 3, 4, 5)
"""Protocols that begin with their number; older ones are text and obsolete since 2003."""


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle, or torch's archive around one."""
    try:
        with path.open("rb") as file:
            start = file.read(2)
            if start[:1] == b"\x80" and start[1:] in (bytes([p]) for p in _PROTOCOLS):
                file.seek(-1, 2)
                return file.read(1) == b"."  # the opcode that ends every pickle
        if start == b"PK":
            with zipfile.ZipFile(path) as archive:
                return any(name.endswith(".pkl") for name in archive.namelist())
    except BROKEN_ARCHIVE:
        return False  # the reader reports it
    return False


def refuse_pickle(path: Path, name: str) -> None:
    """Raise when the file is a pickle.

    Raises:
        DataError: it is; the message says how to convert it.
    """
    if is_pickle(path):
        raise DataError(
            f"{name} is a pickle, and reading one runs whatever code it brings, so it is not read. "
            "On a machine you trust, write its records as JSON lines once (one json.dumps(record) "
            "a line) or as Parquet, and name that file in data.sources."
        )
