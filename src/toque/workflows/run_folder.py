"""Run folder: its configuration, log and lock, and the checkpoint that a session starts from.

Going back to a checkpoint deletes nothing. Newer files move to set-aside/TIME/, in the folder and
in the bucket. A checkpoint that is moved back is valid again.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TextIO

from torch import nn

from toque.config import Resolved, RunConfig, resolve_values, resolved_yaml
from toque.config.cross_checks import explain_new_length
from toque.config.dump import ChangedSetting, differences
from toque.data.store.store_manifest import read_manifest
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.codec import load_codec
from toque.data.tokenizer.portable import tokenizer_differences
from toque.data.tokenizer.tokenizer_folder import resolve_tokenizer
from toque.errors import CheckpointError, DataError, ToqueError, argument, in_shell
from toque.evaluation.bootstrap import FILE as BY_TEXT
from toque.reporter import Reporter, size_text
from toque.runs.history import METRICS
from toque.runs.run_record import END, EVALUATION
from toque.storage.atomic import ASIDE_PREFIX, atomic_write, move_into, sha256_of
from toque.storage.bucket import Bucket
from toque.storage.no_follow import current_path, open_append
from toque.training.checkpoint.fetch import (
    OUTBOX,
    complete_steps,
    fetch_run,
    fetch_step,
)
from toque.training.checkpoint.resume import load_model_tensors, model_tensors
from toque.training.checkpoint.saved import (
    MANIFEST,
    Checkpoint,
    step_folders,
    step_name,
    step_of,
    verify_checkpoint,
)
from toque.training.checkpoint.store import CheckpointStore, run_lock
from toque.training.checkpoint.tensor_files import bytes_of
from toque.training.optim.factory import state_bytes
from toque.training.stopping import TimeLimit
from toque.training.trainer import Trainer
from toque.units import Progress
from toque.user_paths import named_path
from toque.workflows.results import Model, model_folder, refuse_absent_start
from toque.workflows.saved_steps import KINDS, SET_ASIDE

LOG: Final = "training.log"


class LoggedReporter(Reporter):
    """Reporter that forwards everything and also writes lines with times to `training.log`.

    Lines before `writing` are buffered. A line that the disk refuses is dropped.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._early = io.StringIO()
        self._file: TextIO = self._early

    @property
    def heard(self) -> bool:
        """Return whether a person sees the lines, in addition to the log."""
        return self._reporter.heard

    @property
    def lost(self) -> str | None:
        """Reason why a message could not be displayed, or None."""
        return self._reporter.lost

    @property
    def columns(self) -> int:
        """Characters per line on the screen."""
        return self._reporter.columns

    @contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        """Append to the log of a run's folder, which is claimed, until the context ends."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_append(folder / LOG)
            self._file = os.fdopen(descriptor, "a", encoding="utf-8", errors="replace")
            with suppress(OSError):
                self._file.write(self._early.getvalue())
        except OSError as error:
            self._reporter.notice(
                f"warning: {folder / LOG} cannot be written ({error.strerror}). The messages of "
                "this run are not logged."
            )
        try:
            yield
        finally:
            with suppress(
                OSError
            ):  # the disk may have no space for the rest of the buffer
                self._file.close()
            self._file = self._early = io.StringIO()

    def line(self, text: str) -> None:
        """Forward and log a line of the result."""
        self._reporter.line(text)
        self._keep(text)

    def notice(self, text: str) -> None:
        """Forward and log a message."""
        self._reporter.notice(text)
        self._keep(text)

    def detail(self, text: str) -> None:
        """Forward and log a detail."""
        self._reporter.detail(text)
        self._keep(text)

    def progress(
        self, text: str, *, done: int = 0, total: int = 0, keep: bool = False
    ) -> None:
        """Forward the state of the work, and log it if `keep` is set."""
        self._reporter.progress(text, done=done, total=total, keep=keep)
        if keep and text:
            self._keep(text)

    def working(self, text: str) -> AbstractContextManager[object]:
        """Forward the name of an activity."""
        return self._reporter.working(text)

    def _keep(self, text: str) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        with suppress(OSError):
            for line in text.splitlines():
                self._file.write(f"{stamp},{int(now % 1 * 1000):03}  {line}\n")
            self._file.flush()


LOCK_FILE: Final = "checkpoints/.lock"
_SESSION_FILES: Final = ("config.yaml", "resources.json", LOCK_FILE, LOG)
"""Files that a session writes before its first update."""
_FINAL_FILES: Final = (END, EVALUATION, BY_TEXT, "model")
"""Files that a finished run writes. The record is first: without it, the run is not finished."""
_RESUMED: Final = "resumed.json"
"""File with the checkpoint that a command went back to. A restart by the launcher reads it."""


@contextmanager
def lock_run_folder(run: Path) -> Iterator[None]:
    """Lock a run's folder. If a new run is refused, remove the folders that it created."""
    new = [folder for folder in (run, *run.parents) if not folder.exists()]
    is_first = not (run / LOCK_FILE).exists()
    with run_lock(run / "checkpoints"):
        try:
            yield
        except ToqueError:
            if is_first and current_path(run) == run:
                _remove_unused(run, new)
            raise


