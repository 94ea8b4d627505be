"""Saved checkpoint: manifest, verification, tensors and state.

    step-00000200/{model.safetensors, optimizer.safetensors, state.json, manifest.json}
    step-00000200/{shard-00000-of-00002.safetensors, ..., shards.json, state.json, manifest.json}

The manifest is JSON with the size and SHA-256 of each file. It is written last, so a folder without
a valid manifest is not a checkpoint. Any number of ranks can read either layout.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from torch import Tensor

from toque.errors import CheckpointError
from toque.storage.atomic import ASIDE_PREFIX, FileEntry, sha256_of
from toque.storage.json_files import KEY, add_seal, check_seal, decode_json
from toque.training.checkpoint.tensor_files import (
    LAYOUT,
    Like,
    ShardLayout,
    StoredTensors,
    open_sharded,
    open_whole,
    parse_layout,
)

WHOLE: Final = 1
"""Format of a checkpoint with whole tensors."""
SHARDED: Final = 2
"""Format of a checkpoint with sharded tensors. A new format gets the next number. `tests/golden`
has a checkpoint in each format, which must always load and give the same loss."""
MANIFEST: Final = "manifest.json"
STATE: Final = "state.json"
MAX_SMALL_FILE_BYTES: Final = 1 << 24
"""Maximum size of a manifest, or of another small file of a run, in bytes."""
STEP_FOLDER: Final = re.compile(rf"(?:{ASIDE_PREFIX})?step-([0-9]{{8,}})")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `manifest.json`."""

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
    """Held-out metrics of a best model. Empty in other checkpoints."""
    self_sha256: str = ""

    def to_json(self) -> bytes:
        """Encode as indented JSON with a hash of itself."""
        return add_seal(
            msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
        )


class _Version(msgspec.Struct):
    format: int
    settings: Any = msgspec.UNSET


