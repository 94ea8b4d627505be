"""Continuation of a run from its newest or an older checkpoint.

Going back to a checkpoint deletes nothing; see `set_aside`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from toque.config import Resolved, RunConfig, resolve_values
from toque.config.dump import ChangedSetting, differences
from toque.config.new_length import can_change_length, describe_new_length
from toque.data.store.token_store import TokenStore
from toque.errors import CheckpointError, argument, in_shell
from toque.models.lora.continued import start_folder
from toque.runs.run_record import END
from toque.storage.atomic import atomic_write, sha256_of
from toque.storage.bucket import Bucket
from toque.training.checkpoint.fetch import complete_steps, fetch_run, fetch_step
from toque.training.checkpoint.saved import (
    MANIFEST,
    Checkpoint,
    step_folders,
    step_name,
    step_of,
    verify_checkpoint,
)
from toque.training.checkpoint.store import CheckpointStore
from toque.training.stopping import TimeLimit
from toque.units import Progress
from toque.user_paths import named_path
from toque.workflows.run_folder.set_aside import set_aside
from toque.workflows.run_folder.start_adapter import copy_start_adapter
from toque.workflows.saved_steps import SET_ASIDE

_FINGERPRINTED = (
    "store",
    "sources",
    "validation",
    "max_prompt_tokens",
    "max_target_tokens",
)
"""Settings of `data` that may change as long as the store's fingerprint stays the same."""
_RESUMED = "resumed.json"
"""File with the checkpoint that a command went back to. A restart by the launcher reads it."""


def checkpoint_to_continue(
    config: RunConfig,
    store: TokenStore,
    say: Callable[[str], None],
    *,
    start: Path | None,
) -> Checkpoint | None:
    """Return the newest checkpoint of a locked folder, or None without a checkpoint.

    A run that began from the same `start` continues, because the user repeated the command.

    Raises:
        CheckpointError: The checkpoint belongs to another run.
    """
    newest = CheckpointStore(Path(config.run_dir) / "checkpoints").newest_valid()
    if newest is None:
        return None
    _refuse_another_run(config, store, newest, say)
    if start is not None:
        begun_from = newest.state().get("begun_from")
        if begun_from != sha256_of(start / MANIFEST):
            raise CheckpointError(
                f"{config.run_dir} already has a run at step {newest.step}, but "
                f"{argument('start')} begins a new run. Choose another folder: "
                "run_dir=runs/another."
            )
    return newest


def _refuse_another_run(
    config: RunConfig,
    store: TokenStore,
    checkpoint: Checkpoint,
    say: Callable[[str], None],
) -> None:
    """Raise a CheckpointError for a checkpoint from other data or settings.

    `say` reports a change in the run's length.
    """
    run = Path(config.run_dir)
    refuse_another_store(run, checkpoint, store)
    source = f"{checkpoint.path}/manifest.json"
    old = resolve_values(checkpoint.manifest.settings, source).config
    progress = _read_progress(checkpoint)
    total_seconds = _total_seconds(checkpoint)
    has_new_length = can_change_length(
        old, config, progress, total_seconds=total_seconds
    )
    allowed = {"train.stop_after"} if has_new_length else set()
    unsafe = [
        change
        for change in differences(old, config)
        if not (change.is_safe or _is_same_data(change) or change.path in allowed)
    ]
    if unsafe:
        listed = "; ".join(f"{d.path}: {d.old} -> {d.new}" for d in unsafe)
        raise CheckpointError(
            f"{run} has a run at step {checkpoint.step} with other settings: {listed}. Restore "
            "these settings to continue, or begin a new run from its weights: "
            f"run_dir=runs/another {argument(f'start={in_shell(checkpoint.path)}')}."
        )
    if has_new_length:
        say(describe_new_length(old, config, progress, total_seconds=total_seconds))


def _read_progress(checkpoint: Checkpoint) -> Progress:
    """Read the progress of a run at a checkpoint.

    Raises:
        CheckpointError: Another version of Toque wrote other fields.
    """
    try:
        return Progress(**checkpoint.manifest.progress)
    except TypeError as error:
        raise CheckpointError(
            f"The progress in {checkpoint.path} cannot be read by this version of Toque: {error}."
        ) from error


def _total_seconds(checkpoint: Checkpoint) -> float:
    """Return the command's time limit that the run reached, in seconds, or 0 without one."""
    # Without such a limit the keys are missing. Other errors are reported later.
    with suppress(LookupError, TypeError, ValueError):
        return float(checkpoint.state()["callbacks"][TimeLimit.__name__]["reached"])
    return 0.0


