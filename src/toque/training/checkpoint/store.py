"""Checkpoint store: atomic saves, verified loads, the newest valid one wins.

    checkpoints/step-00000200/{model.safetensors, optimizer.safetensors, state.json, manifest.json}
    best/step-00000150/{model.safetensors, manifest.json}

The best models are written apart and by their own rule (the best evaluation), so neither
`save_every` nor `keep_last` can lose one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from toque.errors import CheckpointError
from toque.storage.atomic import (
    ASIDE_PREFIX,
    AfterStage,
    atomic_folder,
    no_hook,
    remove_folder,
    sweep,
    sweep_files,
)
from toque.storage.json_files import decode_json
from toque.storage.locks import Held, file_lock, held
from toque.training.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    NewerFormatError,
    read_manifest,
    verify_files,
)
from toque.training.checkpoint.state_tensors import bytes_of, read_tensors, write_tensors
from toque.training.events import Saved
from toque.training.goal import LOSS, Goal

STATE: Final = "state.json"
LOCK: Final = ".lock"
_STEP_FOLDER: Final = re.compile(rf"(?:{ASIDE_PREFIX})?step-([0-9]{{8,}})")

NamedTensors = Mapping[str, Tensor]


class SaveError(CheckpointError):
    """One save did not happen; nothing that was saved before is harmed."""


def software_versions() -> dict[str, str]:
    """Versions of what the last bits of a run depend on."""
    return {"torch": str(torch.__version__), "python": platform.python_version()}


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run, as its checkpoints record it."""

    config_sha256: str = ""
    data_fingerprint: str = ""
    versions: Mapping[str, str] = field(default_factory=software_versions)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The configuration, as JSON says it."""


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

    def tensors(self, stem: str) -> dict[str, Tensor]:
        """The tensors of `<stem>.safetensors`.

        Raises:
            CheckpointError: the checkpoint holds no such file.
        """
        return read_tensors(self._listed(f"{stem}.safetensors"))

    def state(self) -> dict[str, Any]:
        """The content of `state.json`.

        Raises:
            CheckpointError: there is none, or it is not a JSON object.
        """
        path = self._listed(STATE)
        try:
            return decode_json(path.read_bytes(), dict[str, Any])
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{path} is not a JSON object: {error}.") from error

    def _listed(self, name: str) -> Path:
        names = [entry.file for entry in self.manifest.files]
        if name not in names:
            raise CheckpointError(f"{self.path} has no {name}; it holds {', '.join(names)}.")
        return self.path / name


def verify_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest and hash every file it lists.

    Raises:
        NewerFormatError: a newer Toque wrote it.
        CheckpointError: it is unfinished, damaged, or stands under another step's name.
    """
    manifest = read_manifest(folder)
    named = _STEP_FOLDER.fullmatch(folder.name)
    if named and int(named.group(1)) != manifest.step:
        raise CheckpointError(f"{folder} holds step {manifest.step}: it was renamed or copied.")
    verify_files(folder, manifest)
    return Checkpoint(folder, manifest)


@contextmanager
def run_lock(folder: Path) -> Iterator[Held]:
    """Hold `folder`, which is made when missing, for this process.

    Raises:
        CheckpointError: another process holds it, or the folder cannot be written.
    """

    def refuse(holder: str) -> None:
        raise CheckpointError(
            f"{folder} is in use by another training process (id {holder}). Two runs in one folder "
            "would overwrite each other: wait for it, stop it, or choose another run_dir."
        )

    with ExitStack() as stack:
        try:
            lock = stack.enter_context(file_lock(folder / LOCK, refuse))
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be written: {error.strerror}. Checkpoints are kept there; choose "
                "another run_dir, or give yourself the right to write."
            ) from error
        yield lock