class OtherFormatError(CheckpointError):
    """Another version of Toque wrote the checkpoint. An older checkpoint must not replace it."""


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint and check its form, but not the files that it lists.

    Raises:
        OtherFormatError: Another version of Toque wrote it.
        CheckpointError: It is missing, damaged or unreadable.
    """
    path = folder / MANIFEST
    try:
        size = path.stat().st_size
        if size > MAX_SMALL_FILE_BYTES:
            raise CheckpointError(
                f"{path} has {size:,} bytes, but a manifest has at most {MAX_SMALL_FILE_BYTES:,}."
            )
        text = path.read_bytes()
    except FileNotFoundError:
        reason = "the folder was removed or moved"
        if folder.is_dir():
            reason = "the save did not finish"
        raise CheckpointError(f"{folder} has no {MANIFEST}: {reason}.") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    return parse_manifest(text, str(path))


def parse_manifest(text: bytes, path: str) -> Manifest:
    """Parse a manifest that was read from `path`, and check its form and its hash.

    Raises:
        OtherFormatError: Another version of Toque wrote it.
        CheckpointError: It is damaged.
    """
    try:
        _refuse_other_format(decode_json(text, _Version), path)
        manifest = decode_json(text, Manifest)
    except msgspec.DecodeError as error:
        raise CheckpointError(
            f"{path} is not a checkpoint's manifest: {error}."
        ) from error

    names = [entry.file for entry in manifest.files]
    for name in names:
        # The manifest is untrusted and must not refer to files outside its folder.
        is_plain = name == Path(name).name and "\0" not in name
        if not is_plain or name in {"", "..", MANIFEST}:
            raise CheckpointError(
                f"{path} lists the file {name!r}. Only plain names in its folder are allowed."
            )
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise CheckpointError(f"{path} lists {', '.join(repeated)} more than once.")

    seal = check_seal(text)
    if seal == "absent":
        raise CheckpointError(
            f"{path} is damaged: it does not contain its own hash ({KEY})."
        )
    if seal != "whole":
        raise CheckpointError(
            f"{path} is damaged: its content does not match its {KEY}."
        )
    return manifest


def _refuse_other_format(version: _Version, path: str) -> None:
    """Raise an error if this version of Toque cannot read the manifest."""
    if version.format > SHARDED:
        raise OtherFormatError(
            f"{path} has format {version.format}, but this Toque reads formats up to "
            f"{SHARDED}. Install a newer Toque, or move this checkpoint away to continue from "
            "an older one."
        )
    if version.format not in (WHOLE, SHARDED):
        raise CheckpointError(f"{path} has the unknown format {version.format}.")
    if version.settings is msgspec.UNSET:
        raise OtherFormatError(
            f"{path} was written by a development version before Toque 0.2.0. This version "
            "cannot read it. Nothing was changed. Finish the run with the version that started "
            "it, or export its model with that version and start a new run from it."
        )


def verify_files(folder: Path, manifest: Manifest, *, hashed: bool = True) -> None:
    """Compare the size and, if `hashed`, the SHA-256 of every listed file with the manifest.

    Raises:
        CheckpointError: A file is missing, unreadable or differs.
    """
    n_threads = max(1, min(len(manifest.files), os.cpu_count() or 1))
    with ThreadPoolExecutor(n_threads) as threads:  # hashing releases Python's lock
        verify = partial(_verify_file, folder, hashed=hashed)
        list(threads.map(verify, manifest.files))  # raises the error from a thread


def _verify_file(folder: Path, entry: FileEntry, *, hashed: bool) -> None:
    """Verify one file. Raises the same errors as `verify_files`."""
    path = folder / entry.file
    try:
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path} is missing or is not a regular file.")
        size = path.stat().st_size
        if size != entry.bytes:
            raise CheckpointError(
                f"{path} has {size:,} bytes, but the manifest lists {entry.bytes:,}."
            )
        sha256 = sha256_of(path) if hashed else entry.sha256
    except OSError as error:
        raise _unreadable(path, error) from error
    if sha256 != entry.sha256:
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 is {sha256[:12]}…, but the manifest lists "
            f"{entry.sha256[:12]}…."
        )


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint with verified files. Unlisted files in its folder are never read."""

    path: Path
    manifest: Manifest
    skipped: tuple[tuple[str, str], ...] = ()
    """Newer checkpoints that cannot be used: name -> reason."""

    @property
    def step(self) -> int:
        """Number of updates before the save."""
        return self.manifest.step

    def tensors(self, stem: str, like: Like = lambda _name: None) -> dict[str, Tensor]:
        """Read the tensors of the file or shards `stem`: "model" or "optimizer".

        `like` returns this run's tensor for a name, or None. If it is a DTensor of the same shape,
        only this rank's slice is read.
        """
        with self.open_tensors(stem) as tensors:
            return {
                name: stored.read_like(like(name)) for name, stored in tensors.items()
            }

    @contextmanager
    def open_tensors(self, stem: str) -> Iterator[StoredTensors]:
        """Open the file or shards `stem` to read one tensor at a time."""
        layout = self.layout()
        if layout is None:
            files = open_whole(self._listed(f"{stem}.safetensors"))
        else:
            files = open_sharded(self.path, layout, stem)
        with files as tensors:
            yield tensors

    def layout(self) -> ShardLayout | None:
        """Read the layout of the shards, or return None if tensors are whole."""
        names = {entry.file for entry in self.manifest.files}
        if LAYOUT not in names:
            return None
        path = self.path / LAYOUT
        return parse_layout(_read(path), str(path), names)

    def state(self) -> dict[str, Any]:
        """Read `state.json`.

        Raises:
            CheckpointError: It is not a JSON object.
        """
        path = self._listed(STATE)
        try:
            return decode_json(_read(path), dict[str, Any])
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{path} is not a JSON object: {error}.") from error

    def _listed(self, name: str) -> Path:
        """Return the path of a file that the manifest lists."""
        names = [entry.file for entry in self.manifest.files]
        if name not in names:
            raise CheckpointError(
                f"{self.path} has no {name}, only {', '.join(names)}."
            )
        return self.path / name


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"Cannot read {path}: {error.strerror}.")


def verify_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest and hash every file that it lists.

    Raises:
        OtherFormatError: Another version of Toque wrote it.
        CheckpointError: It is damaged, renamed or unreadable.
    """
    manifest = read_manifest(folder)
    name = STEP_FOLDER.fullmatch(folder.name)
    if name and int(name[1]) != manifest.step:
        raise CheckpointError(
            f"{folder} has the checkpoint of step {manifest.step}. It was renamed or copied."
        )
    verify_files(folder, manifest)
    return Checkpoint(folder, manifest)


def step_name(step: int) -> str:
    """Return the folder name of a checkpoint, e.g. step-00000200."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Parse the step in the name of a checkpoint's folder."""
    return int(name.rpartition("-")[2])


def step_folders(folder: Path) -> list[Path]:
    """List `step-*` folders, newest first.

    A folder that a save has set aside counts until its replacement exists.
    """
    names = set[str]()
    # The run may be moved at this moment.
    with suppress(FileNotFoundError, NotADirectoryError):
        names = {n for n in os.listdir(folder) if STEP_FOLDER.fullmatch(n)}  # noqa: PTH208
    replaced = {f"{ASIDE_PREFIX}{name}" for name in names}
    return [
        folder / name for name in sorted(names - replaced, key=step_of, reverse=True)
    ]