def _remove_unused(run: Path, new: Sequence[Path]) -> None:
    """Remove the files of a first session, unless it has trained or downloaded a checkpoint."""
    if (run / METRICS).exists() or step_folders(run / "checkpoints"):
        return
    with suppress(OSError):
        for path in (
            *(run / name for name in _SESSION_FILES),
            *run.glob("resources-rank*"),
        ):
            path.unlink(missing_ok=True)
        for folder in (run / "checkpoints", run / OUTBOX, *new):
            if folder.exists():
                folder.rmdir()


def checkpoint_to_continue(
    config: RunConfig,
    store: TokenStore,
    say: Callable[[str], None],
    *,
    start: Path | None,
) -> Checkpoint | None:
    """Return the newest checkpoint of a claimed folder, or None without a checkpoint.

    A run that began from the same `start` continues, because the user repeated the command.

    Raises:
        CheckpointError: The checkpoint belongs to another run.
    """
    newest = CheckpointStore(Path(config.run_dir) / "checkpoints").newest_valid()
    if newest is None:
        return None
    _refuse_another_run(config, store, newest, say)
    if start is not None and newest.state().get("begun_from") != sha256_of(
        start / MANIFEST
    ):
        raise CheckpointError(
            f"{config.run_dir} already has a run at step {newest.step}, but {argument('start')} "
            "begins a new run. Choose another folder: run_dir=runs/another."
        )
    return newest


def _refuse_another_run(
    config: RunConfig,
    store: TokenStore,
    checkpoint: Checkpoint,
    say: Callable[[str], None],
) -> None:
    """Raise a CheckpointError for a checkpoint of other data or settings."""
    run = Path(config.run_dir)
    refuse_another_store(run, checkpoint, store)
    old = resolve_values(
        checkpoint.manifest.settings, f"{checkpoint.path}/manifest.json"
    ).config
    try:
        progress = Progress(**checkpoint.manifest.progress)
    except TypeError as error:
        raise CheckpointError(
            f"The progress in {checkpoint.path} cannot be read by this version of Toque: {error}."
        ) from error
    longer = explain_new_length(
        old, config, progress, total_seconds=_total_seconds(checkpoint)
    )

    # The path of the data may change, because the fingerprint above verifies the content.
    unsafe = [
        d
        for d in differences(old, config)
        if not d.is_safe
        and not _only_moved(d)
        and not (longer is not None and d.path == "train.stop_after")
    ]
    if not unsafe and longer is not None:
        say(longer)
    if unsafe:
        listed = "; ".join(f"{d.path}: {d.old} -> {d.new}" for d in unsafe)
        raise CheckpointError(
            f"{run} has a run at step {checkpoint.step} with other settings: {listed}. Restore "
            "these settings to continue, or begin a new run from its weights: "
            f"run_dir=runs/another {argument(f'start={in_shell(checkpoint.path)}')}."
        )


