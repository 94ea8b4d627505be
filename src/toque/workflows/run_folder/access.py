"""Access to a run folder: its lock, its configuration file and the space on its disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from toque.config import Resolved, RunConfig, resolved_yaml
from toque.errors import CheckpointError, ToqueError
from toque.evaluation.reference_nats import RECORD, REFERENCE
from toque.reporter import size_text
from toque.runs.history import METRICS
from toque.storage.atomic import atomic_write
from toque.storage.no_follow import current_path
from toque.training.checkpoint.fetch import OUTBOX
from toque.training.checkpoint.resume import model_tensors
from toque.training.checkpoint.saved import step_folders
from toque.training.checkpoint.store import run_lock
from toque.training.checkpoint.tensor_files import bytes_of
from toque.training.optim.factory import state_bytes
from toque.training.trainer import Trainer
from toque.workflows.run_folder.run_log import LOG
from toque.workflows.run_folder.start_adapter import START_FILES

LOCK_FILE = "checkpoints/.lock"
_SESSION_FILES = (
    "config.yaml",
    "resources.json",
    REFERENCE,
    RECORD,
    LOCK_FILE,
    LOG,
    *START_FILES,
)
"""Files that a session writes before its first update."""


@contextmanager
def lock_run_folder(run: Path) -> Iterator[None]:
    """Lock a run's folder. If the context refuses a new run, remove the folders that it created."""
    missing = [folder for folder in (run, *run.parents) if not folder.exists()]
    is_first = not (run / LOCK_FILE).exists()
    with run_lock(run / "checkpoints"):
        try:
            yield
        except ToqueError:
            if is_first and current_path(run) == run:
                _remove_unused(run, missing)
            raise


def _remove_unused(run: Path, created: Sequence[Path]) -> None:
    """Remove the files of a first session, unless it has trained or downloaded a checkpoint.

    `created` are the folders that did not exist before, the innermost first.
    """
    if (run / METRICS).exists() or step_folders(run / "checkpoints"):
        return
    session_files = [run / name for name in _SESSION_FILES]
    # A folder with other files is not empty, so `rmdir` raises an OSError and it remains.
    with suppress(OSError):
        for path in (*session_files, *run.glob("resources-rank*")):
            path.unlink(missing_ok=True)
        folders = (run / "checkpoints", run / OUTBOX, (run / START_FILES[0]).parent)
        for folder in (*folders, *created):
            if folder.exists():
                folder.rmdir()


def write_config(resolved: Resolved) -> None:
    """Write config.yaml of the run.

    Raises:
        CheckpointError: The folder is not writable.
    """
    run = Path(resolved.config.run_dir)
    try:
        run.mkdir(parents=True, exist_ok=True)
        atomic_write(run / "config.yaml", resolved_yaml(resolved).encode())
    except OSError as error:
        raise CheckpointError(
            f"The run folder {run} cannot be written: {error.strerror}. Change its "
            "permissions, or choose another folder: run_dir=runs/another."
        ) from error


def refuse_small_disk(trainer: Trainer, config: RunConfig) -> None:
    """Raise a CheckpointError if the disk has no space for the next save."""
    if trainer.finished:
        return
    weights = bytes_of(model_tensors(trainer.model))
    checkpoint_bytes = weights + state_bytes(trainer.optimizer)
    best_bytes = weights if config.train.keep_best else 0
    folder = Path(config.run_dir)
    # The folder may not exist yet.
    candidates = (folder, *folder.absolute().parents)
    existing = next(path for path in candidates if path.is_dir())
    free = shutil.disk_usage(existing).free
    if checkpoint_bytes + best_bytes <= free:
        return
    needed = f"{size_text(checkpoint_bytes)} for a checkpoint (weights and optimizer)"
    if best_bytes:
        needed += f" and {size_text(best_bytes)} for the best model (train.keep_best=0 saves none)"
    raise CheckpointError(
        f"The disk of {folder} has {size_text(free)} free, but the next save needs {needed}. Free "
        "some space, or choose another run_dir."
    )
