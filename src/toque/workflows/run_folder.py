"""Run folder: its configuration, log and lock, and the checkpoint that a session begins with.

Nothing is deleted: what is newer goes to set-aside/TIME/, here and in a bucket, and moved back it
is a checkpoint again.
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
from toque.config.cross_checks import lengthened
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
from toque.training.checkpoint.fetch import OUTBOX, complete_steps, fetch_run, fetch_step
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
from toque.workflows.results import Model, folder_of, refuse_absent_start
from toque.workflows.saved_steps import KINDS, SET_ASIDE

LOG: Final = "training.log"


class LoggedReporter(Reporter):
    """Passes everything on, and keeps what stays as lines of `training.log`, with their times.

    Lines from before `writing` wait for it; one that the disk does not take is dropped.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._early = io.StringIO()
        self._file: TextIO = self._early

    @property
    def heard(self) -> bool:
        """True if a person sees the lines, besides the log."""
        return self._reporter.heard

    @property
    def lost(self) -> str | None:
        """Reason why something could not be shown; None while all was shown."""
        return self._reporter.lost

    @property
    def columns(self) -> int:
        """Letters of a line on the screen."""
        return self._reporter.columns

    @contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        """Append to the log of a run's folder, held against others, until the context ends."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_append(folder / LOG)
            self._file = os.fdopen(descriptor, "a", encoding="utf-8", errors="replace")
            with suppress(OSError):
                self._file.write(self._early.getvalue())
        except OSError as error:
            self._reporter.notice(
                f"warning: {folder / LOG} cannot be written ({error.strerror}), so the run keeps "
                "no log of what is shown here"
            )
        try:
            yield
        finally:
            with suppress(OSError):  # the rest of its buffer finds no room
                self._file.close()
            self._file = self._early = io.StringIO()

    def line(self, text: str) -> None:
        """Pass it on and keep it."""
        self._reporter.line(text)
        self._keep(text)

    def notice(self, text: str) -> None:
        """Pass it on and keep it."""
        self._reporter.notice(text)
        self._keep(text)

    def detail(self, text: str) -> None:
        """Keep it, and pass it on to a log."""
        self._reporter.detail(text)
        self._keep(text)

    def progress(self, text: str, *, done: int = 0, total: int = 0, keep: bool = False) -> None:
        """Pass it on, and keep what deserves a line."""
        self._reporter.progress(text, done=done, total=total, keep=keep)
        if keep and text:
            self._keep(text)

    def working(self, text: str) -> AbstractContextManager[object]:
        """Pass it on."""
        return self._reporter.working(text)

    def _keep(self, text: str) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        with suppress(OSError):
            for line in text.splitlines():
                self._file.write(f"{stamp},{int(now % 1 * 1000):03}  {line}\n")
            self._file.flush()


LOCK_FILE: Final = "checkpoints/.lock"
_OWN_FILES: Final = ("config.yaml", "resources.json", LOCK_FILE, LOG)
"""Files that a session writes before its first update."""
_OF_THE_END: Final = (END, EVALUATION, BY_TEXT, "model")
"""Files of a run's end, its record first: without that the rest is not finished."""
_DONE: Final = "resumed.json"
"""The checkpoint that a command has gone back to; read when its launcher starts it again."""


@contextmanager
def claimed_folder(run: Path) -> Iterator[None]:
    """Hold a run's folder against other processes; a refused run leaves nothing in a new place."""
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
    """Remove what a first session begins with, unless it has trained or fetched something."""
    if (run / METRICS).exists() or step_folders(run / "checkpoints"):
        return
    with suppress(OSError):
        for path in (*(run / name for name in _OWN_FILES), *run.glob("resources-rank*")):
            path.unlink(missing_ok=True)
        for folder in (run / "checkpoints", run / OUTBOX, *new):
            if folder.exists():
                folder.rmdir()


def checkpoint_to_continue(
    config: RunConfig, store: TokenStore, say: Callable[[str], None], *, start: Path | None
) -> Checkpoint | None:
    """The newest checkpoint of a claimed folder, if any; refuses one of another run.

    One of a run that began from the same `start` is continued: the same command was given again.
    """
    found = CheckpointStore(Path(config.run_dir) / "checkpoints").newest_valid()
    if found is not None:
        _refuse_another_run(config, store, found, say)
    if start is not None and found is not None:
        if found.state().get("begun_from") == sha256_of(start / MANIFEST):
            return found
        raise CheckpointError(
            f"{config.run_dir} already holds a run at step {found.step}, and {argument('start')} "
            "begins a new one. Choose another folder: run_dir=runs/another."
        )
    return found


