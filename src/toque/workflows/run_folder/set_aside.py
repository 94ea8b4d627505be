"""Files of a run that a session sets aside, in the folder and in the bucket.

The files are moved to set-aside/TIME/. A checkpoint that is moved back is valid again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from toque.errors import CheckpointError
from toque.evaluation.bootstrap import FILE as BY_TEXT
from toque.runs.run_record import END, EVALUATION
from toque.storage.atomic import ASIDE_PREFIX, move_into
from toque.storage.bucket import Bucket
from toque.training.checkpoint.fetch import OUTBOX, complete_steps
from toque.training.checkpoint.saved import MANIFEST, step_folders, step_of
from toque.workflows.saved_steps import KINDS, SET_ASIDE

_FINAL_FILES = (END, EVALUATION, BY_TEXT, "model")
"""Files that a finished run writes. The record comes first: a run without it is not finished."""


def set_aside_folder(run: Path) -> Path:
    """Return a folder, named by the current time, for files to set aside."""
    return run / SET_ASIDE / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")


def set_aside(run: Path, step: int | None, *, bucket: Bucket | None) -> list[str]:
    """Set aside checkpoints and models after `step`, the newest first. Return the names.

    The files of a finished run are moved first, and are last in the result. After a kill, the same
    command completes the work.

    Args:
        run: Run folder.
        step: Last step that is not moved. None means everything is moved, even if only the files
            of a finished run are left.
        bucket: Bucket of the run.
    """
    target = set_aside_folder(run)
    after = -1 if step is None else step
    names = bucket.names() if bucket is not None else []
    uploaded = [
        f"{kind}/{folder}"
        for kind in KINDS
        for folder in complete_steps(names, kind)
        if int(folder.removeprefix("step-")) > after
    ]
    moved, final_files = _set_local_files_aside(
        run, target, after, has_uploads=bool(uploaded)
    )
    if bucket is not None:
        if uploaded or (step is None and END in names):
            finals = [name for name in names if name.split("/")[0] in _FINAL_FILES]
            _copy_in_bucket(bucket, finals, target.name)
            bucket.remove(finals)
        for folder in uploaded:
            # The manifest makes a checkpoint complete, so it is copied last and removed first.
            inside = [name for name in names if name.startswith(f"{folder}/")]
            inside.sort(key=lambda name: name.endswith(f"/{MANIFEST}"))
            _copy_in_bucket(bucket, inside, target.name)
            bucket.remove(reversed(inside))
        moved += [name for name in uploaded if name not in moved]
    return moved + final_files


def _set_local_files_aside(
    run: Path, target: Path, after: int, *, has_uploads: bool
) -> tuple[list[str], list[str]]:
    """Move steps after `after`, waiting uploads and the files of a finished run to `target`.

    Returns:
        The names of the moved steps, and of the files of the finished run.

    Raises:
        CheckpointError: A file cannot be moved.
    """
    newer = [
        (kind, path)
        for kind in KINDS
        for path in step_folders(run / kind)
        if step_of(path.name) > after
    ]
    final_files: list[str] = []
    moves_everything = after < 0
    if newer or has_uploads or (moves_everything and (run / END).exists()):
        final_files = [name for name in _FINAL_FILES if (run / name).exists()]

    moved = []
    try:
        for name in final_files:
            move_into(run / name, target, name)
        for kind, path in newer:
            name = path.name.removeprefix(ASIDE_PREFIX)
            move_into(path, target / kind, name)
            moved.append(f"{kind}/{name}")
        waiting_uploads = sorted((run / OUTBOX).glob("*-step-*"), reverse=True)
        for path in waiting_uploads:
            if int(path.name.rpartition("-")[2]) > after:
                move_into(path, target / OUTBOX, path.name)
    except OSError as error:
        raise CheckpointError(
            f"Checkpoints after step {after} cannot be moved from {run} to {target}: "
            f"{error.strerror}. {len(moved)} were moved. Check that you may write there, and run "
            "the command again."
        ) from error
    return moved, final_files


def _copy_in_bucket(bucket: Bucket, names: Sequence[str], time_name: str) -> None:
    for name in names:
        bucket.copy(name, f"{SET_ASIDE}/{time_name}/{name}")