def is_at_end(config: RunConfig, checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is at the end of the run's length. Ignore early stopping."""
    length = config.train.stop_after
    limit = config.train.command_seconds
    if limit is not None and _total_seconds(checkpoint) >= limit:
        return True
    return not length.total and length.reached(Progress(**checkpoint.manifest.progress))


def prepare_run_folder(
    resolved: Resolved,
    store: TokenStore,
    say: Callable[[str], None],
    bucket: Bucket | None,
    *,
    resume: str | None,
    start: Path | None,
) -> None:
    """Prepare a locked folder and its bucket, on the first rank.

    Download the newest checkpoint, or make the checkpoint `resume` the newest. Without a checkpoint
    the run begins at step 0, and the files of a previous run are set aside.
    """
    config = resolved.config
    run = Path(config.run_dir)
    if resume is not None:
        go_back(resolved, store, resume, say, bucket)
        return
    if bucket is not None:
        fetch_run(bucket, run, say=say)
    if step_folders(run / "checkpoints"):
        return

    start_adapter = None if config.adapter is None else start_folder(config.adapter)
    _refuse_own_start(run, [start, config.model.start_from, start_adapter])
    if moved := set_aside(run, None, bucket=bucket):
        say(
            f"note: {run} has no checkpoint, so the run begins at step 0. Files of the previous "
            f"run were moved to {run / SET_ASIDE}: {', '.join(moved)}"
        )
    copy_start_adapter(config)


def _refuse_own_start(run: Path, starts: Sequence[str | Path | None]) -> None:
    """Raise a CheckpointError if a new run would set aside the model that it begins from."""
    replaced = [run / "best"]
    if (run / END).exists():
        replaced.append(run / "model")
    folders = [named_path(start).resolve() for start in starts if start is not None]
    for folder in folders:
        if any(folder.is_relative_to(path.resolve()) for path in replaced):
            raise CheckpointError(
                f"{run} is the folder of a previous run without checkpoints. The new run would "
                "replace the model that it begins from. Choose another folder: "
                "run_dir=runs/another."
            )


def go_back(
    resolved: Resolved,
    store: TokenStore,
    name: str,
    say: Callable[[str], None],
    bucket: Bucket | None,
) -> None:
    """Make the checkpoint `name` the run's newest. Set newer files aside.

    Call it on the first rank, with the folder and the bucket locked. If it raises an error, no file
    was moved.
    """
    run = Path(resolved.config.run_dir)
    mark = run / SET_ASIDE / _RESUMED
    if _has_gone_back(mark, name):
        say(
            f"note: restarted after going back to {name}: continuing from the newest checkpoint"
        )
        return
    step = parse_step(name, run, bucket)
    if bucket is not None:
        fetch_step(bucket, run, step, say=say)
    checkpoint = verify_checkpoint(run / "checkpoints" / step_name(step))
    # `checkpoint_to_continue` reports a new length.
    _refuse_another_run(resolved.config, store, checkpoint, lambda _message: None)

    moved = set_aside(run, step, bucket=bucket)
    mark.parent.mkdir(exist_ok=True)
    atomic_write(mark, json.dumps({"name": name}).encode())
    if not moved:
        say(f"continuing from {step_name(step)}, the newest checkpoint")
        return
    say(
        f"continuing from {step_name(step)}. Newer files were moved to {run / SET_ASIDE}: "
        f"{', '.join(moved)}"
    )


def parse_step(name: str, run: Path, bucket: Bucket | None) -> int:
    """Return the step of a checkpoint such as "step-00000200" or "200".

    Raises:
        CheckpointError: The run and its bucket do not have the checkpoint.
    """
    steps = {step_of(path.name) for path in step_folders(run / "checkpoints")}
    places = f"{run}"
    if bucket is not None:
        uploaded = complete_steps(bucket.names("checkpoints"), "checkpoints")
        steps |= {int(folder.removeprefix("step-")) for folder in uploaded}
        places += f" or {bucket.address}"
    number = name.removeprefix("step-")
    if number.isdecimal() and int(number) in steps:
        return int(number)
    listed = ", ".join(step_name(step) for step in sorted(steps)) or "none yet"
    raise CheckpointError(
        f"The checkpoint {name!r:.60} is not in {places}. Checkpoints: {listed}. Name one of them, "
        "e.g. step-00000200 or 200. A best model has only weights. To begin a new run from it, use "
        f"{argument('start=FOLDER')} with another run_dir. To use a checkpoint in "
        f"{run / SET_ASIDE} again, move it back."
    )


def _has_gone_back(mark: Path, name: str) -> bool:
    """Return whether this command went back to `name` before its launcher restarted it.

    torchrun and similar launchers count restarts in TORCHELASTIC_RESTART_COUNT.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        mark.unlink(missing_ok=True)
        return False
    try:
        return bool(json.loads(mark.read_bytes()) == {"name": name})
    except (OSError, ValueError, RecursionError):
        return False


def refuse_another_store(run: Path, checkpoint: Checkpoint, store: TokenStore) -> None:
    """Raise a CheckpointError if a run was trained on another store."""
    fingerprint = checkpoint.manifest.data_fingerprint
    if fingerprint != store.fingerprint:
        raise CheckpointError(
            f"{run} was trained on another store (fingerprint {fingerprint[:12]}, now "
            f"{store.fingerprint[:12]}), so the data or the tokenizer changed. Restore data.store, "
            "or begin a new run: run_dir=runs/another."
        )


def _is_same_data(change: ChangedSetting) -> bool:
    """Return whether a setting describes the same data with another path or notation.

    The store's fingerprint, which has already been compared, covers the data and its limits.
    """
    if change.path.endswith(".weight"):
        return (change.old or 1.0) == (change.new or 1.0)
    section, _, name = change.path.partition(".")
    return section == "data" and name.split(".")[0] in _FINGERPRINTED