def _total_seconds(checkpoint: Checkpoint) -> float:
    """Return the time limit of the command, in seconds, that the run reached, or 0."""
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
    """Prepare a claimed folder and its bucket, on the first rank.

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

    starts = [
        named_path(path)
        for path in (start, config.model.start_from)
        if path is not None
    ]
    replaced = [run / "best"]
    if (run / END).exists():
        replaced.append(run / "model")
    if any(
        path.resolve().is_relative_to(r.resolve()) for path in starts for r in replaced
    ):
        raise CheckpointError(
            f"{run} is the folder of a previous run without checkpoints. The new run would replace "
            "the model that it begins from. Choose another folder: run_dir=runs/another."
        )
    if moved := set_aside(run, None, bucket=bucket):
        say(
            f"note: {run} has no checkpoint, so the run begins at step 0. Files of the previous "
            f"run were moved to {run / SET_ASIDE}: {', '.join(moved)}"
        )


def go_back(
    resolved: Resolved,
    store: TokenStore,
    name: str,
    say: Callable[[str], None],
    bucket: Bucket | None,
) -> None:
    """Make the checkpoint `name` the run's newest. Set newer files aside.

    Call it on the first rank, with folder and bucket claimed. If it raises an error, no file was
    moved.
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
    # `checkpoint_to_continue` reports a longer run.
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


def set_aside_folder(run: Path) -> Path:
    """Return a folder, named by the current time, for files to set aside."""
    return run / SET_ASIDE / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")


def set_aside(run: Path, step: int | None, *, bucket: Bucket | None) -> list[str]:
    """Set aside checkpoints and models after `step`, the newest first. Return the names.

    The files of a finished run move first and are last in the result. After a kill, the same
    command completes the work.

    Args:
        run: The run folder.
        step: The last step that stays. None: move everything, even if only the files of a finished
            run are left.
        bucket: The bucket of the run.
    """
    place = set_aside_folder(run)
    after = -1 if step is None else step
    newer = [
        (kind, path)
        for kind in KINDS
        for path in step_folders(run / kind)
        if step_of(path.name) > after
    ]
    names = bucket.names() if bucket is not None else []
    uploaded = [
        f"{kind}/{folder}"
        for kind in KINDS
        for folder in complete_steps(names, kind)
        if int(folder.removeprefix("step-")) > after
    ]
    final_files: list[str] = []
    if newer or uploaded or (step is None and (run / END).exists()):
        final_files = [name for name in _FINAL_FILES if (run / name).exists()]

    moved = []
    try:
        for name in final_files:
            move_into(run / name, place, name)
        for kind, path in newer:
            name = path.name.removeprefix(ASIDE_PREFIX)
            move_into(path, place / kind, name)
            moved.append(f"{kind}/{name}")
        for path in sorted(
            (run / OUTBOX).glob("*-step-*"), reverse=True
        ):  # waiting uploads
            if int(path.name.rpartition("-")[2]) > after:
                move_into(path, place / OUTBOX, path.name)
    except OSError as error:
        raise CheckpointError(
            f"Checkpoints after step {after} cannot be moved from {run} to {place}: "
            f"{error.strerror}. {len(moved)} were moved. Check that you may write there, and "
            "repeat the command."
        ) from error

    if bucket is not None:
        final_names: list[str] = []
        if uploaded or (step is None and END in names):
            final_names = [name for name in names if name.split("/")[0] in _FINAL_FILES]
        for name in final_names:
            bucket.copy(name, f"{SET_ASIDE}/{place.name}/{name}")
        bucket.remove(final_names)
        for folder in uploaded:
            # The manifest is last, because it makes the checkpoint complete.
            inside = [name for name in names if name.startswith(f"{folder}/")]
            inside.sort(key=lambda name: name.endswith(f"/{MANIFEST}"))
            for name in inside:
                bucket.copy(name, f"{SET_ASIDE}/{place.name}/{name}")
            bucket.remove(reversed(inside))
        moved += [name for name in uploaded if name not in moved]
    return moved + final_files


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


def _only_moved(difference: ChangedSetting) -> bool:
    """Return whether only the path of the data or the notation of its limits differs."""
    if difference.path.endswith(".weight"):
        return (difference.old or 1.0) == (difference.new or 1.0)
    # The fingerprint also covers the limits, in either notation.
    names = ("store", "sources", "validation", "max_prompt_tokens", "max_target_tokens")
    return difference.path.split(".")[:2] in [["data", name] for name in names]


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