@dataclass
class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: where `step-*` folders lie; made when missing.
        keep_last: how many of the newest to keep, at least 1.
        keep_best: how many models with the best evaluation, by `best_by`, to keep apart, if any.
        identity: of the run, written into every manifest.
        after: called after every system call of a save with its name; for tests.
        held: whether the caller holds `run_lock` already.
    """

    folder: Path
    keep_last: int = 2
    keep_best: int = 1
    best_by: Goal = LOSS
    identity: RunIdentity = field(default_factory=RunIdentity)
    after: AfterStage = no_hook
    held: bool = False

    @property
    def best_folder(self) -> Path:
        """`best` beside `folder`."""
        return self.folder.parent / "best"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about how the run is held against other processes, if unusually."""
        lock = held(self.folder / LOCK)
        return (lock.note,) if lock is not None and lock.note is not None else ()

    @contextmanager
    def claimed(self) -> Iterator[list[str]]:
        """Hold the run against other processes; yields the leftovers of killed saves, removed.

        Raises:
            CheckpointError: another process trains here, or the folder cannot be written.
        """
        with nullcontext() if self.held else run_lock(self.folder):
            yield sweep(self.folder) + sweep(self.best_folder) + sweep_files(self.folder.parent)

    def save(
        self, step: int, tensors: Mapping[str, NamedTensors], state: Mapping[str, Any]
    ) -> Saved:
        """Write a checkpoint and, once it is durable, remove those no longer kept.

        Args:
            step: updates done.
            tensors: file stem -> named tensors, e.g. {"model": ..., "optimizer": ...}.
            state: JSON; its "progress" and "cursor" are repeated in the manifest.

        Raises:
            SaveError: the file system refused. The older checkpoints are untouched.
        """
        saved = self._write(self.folder, step, tensors, state=state, metrics={})
        self._prune(step)
        return saved

    def save_best(
        self,
        step: int,
        model: NamedTensors,
        *,
        progress: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> Saved | None:
        """Keep the model apart when its evaluation is among the `keep_best` best.

        Returns:
            What was saved, or None when the model was not good enough.

        Raises:
            SaveError: the file system refused. The older ones are untouched.
        """
        if not self.is_among_best(step, metrics):
            return None
        finite = {name: float(v) for name, v in metrics.items() if math.isfinite(v)}
        saved = self._write(
            self.best_folder, step, {"model": model}, state={"progress": progress}, metrics=finite
        )
        for manifest in self._best_first()[self.keep_best :]:
            self._remove(self.best_folder / _name(manifest.step))
        return saved

    def is_among_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether `save_best` would keep a model with these metrics."""
        rank = self.best_by.rank(metrics)
        if self.keep_best < 1 or not math.isfinite(rank):
            return False
        kept = [self.best_by.rank(c.metrics) for c in self._best_first() if c.step != step]
        return len(kept) < self.keep_best or rank < kept[self.keep_best - 1]

    def newest_valid(self) -> Checkpoint | None:
        """The newest checkpoint that verifies, with the newer ones that did not; None for none.

        Raises:
            NewerFormatError: the newest was written by a newer Toque.
            CheckpointError: there are checkpoints, and not one can be used.
        """
        skipped: list[Skipped] = []
        for path in _step_folders(self.folder):
            try:
                return replace(verify_checkpoint(path), skipped=tuple(skipped))
            except NewerFormatError:
                raise
            except CheckpointError as error:
                skipped.append(Skipped(path, str(error)))
        if skipped:
            reasons = " ".join(s.reason for s in skipped)
            raise CheckpointError(
                f"None of the {len(skipped)} checkpoints in {self.folder} can be used. {reasons} "
                "Put a whole copy in their place, or move them away to start from the beginning."
            )
        return None

    def best(self) -> Checkpoint | None:
        """The model with the best evaluation, verified; None when none was kept."""
        for manifest in self._best_first():
            try:
                return verify_checkpoint(self.best_folder / _name(manifest.step))
            except CheckpointError:
                continue  # a damaged best model is no best model; the next one stands in
        return None

    def _best_first(self) -> list[Manifest]:
        found = []
        for path in _step_folders(self.best_folder):
            try:
                manifest = read_manifest(path)
            except CheckpointError:
                continue
            if path.name == _name(manifest.step) and "loss" in manifest.metrics:
                found.append(manifest)
        return sorted(found, key=lambda m: (self.best_by.rank(m.metrics), m.step))

    def _write(
        self,
        parent: Path,
        step: int,
        tensors: Mapping[str, NamedTensors],
        *,
        state: Mapping[str, Any],
        metrics: dict[str, float],
    ) -> Saved:
        started = time.perf_counter()
        target = parent / _name(step)
        self._refuse_taken_over()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _refuse_full_disk(parent, sum(map(bytes_of, tensors.values())))
            with atomic_folder(target, after=self.after) as writer:
                files = [
                    writer.write(f"{stem}.safetensors", partial(write_tensors, named))
                    for stem, named in tensors.items()
                ]
                text = json.dumps(state, indent=1, allow_nan=False).encode()
                files.append(writer.put(STATE, text))
                manifest = Manifest(
                    format=FORMAT,
                    step=step,
                    progress=dict(state.get("progress", {})),
                    cursor=dict(state.get("cursor", {})),
                    config_sha256=self.identity.config_sha256,
                    data_fingerprint=self.identity.data_fingerprint,
                    versions=dict(self.identity.versions),
                    files=tuple(files),
                    metrics=metrics,
                    settings=dict(self.identity.settings),
                )
                writer.put(MANIFEST, manifest.to_json())
        except OSError as error:
            raise SaveError(
                f"Step {step} could not be saved in {parent}: {error.strerror or error}. What was "
                "saved before is intact. Make room or repair the disk; the next save tries again."
            ) from error
        return Saved(
            target, step, sum(entry.bytes for entry in files), time.perf_counter() - started
        )

    def _refuse_taken_over(self) -> None:
        lock = held(self.folder / LOCK)
        if lock is not None and not lock.is_mine():
            raise CheckpointError(  # no failed save, which a run survives
                f"Another process has taken {self.folder} over, because this one did not renew its "
                "lock for too long: it was stopped, or the disk did not answer. Nothing of this "
                "one is saved any more; what was saved before is intact, and the other goes on."
            )

    def _prune(self, step: int) -> None:
        # Steps beyond the present one were found damaged when the run continued: they neither
        # count as kept nor are they ours to delete.
        present = [path for path in _step_folders(self.folder) if _step_of(path) <= step]
        for path in present[max(1, self.keep_last) :]:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        # An old checkpoint that cannot be deleted is no reason to stop.
        with contextlib.suppress(OSError):
            remove_folder(path, after=self.after)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step_of(path: Path) -> int:
    found = _STEP_FOLDER.fullmatch(path.name)
    assert found is not None
    return int(found.group(1))


def _step_folders(folder: Path) -> list[Path]:
    """`step-*` folders, newest first; one set aside counts while its successor is not in place."""
    if not folder.is_dir():
        return []
    names = {name for name in os.listdir(folder) if _STEP_FOLDER.fullmatch(name)}  # noqa: PTH208
    names -= {name for name in names if name.removeprefix(ASIDE_PREFIX) in names - {name}}
    return sorted((folder / name for name in names), key=_step_of, reverse=True)


def _refuse_full_disk(folder: Path, needed: int) -> None:
    """Fail before writing rather than fill the disk to the last byte."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free")
