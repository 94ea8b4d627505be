"""Verification of a store, a checkpoint or a run against its hashes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from toque.config import load_config
from toque.data.store.token_store import TokenStore
from toque.errors import CheckpointError, ConfigError
from toque.workflows.results import Model, existing_folder


@dataclass(frozen=True)
class Verified:
    """Parts that were found whole."""

    parts: tuple[str, ...]
    """A line for each store and checkpoint."""

    def __str__(self) -> str:
        """All lines."""
        return "\n".join(self.parts)


def verify(path: Model) -> Verified:
    """Compare every file of a store, a checkpoint or a run with its SHA-256.

    Raises:
        ConfigError: the folder is not one of the three.
        DataError: a store's file is missing or changed; file and cause are named.
        CheckpointError: a checkpoint's is.
    """
    folder = existing_folder(path)
    if (folder / "config.yaml").exists():
        return Verified(tuple(_run(folder)))
    if not (folder / "manifest.json").exists():
        raise ConfigError(
            f"{folder} is no store or checkpoint (manifest.json) and no run (config.yaml). Name "
            "one."
        )
    return Verified((_store(folder) if _is_store(folder) else _checkpoint(folder),))


def _is_store(path: Path) -> bool:
    if (path / "shards").is_dir():
        return True
    try:
        found = json.loads((path / "manifest.json").read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "shards" in found


def _store(path: Path) -> str:
    manifest = TokenStore.open(path, verify=True).manifest
    files = len(manifest.shards) + len(manifest.files)
    return f"{path}: store of {manifest.examples:,} examples, {files} files, every hash right"


def _checkpoint(path: Path) -> str:
    from toque.training.checkpoint.saved import verify_checkpoint  # with torch

    checkpoint = verify_checkpoint(path)
    size = sum(entry.bytes for entry in checkpoint.manifest.files)
    layout = checkpoint.layout()
    how = "" if layout is None else f" in {len(layout.files)} shards"
    return (
        f"{path}: checkpoint of step {checkpoint.step}, {size / 2**20:,.1f} MiB{how}, every hash "
        "right"
    )


def _run(path: Path) -> list[str]:
    steps = [*(path / "checkpoints").glob("step-*"), *(path / "best").glob("step-*")]
    lines, faults = [], []
    for folder in sorted(steps):
        try:
            lines.append(_checkpoint(folder))
        except CheckpointError as error:
            faults.append(str(error))
    store = Path(load_config(path / "config.yaml").config.data.store)
    if store.exists():
        lines.append(_store(store))
    if faults:
        raise CheckpointError(" ".join([*faults, f"{len(lines)} other parts are right."]))
    return lines or [f"{path}: no checkpoint yet"]
