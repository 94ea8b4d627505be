"""Checkpoint store: atomic saves, verified loads, the newest valid one wins.

checkpoints/step-00000200/     as `saved` reads it
best/step-00000150/            of the model alone, so that `keep_last` loses none
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from toque.errors import CheckpointError
from toque.storage.atomic import (
    AfterStage,
    FileEntry,
    FolderWriter,
    atomic_folder,
    no_hook,
    remove_folder,
    sweep,
    sweep_files,
)
from toque.storage.locks import AcquiredLock, acquired_lock, file_lock
from toque.storage.no_follow import current_path, pinned_folder, refuse_moved
from toque.training.callbacks import LOSS, Goal, Requests, Saved
from toque.training.checkpoint.saved import (
    MANIFEST,
    STATE,
    WHOLE,
    Checkpoint,
    Manifest,
    OtherFormatError,
    read_manifest,
    step_folders,
    step_name,
    step_of,
    verify_checkpoint,
)
from toque.training.checkpoint.tensor_files import bytes_of, write_tensors

LOCK: Final = ".lock"
MOVED: Final = "folder moved"  # `RunEnd.reason` where the run's folder is not at its place any more

NamedTensors = Mapping[str, Tensor]
NO_METRICS: Final[Mapping[str, float]] = {}


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
    settings: Mapping[str, Any] = field(default_factory=dict)  # the configuration, as JSON says it


@contextmanager
def run_lock(folder: Path) -> Iterator[AcquiredLock]:
    """Hold `folder`, made when missing, for this process; else a CheckpointError says who does."""

    def refuse(holder: str) -> None:
        raise CheckpointError(
            f"{folder} is in use by another training process (id {holder}). Two runs in one folder "
            "would overwrite each other: wait for it, stop it, or choose another run_dir."
        )

    with ExitStack() as stack:
        try:
            lock = stack.enter_context(file_lock(folder / LOCK, refuse))
            stack.enter_context(pinned_folder(folder.parent))
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be written: {error.strerror}. Checkpoints are kept there; choose "
                "another run_dir, or give yourself the right to write."
            ) from error
        yield lock


@dataclass
class CheckpointStore:
    """The checkpoints of one run, in `step-*` folders below `folder`."""

    folder: Path
    keep_last: int = 2
    keep_best: int = 1  # number of models with the best evaluation, by `best_by`, to keep apart
    best_by: Goal = LOSS
    identity: RunIdentity = field(default_factory=RunIdentity)
    after: AfterStage = no_hook

    @property
    def best_folder(self) -> Path:
        """The folder of the best models."""
        return self.here.parent / "best"

    @property
    def here(self) -> Path:
        """`folder`, wherever it was moved to since this process holds it."""
        return current_path(self.folder.parent) / self.folder.name

    def asks(self) -> Requests:
        """A request to stop and save, if the run's folder is not at its place any more."""
        moved = self.here != self.folder
        return Requests(stop=moved, save=moved, reason=MOVED if moved else "")

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about how the run is held against other processes, if unusually."""
        lock = acquired_lock(self.folder / LOCK)
        return (lock.note,) if lock is not None and lock.note is not None else ()

    @contextmanager
    def claimed(self) -> Iterator[list[str]]:
        """Remove what killed saves left, whose names are given; the caller holds the lock."""
        yield sweep(self.folder) + sweep(self.best_folder) + sweep_files(self.folder.parent)
        refuse_moved(self.folder)

    def save(
        self,
        step: int,
        tensors: Mapping[str, NamedTensors],
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> Saved:
        """Write a checkpoint and, once it is durable, remove those no longer kept.

        `tensors` are by file stem and name; `metrics` make it one of the best models, kept apart.
        What the file system refuses is a SaveError; the older checkpoints are untouched.
        """
        started = time.perf_counter()
        parent = self.best_folder if metrics else self.here
        with self.writing(parent, step, sum(map(bytes_of, tensors.values()))) as writer:
            files = [
                writer.write(f"{stem}.safetensors", partial(write_tensors, named))
                for stem, named in tensors.items()
            ]
            size = self.seal(writer, step, files, state, metrics, version=WHOLE)
        self.prune(step, best=bool(metrics))
        return Saved(parent / step_name(step), step, size, time.perf_counter() - started)

    def is_among_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """True if a model with these metrics is among the `keep_best` best."""
        rank = self.best_by.rank(metrics)
        if self.keep_best < 1 or not math.isfinite(rank):
            return False
        kept = [self.best_by.rank(c.metrics) for c in self._best_first() if c.step != step]
        return len(kept) < self.keep_best or rank < kept[self.keep_best - 1]

    def newest_valid(self, *, before: int | None = None) -> Checkpoint | None:
        """The newest checkpoint that verifies; a CheckpointError if there are and none does.

        Given a step, of those `before` it.
        """
        skipped: list[tuple[str, str]] = []
        for path in step_folders(self.here):
            if before is not None and step_of(path) >= before:
                continue
            try:
                return replace(verify_checkpoint(path), skipped=tuple(skipped))
            except OtherFormatError:
                raise
            except CheckpointError as error:
                skipped.append((path.name, str(error)))
        if skipped:
            reasons = " ".join(reason for _, reason in skipped)
            raise CheckpointError(
                f"None of the {len(skipped)} checkpoints in {self.folder} can be used. {reasons} "
                "Put a whole copy in their place, or move them away to start from the beginning."
            )
        return None

    def best(self) -> Checkpoint | None:
        """The model with the best evaluation, verified; None when none was kept."""
        for manifest in self._best_first():
            try:
                return verify_checkpoint(self.best_folder / step_name(manifest.step))
            except CheckpointError:
                continue  # a damaged best model is no best model; the next one stands in
        return None

    def measures_as(self, manifest: Manifest) -> bool:
        """True if evaluations are now as they were then, where `best_by` is concerned."""
        then, now = (s.get("evaluation") for s in (manifest.settings, self.identity.settings))
        if not isinstance(then, dict) or not isinstance(now, dict):
            return True  # of no configuration
        return self.best_by.measured_by(then) == self.best_by.measured_by(now)

    def _best_first(self) -> list[Manifest]:
        """Those that compare: evaluated as evaluations are now."""
        found = []
        for path in step_folders(self.best_folder):
            try:
                manifest = read_manifest(path)
            except CheckpointError:
                continue
            same = self.measures_as(manifest)
            if same and path.name == step_name(manifest.step) and "loss" in manifest.metrics:
                found.append(manifest)
        return sorted(found, key=lambda m: (self.best_by.rank(m.metrics), m.step))

    @contextmanager
    def writing(self, parent: Path, step: int, needed: int) -> Iterator[FolderWriter]:
        """A checkpoint's folder to fill; it appears in `parent` when the block ends well."""
        lock = acquired_lock(self.folder / LOCK)
        if lock is not None and not lock.is_mine():
            raise CheckpointError(  # no failed save, which a run survives
                f"Another process has taken {self.folder} over, because this one did not renew its "
                "lock for too long: it was stopped, or the disk did not answer. What was saved "
                "before is intact, and the other goes on."
            )
        try:
            parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(parent).free
            if free < needed:  # rather than fill the disk to the last byte
                raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free")
            with atomic_folder(parent / step_name(step), after=self.after) as writer:
                yield writer
        except CheckpointError as error:
            if self.here == self.folder:
                raise
            # The run was moved meanwhile: the loop sees that next, and saves in the new place.
            raise SaveError(str(error)) from error
        except OSError as error:
            raise SaveError(
                f"Step {step} could not be saved in {parent}: {error.strerror or error}. Earlier "
                "checkpoints are intact. Free some space or repair the disk. The next save tries "
                "again. If the run ends first, run the same command again: it continues."
            ) from error

    def seal(
        self,
        writer: FolderWriter,
        step: int,
        files: Sequence[FileEntry],
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        *,
        version: int,
    ) -> int:
        """Write the state and, last, the manifest over all files; the bytes of them."""
        text = json.dumps(state, indent=1, allow_nan=False).encode()
        every = (*files, writer.put(STATE, text))
        manifest = Manifest(
            format=version,
            step=step,
            progress=dict(state.get("progress", {})),
            cursor=dict(state.get("cursor", {})),
            **vars(self.identity),
            files=every,
            metrics={name: float(v) for name, v in metrics.items() if math.isfinite(v)},
        )
        writer.put(MANIFEST, manifest.to_json())
        return sum(entry.bytes for entry in every)

    def prune(self, step: int, *, best: bool = False) -> None:
        """Remove what is no longer kept, once the checkpoint or best model of `step` is durable."""
        if best:
            worse = self._best_first()[self.keep_best :]
            doomed = [self.best_folder / step_name(manifest.step) for manifest in worse]
        else:
            # Steps beyond the present one were found damaged when the run continued: they neither
            # count as kept nor are they ours to delete.
            present = [path for path in step_folders(self.here) if step_of(path) <= step]
            doomed = present[max(1, self.keep_last) :]
        for path in doomed:
            # An old checkpoint that cannot be deleted, or was moved, is no reason to stop.
            with contextlib.suppress(OSError, CheckpointError):
                remove_folder(path, after=self.after)