def _refuse_another_run(
    config: RunConfig, store: TokenStore, found: Checkpoint, say: Callable[[str], None]
) -> None:
    """Refuse to continue from a checkpoint of other data or settings."""
    run = Path(config.run_dir)
    refuse_another_store(run, found, store)
    old = resolve_values(found.manifest.settings, f"{found.path}/manifest.json").config
    try:
        progress = Progress(**found.manifest.progress)
    except TypeError as error:
        raise CheckpointError(
            f"{found.path} has a progress this Toque cannot read: {error}."
        ) from error
    longer = lengthened(old, config, progress, total_seconds=_total_seconds(found))
    # Where the data lies may change: the fingerprint above holds it to its content.
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
            f"{run} holds a run at step {found.step} with other settings: {listed}. Continuing "
            "with these would be neither run. Set them back to continue, or begin a new run from "
            f"its weights: run_dir=runs/another {argument(f'start={in_shell(found.path)}')}."
        )


def _total_seconds(found: Checkpoint) -> float:
    """The length in time of a whole command that a session came to the end of; 0 for none."""
    with suppress(LookupError, TypeError, ValueError):  # no such limit; other faults are told later
        return float(found.state()["callbacks"][TimeLimit.__name__]["reached"])
    return 0.0


def has_ended(config: RunConfig, found: Checkpoint) -> bool:
    """True if a checkpoint is at the end of the run's length, early stopping aside."""
    whole, limit = config.train.stop_after, config.train.command_seconds
    if limit is not None and _total_seconds(found) >= limit:
        return True
    return not whole.total and whole.reached(Progress(**found.manifest.progress))


def take_up(
    resolved: Resolved,
    store: TokenStore,
    say: Callable[[str], None],
    bucket: Bucket | None,
    *,
    resume: str | None,
    start: Path | None,
) -> None:
    """Ready a claimed folder and its bucket, on the first rank.

    The newest checkpoint is fetched, or the one to `resume` made the newest. Without any the run
    begins anew, and what a former one left, which none of its numbers describe, is set aside.
    """
    config, run = resolved.config, Path(resolved.config.run_dir)
    if resume is not None:
        go_back(resolved, store, resume, say, bucket)
        return
    if bucket is not None:
        fetch_run(bucket, run, say=say)
    if step_folders(run / "checkpoints"):
        return
    begins = [named_path(path) for path in (start, config.model.start_from) if path is not None]
    moves = [run / "best", *([run / "model"] if (run / END).exists() else [])]
    if any(path.resolve().is_relative_to(m.resolve()) for path in begins for m in moves):
        raise CheckpointError(
            f"{run} holds a former run without its checkpoints, from whose model this one begins, "
            "and where it would write its own. Choose another folder: run_dir=runs/another."
        )
    if moved := set_aside(run, None, bucket=bucket):
        say(
            f"note: {run} holds no checkpoint, so the run begins anew; set aside in "
            f"{run / SET_ASIDE}, for they are of a former one: {', '.join(moved)}"
        )


def go_back(
    resolved: Resolved,
    store: TokenStore,
    name: str,
    say: Callable[[str], None],
    bucket: Bucket | None,
) -> None:
    """Make the checkpoint `name` the run's newest: whatever is newer is set aside.

    Call it on the first rank, with folder and bucket claimed. After a refusal nothing was moved.
    """
    run = Path(resolved.config.run_dir)
    mark = run / SET_ASIDE / _DONE
    if _is_done(mark, name):
        say(f"note: started again after going back to {name}; the newest checkpoint is taken")
        return
    step = named_step(name, run, bucket)
    if bucket is not None:
        fetch_step(bucket, run, step, say=say)
    found = verify_checkpoint(run / "checkpoints" / step_name(step))
    # What else differs is said when it continues.
    _refuse_another_run(resolved.config, store, found, lambda _sentence: None)
    moved = set_aside(run, step, bucket=bucket)
    mark.parent.mkdir(exist_ok=True)
    atomic_write(mark, json.dumps({"name": name}).encode())
    if not moved:
        say(f"continuing from {step_name(step)}, the newest there is")
        return
    say(
        f"continuing from {step_name(step)}; set aside in {run / SET_ASIDE}, and no longer part of "
        f"the run: {', '.join(moved)}"
    )


def named_step(name: str, run: Path, bucket: Bucket | None) -> int:
    """The step of a checkpoint such as "step-00000200" or "200", or a CheckpointError."""
    here = {step_of(path) for path in step_folders(run / "checkpoints")}
    names = bucket.names("checkpoints") if bucket is not None else []
    there = {int(n.removeprefix("step-")) for n in complete_steps(names, "checkpoints")}
    number = name.removeprefix("step-")
    if number.isdecimal() and (step := int(number)) in here | there:
        return step
    listed = ", ".join(step_name(step) for step in sorted(here | there)) or "none yet"
    places = f"{run}" if bucket is None else f"{run} or {bucket.address}"
    raise CheckpointError(
        f"There is no checkpoint {name!r:.60} in {places} to continue from; there are: {listed}. "
        "Name one of these, as step-00000200 or 200. (The best models hold weights alone, from "
        f"which a new run begins: {argument('start=FOLDER')} with another run_dir. What was set "
        f"aside before lies in {run / SET_ASIDE}; moved back, it counts again.)"
    )


