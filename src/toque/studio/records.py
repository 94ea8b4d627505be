"""Training records of models, read again only if their files change."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

from toque.errors import ToqueError
from toque.models.loading.provenance import FOLDER, RECORD, Provenance
from toque.runs.run_record import CONFIG
from toque.workflows.trained_model.training_record import read_record

_FILES: Final = (
    CONFIG,
    f"{FOLDER}/{RECORD}",
    f"model/{FOLDER}/{RECORD}",
    "config.json",
)
"""Files on which a record depends."""


def record_of(folder: Path) -> Provenance | None:
    """Return the record of a run or model folder. None if it is missing or damaged."""
    changes = []
    for name in _FILES:
        try:
            changes.append((folder / name).stat().st_mtime_ns)
        except OSError:
            changes.append(0)
    return _read(folder, tuple(changes))


@lru_cache(maxsize=512)
def _read(folder: Path, _changes: tuple[int, ...]) -> Provenance | None:
    try:
        return read_record(folder)
    except (ToqueError, OSError):
        return None
