"""Saved checkpoint: its manifest, verified, then read whole or, by several ranks, each its slices.

    step-00000200/{model.safetensors, optimizer.safetensors, state.json, manifest.json}
    step-00000200/{shard-00000-of-00002.safetensors, ..., shards.json, state.json, manifest.json}

A checkpoint exists when its manifest verifies: JSON with the size and SHA-256 of its files, written
last. Whatever the layout, the tensors are those of one process: any number of ranks reads either.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from torch import Tensor

from toque.errors import CheckpointError
from toque.storage.atomic import ASIDE_PREFIX, FileEntry, sha256_of
from toque.storage.json_files import KEY, decode_json, seal_of, sealed
from toque.training.checkpoint.tensor_files import (
    LAYOUT,
    Like,
    ShardLayout,
    parse_layout,
    read_sharded,
    read_whole,
)

WHOLE: Final = 1
SHARDED: Final = 2
"""Formats of a checkpoint, by its layout. A new one adds a number; `tests/golden/checkpoint-v*`
holds a checkpoint of each, which must load to the same loss."""
MANIFEST: Final = "manifest.json"
MOST_BYTES: Final = 1 << 24  # a manifest, and any small file of a run, has less


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `manifest.json`."""

    format: int
    step: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    progress: dict[str, Any]
    cursor: dict[str, Any]
    config_sha256: str
    data_fingerprint: str
    versions: dict[str, str]
    files: tuple[FileEntry, ...]
    settings: dict[str, Any]
    metrics: dict[str, float] = {}
    """Metrics of the evaluation that made it one of the best; empty in an ordinary checkpoint."""
    self_sha256: str = ""

    def to_json(self) -> bytes:
        """Indented JSON, for people and for `read_manifest`."""
        return sealed(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


class _Version(msgspec.Struct):
    format: int
    settings: Any = msgspec.UNSET


class OtherFormatError(CheckpointError):
    """Written by another version of Toque; falling back to an older checkpoint would lose work."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`, its form checked, its files not yet; see `parse_manifest`."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MOST_BYTES:
            raise CheckpointError(f"{path} is {path.stat().st_size} bytes long; no manifest is.")
        text = path.read_bytes()
    except FileNotFoundError:
        why = "it was never finished" if folder.is_dir() else "the folder was removed or moved"
        raise CheckpointError(f"{folder} has no {MANIFEST}: {why}.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return parse_manifest(text, str(path))


def parse_manifest(text: bytes, place: str) -> Manifest:
    """The manifest in `text`, read from `place`; a CheckpointError unless its form and hash fit."""
    try:
        found = decode_json(text, _Version)
        if found.format > SHARDED:
            raise OtherFormatError(
                f"{place} has format {found.format}; this Toque reads up to {SHARDED}. Install a "
                "newer Toque, or move this checkpoint away to continue from an older one."
            )
        if found.format not in (WHOLE, SHARDED):
            raise CheckpointError(f"{place} has format {found.format}, which no Toque ever wrote.")
        if found.settings is msgspec.UNSET:
            raise OtherFormatError(
                f"{place} was written by a development version before Toque 0.2.0, which this "
                "version cannot read. Nothing was changed. Finish the run with the version that "
                "started it, or export its model with that version and start a new run from it."
            )
        manifest = decode_json(text, Manifest)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{place} is not a checkpoint's manifest: {error}.") from error
    names = [entry.file for entry in manifest.files]
    for name in names:
        # A manifest may come from anywhere: it must not make us read outside its folder.
        if not name or name != Path(name).name or name in {".", "..", MANIFEST} or "\0" in name:
            raise CheckpointError(
                f"{place} names the file {name!r}; only plain names in its folder are allowed."
            )
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise CheckpointError(f"{place} lists {', '.join(doubled)} more than once.")
    if (seal := seal_of(text)) != "whole":
        absent = f"it has no hash of itself ({KEY})"
        why = absent if seal == "absent" else "it does not have the hash that stands in it"
        raise CheckpointError(f"{place} is damaged: {why}.")
    return manifest


def verify_files(folder: Path, manifest: Manifest, *, hashed: bool = True) -> None:
    """Compare every listed file's size and, if `hashed`, SHA-256; else a CheckpointError."""
    most = min(len(manifest.files), os.cpu_count() or 1)
    with ThreadPoolExecutor(max(1, most)) as threads:  # hashing releases Python's lock
        for _ in threads.map(partial(_verify_file, folder, hashed=hashed), manifest.files):
            pass


def _verify_file(folder: Path, entry: FileEntry, *, hashed: bool) -> None:
    path = folder / entry.file
    try:
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path} is missing or is not a plain file.")
        size = path.stat().st_size
        if size != entry.bytes:
            raise CheckpointError(f"{path} has {size} bytes, its manifest says {entry.bytes}.")
        found = sha256_of(path) if hashed else entry.sha256
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if found != entry.sha256:
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 is {found[:12]}…, its manifest says "
            f"{entry.sha256[:12]}…."
        )


STATE: Final = "state.json"
STEP_FOLDER: Final = re.compile(rf"(?:{ASIDE_PREFIX})?step-([0-9]{{8,}})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every file has been verified; others in its folder are never read."""

    path: Path
    manifest: Manifest
    skipped: tuple[tuple[str, str], ...] = ()  # name and reason of newer ones that are of no use

    @property
    def step(self) -> int:
        """The updates done when it was saved."""
        return self.manifest.step

    def tensors(self, stem: str, like: Like = lambda _name: None) -> dict[str, Tensor]:
        """The tensors saved as `stem`: "model" or "optimizer".

        Where `like` gives a DTensor of a stored one's name and shape, this rank's slice is read.
        """
        layout = self.layout()
        if layout is None:
            return read_whole(self._listed(f"{stem}.safetensors"), like)
        return read_sharded(self.path, layout, stem, like)

    def layout(self) -> ShardLayout | None:
        """The layout of the shards; None if tensors are whole."""
        names = {entry.file for entry in self.manifest.files}
        if LAYOUT not in names:
            return None
        path = self.path / LAYOUT
        return parse_layout(_read(path), str(path), names)

    def state(self) -> dict[str, Any]:
        """The content of `state.json`; CheckpointError where it is not a JSON object."""
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
    """Read a checkpoint's manifest and hash every file it lists; errors as of `parse_manifest`."""
    manifest = read_manifest(folder)
    named = STEP_FOLDER.fullmatch(folder.name)
    if named and int(named.group(1)) != manifest.step:
        raise CheckpointError(f"{folder} holds step {manifest.step}: it was renamed or copied.")
    verify_files(folder, manifest)
    return Checkpoint(folder, manifest)


def step_name(step: int) -> str:
    """The name of a checkpoint's folder, e.g. step-00000200."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    found = STEP_FOLDER.fullmatch(path.name)
    assert found is not None
    return int(found.group(1))


def step_folders(folder: Path) -> list[Path]:
    """`step-*` folders, newest first; one set aside counts while its successor is not in place."""
    names = set[str]()
    with suppress(FileNotFoundError, NotADirectoryError):  # where the run is moved just now
        if folder.is_dir():
            names = {n for n in os.listdir(folder) if STEP_FOLDER.fullmatch(n)}  # noqa: PTH208
    names -= {name for name in names if name.removeprefix(ASIDE_PREFIX) in names - {name}}
    return sorted((folder / name for name in names), key=step_of, reverse=True)
