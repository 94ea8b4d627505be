"""Saved checkpoint: verified, then read whole or, by several ranks, each its slices.

    step-00000200/{model.safetensors, optimizer.safetensors, state.json, manifest.json}
    step-00000200/{shard-00000-of-00002.safetensors, ..., shards.json, state.json, manifest.json}

Whatever the layout, the tensors are those of one process: any number of ranks reads either.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from torch import Tensor

from toque.errors import CheckpointError
from toque.storage.atomic import ASIDE_PREFIX
from toque.storage.json_files import decode_json
from toque.training.checkpoint.manifest import Manifest, read_manifest, verify_files
from toque.training.checkpoint.shards import (
    LAYOUT,
    Like,
    ShardLayout,
    parse_layout,
    read_sharded,
    read_whole,
)

STATE: Final = "state.json"
STEP_FOLDER: Final = re.compile(rf"(?:{ASIDE_PREFIX})?step-([0-9]{{8,}})")


@dataclass(frozen=True)
class Skipped:
    """A folder that looked like a checkpoint, and why it cannot be used."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every file has been verified; others in its folder are never read."""

    path: Path
    manifest: Manifest
    skipped: tuple[Skipped, ...] = ()
    """Newer ones that could not be used."""

    @property
    def step(self) -> int:
        """The updates done when it was saved."""
        return self.manifest.step

    def tensors(self, stem: str, like: Like = lambda _name: None) -> dict[str, Tensor]:
        """The tensors saved as `stem`: "model", "optimizer" or "average".

        Args:
            stem: which.
            like: the tensor of this run that a stored one belongs to, by its name. Where that is a
                DTensor of the same shape, this rank's slice alone is read, into a DTensor.

        Raises:
            CheckpointError: the checkpoint holds none such.
        """
        layout = self.layout()
        if layout is None:
            return read_whole(self._listed(f"{stem}.safetensors"), like)
        return read_sharded(self.path, layout, stem, like)

    def layout(self) -> ShardLayout | None:
        """The layout of the shards; None if tensors are whole.

        Raises:
            CheckpointError: it cannot be, or names files that the manifest does not.
        """
        names = {entry.file for entry in self.manifest.files}
        if LAYOUT not in names:
            return None
        path = self.path / LAYOUT
        return parse_layout(_read(path), str(path), names)

    def state(self) -> dict[str, Any]:
        """The content of `state.json`.

        Raises:
            CheckpointError: there is none, or it is not a JSON object.
        """
        path = self._listed(STATE)
        try:
            return decode_json(_read(path), dict[str, Any])
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{path} is not a JSON object: {error}.") from error

    def _listed(self, name: str) -> Path:
        names = [entry.file for entry in self.manifest.files]
        if name not in names:
            raise CheckpointError(f"{self.path} has no {name}; it holds {', '.join(names)}.")
        return self.path / name


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def verify_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest and hash every file it lists.

    Raises:
        OtherFormatError: another version of Toque wrote it, which this one does not read.
        CheckpointError: it is unfinished, damaged, or stands under another step's name.
    """
    manifest = read_manifest(folder)
    named = STEP_FOLDER.fullmatch(folder.name)
    if named and int(named.group(1)) != manifest.step:
        raise CheckpointError(f"{folder} holds step {manifest.step}: it was renamed or copied.")
    verify_files(folder, manifest)
    return Checkpoint(folder, manifest)


def step_name(step: int) -> str:
    """The name of a checkpoint's folder.

    >>> step_name(200)
    'step-00000200'
    """
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    found = STEP_FOLDER.fullmatch(path.name)
    assert found is not None
    return int(found.group(1))


def step_folders(folder: Path) -> list[Path]:
    """`step-*` folders, newest first; one set aside counts while its successor is not in place."""
    if not folder.is_dir():
        return []
    names = {name for name in os.listdir(folder) if STEP_FOLDER.fullmatch(name)}  # noqa: PTH208
    names -= {name for name in names if name.removeprefix(ASIDE_PREFIX) in names - {name}}
    return sorted((folder / name for name in names), key=step_of, reverse=True)
