"""Checkpoint manifest: identity and progress of a checkpoint, size and SHA-256 of its files.

A checkpoint exists when its manifest verifies. The manifest is JSON, is written last, and a
reader trusts nothing it says about places: file names are plain names in the same folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from toque.errors import CheckpointError
from toque.storage.atomic import FileEntry, sha256_of
from toque.storage.json_files import KEY, decode_json, seal_of, sealed

WHOLE: Final = 1
SHARDED: Final = 2
"""Formats of a checkpoint, by its layout. A new one adds a number; `tests/golden/checkpoint-v*`
holds a checkpoint of each, which must load to the same loss."""
MANIFEST: Final = "manifest.json"
MOST_BYTES: Final = 1 << 24
"""A manifest, and any small file of a run, has less."""


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
    """The configuration it was saved under."""
    metrics: dict[str, float] = {}
    """Metrics of the evaluation that made it one of the best; empty in an ordinary checkpoint."""
    self_sha256: str = ""
    """SHA-256 of this file's bytes with these digits left out."""

    def to_json(self) -> bytes:
        """Indented JSON, for people and for `read_manifest`."""
        return sealed(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


class _Version(msgspec.Struct):
    format: int
    settings: Any = msgspec.UNSET


class OtherFormatError(CheckpointError):
    """Written by another version of Toque; falling back to an older checkpoint would lose work."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`, its form checked, its files not yet.

    Raises:
        OtherFormatError: another version of Toque wrote it, which this one does not read.
        CheckpointError: it is missing, damaged, or names what no checkpoint may name.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MOST_BYTES:
            raise CheckpointError(f"{path} is {path.stat().st_size} bytes long; no manifest is.")
        text = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it was never finished.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return parse_manifest(text, str(path))


def parse_manifest(text: bytes, place: str) -> Manifest:
    """The manifest in `text`, which was read from `place`, its form and its own hash checked.

    Raises:
        OtherFormatError: another version of Toque wrote it, which this one does not read.
        CheckpointError: it is damaged, or names what no checkpoint may name.
    """
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
                f"{place} was written by version 0.1.0 of Toque, as it was before checkpoints held "
                "the settings they were saved under. This version does not read it, and nothing "
                "was touched. The version of that day does: finish the run with it, or export its "
                "model there and begin a new run from that."
            )
        manifest = decode_json(text, Manifest)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{place} is not a checkpoint's manifest: {error}.") from error
    _check_names(manifest, place)
    seal = seal_of(text)
    if seal == "absent":
        raise CheckpointError(f"{place} is damaged: it has no hash of itself ({KEY}).")
    if seal == "damaged":
        raise CheckpointError(f"{place} is damaged: it does not have the hash that stands in it.")
    return manifest


def _check_names(manifest: Manifest, place: str) -> None:
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


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare every listed file's size and SHA-256.

    Raises:
        CheckpointError: a file is missing, is not a plain file, or differs.
    """
    most = min(len(manifest.files), os.cpu_count() or 1)
    with ThreadPoolExecutor(max(1, most)) as threads:  # hashing releases Python's lock
        for _ in threads.map(partial(_verify_file, folder), manifest.files):
            pass


def verify_sizes(folder: Path, manifest: Manifest) -> None:
    """Compare every listed file's size, and that the manifest there is this one.

    Raises:
        CheckpointError: a file is missing, is not a plain file, or differs.
    """
    if read_manifest(folder) != manifest:
        raise CheckpointError(f"{folder / MANIFEST} is not the one that rank 0 reads there.")
    for entry in manifest.files:
        _verify_file(folder, entry, hashed=False)


def _verify_file(folder: Path, entry: FileEntry, *, hashed: bool = True) -> None:
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


def differences(saved: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """`name: saved -> present` of every version that changed."""
    names = sorted(saved.keys() | present.keys())
    return [
        f"{name}: {saved.get(name, 'absent')} -> {present.get(name, 'absent')}"
        for name in names
        if saved.get(name) != present.get(name)
    ]