def set_aside_now(run: Path) -> Path:
    """The folder for what is set aside at this moment."""
    return run / SET_ASIDE / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")


def set_aside(run: Path, step: int | None, *, bucket: Bucket | None) -> list[str]:
    """Move what lies beyond `step` out of the way, the newest first; the names of what was moved.

    Without a step everything, a finished end that no checkpoint is left of, too. The end that is
    undone goes first, its model and scores included, and is named last. After a kill in between,
    the same command takes the run up again.
    """
    place = set_aside_now(run)
    newer = [(kind, path) for kind in KINDS for path in step_folders(run / kind)]
    after = -1 if step is None else step
    newer = [(kind, path) for kind, path in newer if step_of(path) > after]
    names = bucket.names() if bucket is not None else []
    there = [
        f"{kind}/{folder}"
        for kind in KINDS
        for folder in complete_steps(names, kind)
        if int(folder.removeprefix("step-")) > after
    ]
    here = newer or there or (step is None and (run / END).exists())
    ends = [name for name in _OF_THE_END if here and (run / name).exists()]
    moved = []
    try:
        for name in ends:
            move_into(run / name, place, name)
        for kind, path in newer:
            name = path.name.removeprefix(ASIDE_PREFIX)
            move_into(path, place / kind, name)
            moved.append(f"{kind}/{name}")
        for path in sorted((run / OUTBOX).glob("*-step-*"), reverse=True):  # to be uploaded
            if int(path.name.rpartition("-")[2]) > after:
                move_into(path, place / OUTBOX, path.name)
    except OSError as error:
        raise CheckpointError(
            f"What lies beyond step {after} in {run} cannot be set aside: {error.strerror}. "
            f"{len(moved)} were moved to {place}. Give yourself the right to write, and repeat "
            "the command."
        ) from error
    if bucket is not None:
        ended = there or (step is None and END in names)
        of_the_end = [n for n in names if ended and n.split("/")[0] in _OF_THE_END]
        for name in of_the_end:
            bucket.copy(name, f"{SET_ASIDE}/{place.name}/{name}")
        bucket.remove(of_the_end)
        for folder in there:
            inside = [name for name in names if name.startswith(f"{folder}/")]
            inside.sort(key=lambda name: name.endswith(f"/{MANIFEST}"))
            for name in inside:  # the manifest last: only it makes a checkpoint of them
                bucket.copy(name, f"{SET_ASIDE}/{place.name}/{name}")
            bucket.remove(reversed(inside))
        moved += [name for name in there if name not in moved]
    return moved + ends