def start_folder(start: Model) -> Path:
    """Return the checkpoint for the weights of a new run. For a run, it is the newest one."""
    refuse_absent_start(start)
    path = model_folder(start)
    newest = CheckpointStore(path / "checkpoints").newest_valid()
    return path if newest is None else newest.path


def load_start_weights(
    trainer: Trainer, store: TokenStore, start: Path, say: Callable[[str], None]
) -> None:
    """Load the weights of a checkpoint into a new run.

    The tokenizer and the frozen weights below an adapter must be the same as in the run of the
    checkpoint. `say` reports a comparison that is impossible.

    Raises:
        CheckpointError: The tokenizer or the frozen weights differ.
    """
    checkpoint = verify_checkpoint(start)
    trainer.begun_from = sha256_of(start / MANIFEST)
    _compare_base(checkpoint, trainer.base_sha256, say)
    _refuse_other_tokens(checkpoint, store, say)
    load_weights(trainer.model, checkpoint)


def _compare_base(
    checkpoint: Checkpoint, base: str | None, say: Callable[[str], None]
) -> None:
    if not refuse_another_base(checkpoint, base) and base is not None:
        say(
            f"note: {checkpoint.path} does not record the frozen weights below its adapter, so "
            "they could not be compared with model.start_from"
        )


def refuse_another_base(checkpoint: Checkpoint, base: str | None) -> bool:
    """Compare the frozen weights below an adapter with the weights of the checkpoint's run.

    Returns:
        False if the checkpoint does not record its frozen weights. A best model does not.

    Raises:
        CheckpointError: The weights differ.
    """
    state = checkpoint.state()
    if "base_sha256" not in state:
        return False
    recorded = state["base_sha256"]
    if recorded != base:
        raise CheckpointError(
            f"{checkpoint.path} was trained with other frozen weights (SHA-256 {recorded}, now "
            f"{base}; None means no adapter), so it does not work with these. Set model.start_from "
            "and adapter as in that run."
        )
    return True


def _refuse_other_tokens(
    checkpoint: Checkpoint, store: TokenStore, say: Callable[[str], None]
) -> None:
    if checkpoint.manifest.data_fingerprint == store.fingerprint:
        return
    folder = _tokenizer_folder(checkpoint)
    if folder is None:
        say(
            f"note: {checkpoint.path} has no store and no finished model on this machine, so its "
            f"tokenizer could not be compared with the tokenizer of {store.path}"
        )
        return
    differing = tokenizer_differences(load_codec(folder), store.codec())
    if differing:
        raise CheckpointError(
            f"{checkpoint.path} was trained with another tokenizer than the tokenizer of "
            f"{store.path}: {'; '.join(differing)} (one is the checkpoint's). Prepare "
            "another store with the checkpoint's tokenizer: "
            f"{in_shell(f'model.tokenizer={folder}')} data.store=stores/another."
        )


def _tokenizer_folder(checkpoint: Checkpoint) -> Path | None:
    """Return the folder of a checkpoint's tokenizer: in its store, or in its run's model."""
    data = checkpoint.manifest.settings.get("data")
    store = data.get("store") if isinstance(data, dict) else None
    if isinstance(store, str):
        with suppress(
            DataError, ValueError
        ):  # the store may be newer, or of an older Toque
            if (
                read_manifest(Path(store)).fingerprint
                == checkpoint.manifest.data_fingerprint
            ):
                return Path(store) / "tokenizer"
    model = checkpoint.path.absolute().parent.parent / "model"
    with suppress(DataError):
        return resolve_tokenizer(str(model)) if model.is_dir() else None
    return None


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint: all weights, or only the trainable weights."""
    stored = checkpoint.tensors("model", model_tensors(model).get)
    load_model_tensors(model, stored, where=str(checkpoint.path))


def refuse_small_disk(trainer: Trainer, config: RunConfig) -> None:
    """Raise a CheckpointError if the disk has no space for the next save."""
    if trainer.finished:
        return
    weights = bytes_of(model_tensors(trainer.model))
    checkpoint_bytes = weights + state_bytes(trainer.optimizer)
    best_bytes = weights if config.train.keep_best else 0
    folder = Path(config.run_dir)
    existing = next(
        path for path in (folder, *folder.absolute().parents) if path.is_dir()
    )
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
