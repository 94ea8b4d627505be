"""Checkpoint store: atomic saves, verified loads and retention of a run's checkpoints.

checkpoints/step-00000200/     entire state of the trainer; the `keep_last` newest are retained
best/step-00000150/            model only; the `keep_best` models with the best evaluations
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
MOVED: Final = "folder moved"
"""`RunEnd.reason` if the run's folder was moved."""

NamedTensors = Mapping[str, Tensor]
NO_METRICS: Final[Mapping[str, float]] = {}


class SaveError(CheckpointError):
    """A save failed. Earlier checkpoints are intact."""


def software_versions() -> dict[str, str]:
    """Return the versions of the software that affects the last bits of a run."""
    return {"torch": str(torch.__version__), "python": platform.python_version()}


@dataclass(frozen=True)
class RunIdentity:
    """Identity of a run, as recorded in its checkpoints."""

    config_sha256: str = ""
    data_fingerprint: str = ""
    versions: Mapping[str, str] = field(default_factory=software_versions)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the run as JSON."""


@contextmanager
def run_lock(folder: Path) -> Iterator[AcquiredLock]:
    """Lock `folder` for this process. Create the folder if it is missing.

    Raises:
        CheckpointError: Another process has locked it, or it cannot be written.
    """

    def refuse(holder: str) -> None:
        raise CheckpointError(
            f"{folder} is in use by another training process (id {holder}). Two runs in one folder "
            "would overwrite each other. Wait for it, stop it, or choose another run_dir."
        )

    with ExitStack() as stack:
        try:
            lock = stack.enter_context(file_lock(folder / LOCK, refuse))
            stack.enter_context(pinned_folder(folder.parent))
        except OSError as error:
            raise CheckpointError(
                f"Cannot write {folder}, the folder for checkpoints: {error.strerror}. Change its "
                "permissions, or choose another run_dir."
            ) from error
        yield lock


@dataclass
class CheckpointStore:
    """Checkpoints of one run, in `step-*` folders below `folder`."""

    folder: Path
    keep_last: int = 2
    """Number of checkpoints to retain."""
    keep_best: int = 1
    """Number of best models to retain, in a separate folder."""
    best_by: Goal = LOSS
    identity: RunIdentity = field(default_factory=RunIdentity)
    after: AfterStage = no_hook

    @property
    def best_folder(self) -> Path:
        """Folder of the best models."""
        return self.current_folder.parent / "best"

    @property
    def current_folder(self) -> Path:
        """Current path of `folder`. The run may have been moved since this process locked it."""
        return current_path(self.folder.parent) / self.folder.name

    def requests(self) -> Requests:
        """Request to stop and save if the run's folder was moved."""
        if self.current_folder == self.folder:
            return Requests()
        return Requests(stop=True, save=True, reason=MOVED)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about an unusual lock of the run."""
        lock = acquired_lock(self.folder / LOCK)
        return (lock.note,) if lock is not None and lock.note is not None else ()

    @contextmanager
    def sweeping(self) -> Iterator[list[str]]:
        """Remove the leftovers of killed saves and yield their names.

        The caller must have locked the run.

        Raises:
            CheckpointError: The run was moved before the end of the context.
        """
        leftovers = sweep(self.folder) + sweep(self.best_folder)
        yield leftovers + sweep_files(self.folder.parent)
        refuse_moved(self.folder)

    def save(
        self,
        step: int,
        tensors: Mapping[str, NamedTensors],
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> Saved:
        """Write a durable checkpoint, and then remove checkpoints that need not be retained.

        Args:
            step: Number of updates so far.
            tensors: Tensors by file stem and name.
            state: Content of `state.json`.
            metrics: Held-out metrics, if this is a best model.

        Raises:
            SaveError: The files cannot be written. Older checkpoints are intact.
        """
        started = time.perf_counter()
        parent = self.best_folder if metrics else self.current_folder
        needed = sum(map(bytes_of, tensors.values()))
        with self.writing(parent, step, needed) as writer:
            files = [
                writer.write(f"{stem}.safetensors", partial(write_tensors, named))
                for stem, named in tensors.items()
            ]
            size = self.seal(writer, step, files, state, metrics, version=WHOLE)
        self.prune(step, best=bool(metrics))
        seconds = time.perf_counter() - started
        return Saved(parent / step_name(step), step, size, seconds)

    def is_among_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Check whether a model with these metrics would be one of the `keep_best` best."""
        rank = self.best_by.rank(metrics)
        if self.keep_best < 1 or not math.isfinite(rank):
            return False
        others = [model for model in self._best_models() if model.step != step]
        if len(others) < self.keep_best:
            return True
        return rank < self.best_by.rank(others[self.keep_best - 1].metrics)

    def newest_valid(self, *, before: int | None = None) -> Checkpoint | None:
        """Verify and return the newest valid checkpoint, or None if the run has no checkpoint.

        Args:
            before: Only return a checkpoint of an earlier step.

        Raises:
            CheckpointError: There are checkpoints, but none is valid.
        """
        skipped: list[tuple[str, str]] = []
        for path in step_folders(self.current_folder):
            if before is not None and step_of(path.name) >= before:
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
                "Replace one with a good copy, or move all of them away to start from the "
                "beginning."
            )
        return None

    def best(self) -> Checkpoint | None:
        """Verify and return the best model, or None if the run has no valid best model."""
        for manifest in self._best_models():
            with contextlib.suppress(CheckpointError):  # try the next best model
                return verify_checkpoint(self.best_folder / step_name(manifest.step))
        return None

    def is_comparable(self, manifest: Manifest) -> bool:
        """Check whether the settings that affect `best_by` are the same as in a checkpoint."""
        saved = manifest.settings.get("evaluation")
        current = self.identity.settings.get("evaluation")
        if not isinstance(saved, dict) or not isinstance(current, dict):
            return True  # the trainer was built without a configuration
        relevant_settings = self.best_by.relevant_settings
        return relevant_settings(saved) == relevant_settings(current)

    def _best_models(self) -> list[Manifest]:
        """Return the manifests of the best models with comparable evaluations, best first."""
        manifests = []
        for path in step_folders(self.best_folder):
            try:
                manifest = read_manifest(path)
            except CheckpointError:
                continue
            is_renamed = path.name != step_name(manifest.step)
            if is_renamed or "loss" not in manifest.metrics:
                continue
            if self.is_comparable(manifest):
                manifests.append(manifest)
        return sorted(manifests, key=lambda m: (self.best_by.rank(m.metrics), m.step))

    @contextmanager
    def writing(self, parent: Path, step: int, needed: int) -> Iterator[FolderWriter]:
        """Yield a writer for a new checkpoint. It appears in `parent` if the context succeeds.

        Args:
            parent: Folder of the checkpoint.
            step: Number of updates so far.
            needed: Bytes of the tensors.

        Raises:
            SaveError: The files cannot be written, or the run was moved.
            CheckpointError: Another process has taken over the run.
        """
        lock = acquired_lock(self.folder / LOCK)
        if lock is not None and not lock.is_mine():
            # Not a SaveError, because the run must end.
            raise CheckpointError(
                f"Another process has taken over {self.folder}, because this process did not renew "
                "its lock in time: it was paused, or the disk did not respond. Earlier checkpoints "
                "are intact, and the other process continues the run."
            )
        try:
            parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(parent).free
            if free < needed:  # do not fill the disk first
                raise OSError(
                    errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free"
                )
            with atomic_folder(parent / step_name(step), after=self.after) as writer:
                yield writer
        except CheckpointError as error:
            if self.current_folder == self.folder:
                raise
            # The run was moved meanwhile. The training loop detects this after the update, and
            # saves in the new folder.
            raise SaveError(str(error)) from error
        except OSError as error:
            raise SaveError(
                f"Cannot save step {step} in {parent}: {error.strerror or error}. Earlier "
                "checkpoints are intact. Free some space or repair the disk. The next save tries "
                "again. If the run ends first, run the same command again to continue."
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
        """Write the state and then the manifest, which completes the checkpoint.

        Args:
            writer: The checkpoint's folder.
            step: Number of updates so far.
            files: The files with tensors.
            state: Content of `state.json`.
            metrics: Held-out metrics of a best model.
            version: Format of the checkpoint.

        Returns:
            The bytes of the files, without the manifest.
        """
        text = json.dumps(state, indent=1, allow_nan=False).encode()
        entries = (*files, writer.put(STATE, text))
        manifest = Manifest(
            format=version,
            step=step,
            progress=dict(state.get("progress", {})),
            cursor=dict(state.get("cursor", {})),
            **vars(self.identity),
            files=entries,
            metrics={name: float(v) for name, v in metrics.items() if math.isfinite(v)},
        )
        writer.put(MANIFEST, manifest.to_json())
        return sum(entry.bytes for entry in entries)

    def prune(self, step: int, *, best: bool) -> None:
        """Remove the checkpoints, or the best models, that need not be retained.

        Call this after the checkpoint or best model of `step` is durable.
        """
        if best:
            worse = self._best_models()[self.keep_best :]
            outdated = [self.best_folder / step_name(model.step) for model in worse]
        else:
            # The run continued from before the later steps, because they were damaged. Do not
            # count or delete them.
            folders = step_folders(self.current_folder)
            intact = [path for path in folders if step_of(path.name) <= step]
            outdated = intact[max(1, self.keep_last) :]
        for path in outdated:
            # Training continues even if an old checkpoint was moved or cannot be deleted.
            with contextlib.suppress(OSError, CheckpointError):
                remove_folder(path, after=self.after)