def _is_done(mark: Path, name: str) -> bool:
    """True if this command went back to the checkpoint `name` before its launcher started it again.

    A launcher that counts its restarts says so by TORCHELASTIC_RESTART_COUNT, as torchrun does.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        mark.unlink(missing_ok=True)
        return False
    try:
        return bool(json.loads(mark.read_bytes()) == {"name": name})
    except (OSError, ValueError, RecursionError):
        return False


def refuse_another_store(run: Path, found: Checkpoint, store: TokenStore) -> None:
    """Raise a CheckpointError where a run was trained on another store than this one."""
    then = found.manifest.data_fingerprint
    if then != store.fingerprint:
        raise CheckpointError(
            f"{run} was trained on another store (then {then[:12]}, now {store.fingerprint[:12]}): "
            "the data or the tokenizer changed. Set data.store back, or begin a new run: "
            "run_dir=runs/another."
        )


def _only_moved(difference: ChangedSetting) -> bool:
    """True if the data lies elsewhere, or its limits are put otherwise, and is drawn as before."""
    if difference.path.endswith(".weight"):
        return (difference.old or 1.0) == (difference.new or 1.0)
    # The fingerprint covers the limits, too, whether they were chosen or given.
    names = ("store", "sources", "validation", "max_prompt_tokens", "max_target_tokens")
    return difference.path.split(".")[:2] in [["data", name] for name in names]


def write_config(resolved: Resolved) -> None:
    """Write config.yaml of the run, or raise a CheckpointError."""
    run = Path(resolved.config.run_dir)
    try:
        run.mkdir(parents=True, exist_ok=True)
        atomic_write(run / "config.yaml", resolved_yaml(resolved).encode())
    except OSError as error:
        raise CheckpointError(
            f"The run folder {run} cannot be written: {error.strerror}. Choose another with "
            "run_dir=... or mend its permissions."
        ) from error


def start_folder(start: Model) -> Path:
    """The checkpoint whose weights a new run begins with (of a run, its newest), or an error."""
    refuse_absent_start(start)
    path = folder_of(start)
    newest = CheckpointStore(path / "checkpoints").newest_valid()
    return path if newest is None else newest.path


def begin_from(
    trainer: Trainer, store: TokenStore, start: Path, say: Callable[[str], None]
) -> None:
    """Load the weights that a new run begins with, if they mean the same there; CheckpointError.

    Tokens have the numbers that a tokenizer gave them, and an adapter adds to the weights that it
    was trained beside. What cannot be compared is said.
    """
    checkpoint = verify_checkpoint(start)
    trainer.begun_from = sha256_of(start / MANIFEST)
    _compare_base(checkpoint, trainer.base_sha256, say)
    _refuse_other_tokens(checkpoint, store, say)
    load_weights(trainer.model, checkpoint)


def _compare_base(checkpoint: Checkpoint, base: str | None, say: Callable[[str], None]) -> None:
    if not refuse_another_base(checkpoint, base) and base is not None:
        say(
            f"note: {checkpoint.path} does not record which frozen weights its adapter was "
            "trained beside, so they could not be compared with those of model.start_from"
        )


def refuse_another_base(checkpoint: Checkpoint, base: str | None) -> bool:
    """Raise a CheckpointError for other frozen weights; False where it records none, as a best."""
    state = checkpoint.state()
    if "base_sha256" not in state:
        return False
    if (then := state["base_sha256"]) != base:
        raise CheckpointError(
            f"{checkpoint.path} was trained beside other frozen weights (then {then}, now {base}; "
            "None has no adapter), and what it learnt means nothing beside these. Set "
            "model.start_from and adapter as they were in that run."
        )
    return True


def _refuse_other_tokens(
    checkpoint: Checkpoint, store: TokenStore, say: Callable[[str], None]
) -> None:
    if checkpoint.manifest.data_fingerprint == store.fingerprint:
        return
    folder = _tokenizer_of(checkpoint)
    if folder is None:
        say(
            f"note: neither the store that {checkpoint.path} was trained on nor a finished model "
            f"of its run is here, so its tokenizer could not be compared with that of {store.path}"
        )
        return
    found = tokenizer_differences(load_codec(folder), store.codec())
    if found:
        raise CheckpointError(
            f"{checkpoint.path} was trained with another tokenizer than that of {store.path}, so "
            f"its weights are of other tokens: {'; '.join(found)}, where one is the checkpoint's. "
            "Prepare another store with the checkpoint's tokenizer: "
            f"{in_shell(f'model.tokenizer={folder}')} data.store=stores/another."
        )


def _tokenizer_of(checkpoint: Checkpoint) -> Path | None:
    """The folder of a checkpoint's tokenizer: in the store it was trained on, or beside it."""
    data = checkpoint.manifest.settings.get("data")
    named = data.get("store") if isinstance(data, dict) else None
    if isinstance(named, str):
        with suppress(DataError, ValueError):  # prepared anew, or of an older Toque
            if read_manifest(Path(named)).fingerprint == checkpoint.manifest.data_fingerprint:
                return Path(named) / "tokenizer"
    model = checkpoint.path.absolute().parent.parent / "model"
    with suppress(DataError):
        return resolve_tokenizer(str(model)) if model.is_dir() else None
    return None


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint: all of them, or those that are trained."""
    stored = checkpoint.tensors("model", model_tensors(model).get)
    load_model_tensors(model, stored, where=str(checkpoint.path))


def refuse_small_disk(trainer: Trainer, config: RunConfig) -> None:
    """Raise a CheckpointError where not even the next save fits, so nothing made could be kept."""
    if trainer.finished:
        return
    weights = bytes_of(model_tensors(trainer.model))
    whole = weights + state_bytes(trainer.optimizer)
    best, folder = weights if config.train.keep_best else 0, Path(config.run_dir)
    parents = folder.absolute().parents
    free = shutil.disk_usage(next(p for p in (folder, *parents) if p.is_dir())).free
    if whole + best <= free:
        return
    kept = f" and the best model, {size_text(best)} (train.keep_best=0 keeps none)" if best else ""
    raise CheckpointError(
        f"The disk of {folder} has {size_text(free)} free, and the next save does not fit: a "
        f"checkpoint, {size_text(whole)} (weights and optimizer){kept}. Nothing that "
        "training makes could be kept, so it does not begin. Make room, or choose another run_dir."
    )
