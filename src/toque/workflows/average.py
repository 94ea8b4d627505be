"""Averages of a run's weights. The best is written if it is at least as good as the checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from toque.config import RunConfig, load_config
from toque.errors import CheckFailed, CheckpointError, ConfigError, argument
from toque.models.loading.provenance import provenance_of
from toque.reporter import SILENT, Reporter, counting
from toque.reports.page import Grid, format_columns
from toque.runs.places import is_in_a_bucket
from toque.storage.no_follow import refuse_links
from toque.user_paths import named_path
from toque.version import __version__
from toque.workflows.results import Model, TrainedRun, resolve_model
from toque.workflows.saved_steps import list_steps, run_of

if TYPE_CHECKING:
    from torch import Tensor

    from toque.data.store.token_store import TokenStore
    from toque.workflows.inference.open_model import TrainedModel

    Weights = Mapping[str, Tensor]

_FEWEST: Final = 2  # checkpoints of an average
_ATTEMPTS: Final = 3
"""Number of attempts to open the newest checkpoints, which training may replace meanwhile."""
_RUNS_OWN: Final = ("model", "checkpoints", "best", "set-aside", "start-adapter")
"""Folders of a run that an average never replaces."""


@dataclass(frozen=True)
class AverageResult:
    """Held-out losses of averages of weights and of checkpoints, in nats per target token."""

    averages: Mapping[str, float]
    """Loss of each average, by its description."""
    checkpoints: Mapping[str, float]
    """Loss of the newest checkpoint and of the run's best model, by path in the run."""
    folder: Path | None
    """Folder of the best average; None if a checkpoint has a lower loss."""

    @property
    def best(self) -> str:
        """Description of the average with the lowest loss."""
        return _lowest(self.averages)

    @property
    def loss(self) -> float:
        """Loss of the best average."""
        return self.averages[self.best]

    def raise_if_failed(self) -> None:
        """Raise CheckFailed if no average was written because a checkpoint is better."""
        if self.folder is not None:
            return
        checkpoint = _lowest(self.checkpoints)
        raise CheckFailed(
            f"The {self.best} has the held-out loss {self.loss:.4f}, but {checkpoint} has "
            f"{self.checkpoints[checkpoint]:.4f}, so the average was not written. To average "
            f"another number of checkpoints, at least 2, use {argument('last')}. A run keeps the "
            "number in train.keep_last. A constant learning rate gains most from an average."
        )

    def __str__(self) -> str:
        """Return the losses as a table, and the folder of the written average."""
        losses = {**self.checkpoints, **self.averages}
        rows = [(name, f"{loss:.4f}") for name, loss in losses.items()]
        lines = [*format_columns(Grid(("", "held-out loss"), rows))]
        if self.folder is not None:
            lines.append(f"The {self.best} is in {self.folder}, as a model folder.")
        return "\n".join(lines)


def _lowest(losses: Mapping[str, float]) -> str:
    """Return the name of the lowest loss. NaN is higher than every number."""
    return min(losses, key=lambda name: (math.isnan(losses[name]), losses[name]))


def average(
    run: Model,
    to: str | Path | None = None,
    *,
    last: int | None = None,
    replace: bool = False,
    reporter: Reporter = SILENT,
) -> AverageResult:
    """Average the weights of a run, and write the best average as a model.

    One average is the mean of the newest checkpoints (Izmailov et al. 2018, arXiv 1803.05407). With
    `optim.ema_decay`, the newest checkpoint also has an exponential average. Their losses are
    measured on the run's held-out examples, like the loss of the newest checkpoint and of the
    best model. An average is written only if no checkpoint has a lower loss. Of an adapter, the
    matrices are averaged, so the average is an adapter of the same size.

    Args:
        run: A run folder on this machine. The run may be training.
        to: A new folder for the average. None means the folder `average` in the run.
        last: Number of checkpoints, at least 2, to measure only their mean. None means all in
            `checkpoints/` of the run.
        replace: Replace an earlier average in `to`.
        reporter: Receives the progress.

    Returns:
        The losses, and the folder of the best average. `raise_if_failed` raises an error without
        one.

    Raises:
        ConfigError: The folder is not a run, or its objective is not `sft`.
        CheckpointError: The run has too few checkpoints, one is damaged, or `to` is not empty.
        DataError: The store of the run does not exist or has changed.
    """
    folder = _run_folder(run)
    config = load_config(folder / "config.yaml").config
    if config.objective.kind != "sft":
        raise ConfigError(
            f"{folder} has objective.kind={config.objective.kind}. Its held-out loss does not "
            "measure this objective, so it cannot show whether an average is better. Average a run "
            "with objective.kind=sft."
        )
    if last is not None and last < 2:
        raise ConfigError(
            f"{argument(f'last={last}')}: an average needs at least 2 checkpoints. To write one "
            f"checkpoint as a model, use `toque export` with {argument('step=N')}."
        )
    target = folder / "average" if to is None else named_path(to)
    with reporter.working("loading torch"):
        from toque.training.runtime import restoring_torch
        from toque.workflows.prepared_store import open_store

    _refuse_target(folder, target, replace=replace)
    with ExitStack() as open_files, restoring_torch():
        with reporter.working(f"reading {config.data.store} and {folder}"):
            store = open_store(config, sources=False)
            opened = _open_newest(folder, last, store, open_files)
        return _measure_and_write(folder, config, store, opened, target, reporter)


def _run_folder(run: Model) -> Path:
    """Return the folder of a run.

    Raises:
        ConfigError: It is something other than a run folder on this machine.
    """
    if not isinstance(run, TrainedRun) and is_in_a_bucket(str(run)):
        raise ConfigError(
            f"{run} is in a bucket, but averaging needs a run folder on this machine. Continue the "
            "run here, or copy its folder."
        )
    folder = resolve_model(run)
    if (of_checkpoint := run_of(folder)) is not None:
        raise ConfigError(
            f"{folder} is one checkpoint. Name its run, {of_checkpoint}, to average several."
        )
    if not (folder / "config.yaml").exists():
        raise ConfigError(
            f"{folder} is not a run folder: it has no config.yaml. Name a run such as runs/my."
        )
    refuse_links(folder, CheckpointError)
    return folder


def _refuse_target(run: Path, target: Path, *, replace: bool) -> None:
    """Raise an error if an average must not be written to a folder."""
    from toque.models.loading.model_export import refuse_nonempty

    resolved, run_folder = target.resolve(), run.resolve()
    runs = {run_folder, *(p for p in resolved.parents if (p / "config.yaml").exists())}
    own = (folder / name for folder in runs for name in _RUNS_OWN)
    if resolved == run_folder or any(map(resolved.is_relative_to, own)):
        raise ConfigError(
            f"{argument(f'to={target}')}: a run itself writes to this folder. Choose another."
        )
    if replace and target.is_dir() and provenance_of(target) is not None:
        return
    try:
        refuse_nonempty(target)
    except CheckpointError as error:
        hint = ""
        if not replace and target.is_dir():
            hint = f" To replace an earlier average, add {argument('replace=True')}."
        raise CheckpointError(f"{error.args[0]}{hint}") from error


@dataclass(frozen=True)
class _Opened:
    """Open checkpoints of a run, and a model for their weights."""

    compared: Mapping[str, Weights]
    """Weights of the newest checkpoint and of the best model, by path in the run."""
    averages: Mapping[str, Weights]
    """Averages by description."""
    trained: TrainedModel


def _open_newest(
    run: Path, last: int | None, store: TokenStore, open_files: ExitStack
) -> _Opened:
    """Verify and open the newest checkpoints of a run. Their files stay open in `open_files`.

    A training run may remove a checkpoint meanwhile. Then start again. A removed file that is open
    can still be read.

    Raises:
        CheckpointError: The run has too few checkpoints, or one is damaged.
    """
    from toque.training.checkpoint.saved import step_folders

    for attempts_left in reversed(range(_ATTEMPTS)):
        folders = step_folders(run / "checkpoints")[:last]
        if len(folders) < (last or 1):
            raise _too_few(run, len(folders), last)
        try:
            with ExitStack() as opening:
                opened = _open(run, folders, store, opening, exponential=last is None)
                open_files.push(opening.pop_all())
        except CheckpointError as error:
            if all(folder.is_dir() for folder in folders):
                raise CheckpointError(
                    f"{error.args[0]} Every averaged checkpoint must be intact. To leave this one "
                    "out, move it away."
                ) from error
            if not attempts_left:
                raise CheckpointError(
                    f"{run} removed a checkpoint in each of {_ATTEMPTS} attempts to read "
                    f"{len(folders)}, because it is training. Wait until training ends, or average "
                    f"fewer with {argument('last')}."
                ) from error
        else:
            if not opened.averages:
                raise _too_few(run, len(folders), last)
            return opened
    raise AssertionError


def _too_few(run: Path, n: int, last: int | None) -> CheckpointError:
    """Return the error about a run with `n` checkpoints and no average."""
    return CheckpointError(
        f"{run} has {n} of the {last or _FEWEST} checkpoints that an average needs. "
        f"{list_steps(run)} "
        f"Train with train.keep_last={last or 5} and a shorter train.save_every, or keep an "
        "exponential average with optim.ema_decay. Best models are not averaged."
    )


def _open(
    run: Path,
    folders: Sequence[Path],
    store: TokenStore,
    opening: ExitStack,
    *,
    exponential: bool,
) -> _Opened:
    """Verify and open checkpoints, the newest first, and the run's best model.

    `exponential` also opens the exponential average of the newest checkpoint, if it has one.
    """
    from toque.hardware.devices import device_named
    from toque.training.checkpoint.averaging import ExponentialAverage, MeanTensors
    from toque.training.checkpoint.saved import verify_checkpoint
    from toque.training.checkpoint.store import CheckpointStore
    from toque.workflows.inference.open_model import checkpoint_model
    from toque.workflows.run_folder.continuation import refuse_another_store
    from toque.workflows.run_folder.weights import refuse_another_base

    checkpoints = [verify_checkpoint(folder) for folder in folders]
    tensors = [opening.enter_context(c.open_tensors("model")) for c in checkpoints]
    newest = checkpoints[0]
    alone = [(newest, tensors[0])]
    best = CheckpointStore(run / "checkpoints").best()
    if best is not None and best.step != newest.step:
        alone.append((best, opening.enter_context(best.open_tensors("model"))))

    trained = checkpoint_model(newest.path, device_named("auto"))
    for checkpoint in checkpoints:
        refuse_another_store(run, checkpoint, store)
        refuse_another_base(checkpoint, trained.base_hash)
    compared = {
        checkpoint.path.relative_to(run).as_posix(): MeanTensors(
            [checkpoint.path], [stored]
        )
        for checkpoint, stored in alone
    }
    averages: dict[str, Weights] = {}
    if len(folders) >= _FEWEST:
        steps = f"steps {checkpoints[-1].step:,} to {newest.step:,}"
        mean = MeanTensors(folders, tensors)
        averages[f"average of {len(folders)} ({steps})"] = mean
    if exponential:
        state = opening.enter_context(newest.open_tensors("optimizer"))
        average = ExponentialAverage(tensors[0], state)
        if average.exists:
            averages[f"exponential average (step {newest.step:,})"] = average
    return _Opened(compared, averages, trained)


def _measure_and_write(
    run: Path,
    config: RunConfig,
    store: TokenStore,
    opened: _Opened,
    target: Path,
    reporter: Reporter,
) -> AverageResult:
    """Measure the checkpoints and the averages. Write the best average if it is good."""
    from toque.training.checkpoint.resume import load_model_tensors
    from toque.workflows.evaluate import heldout_of_model

    model = opened.trained.model
    heldout = heldout_of_model(config, store, model, reporter)

    def measure(tensors: Weights) -> float:
        load_model_tensors(model, tensors, where=str(run))
        with counting(reporter, "evaluating", "held-out examples") as count:
            return heldout(model, count)["loss"]

    losses = {path: measure(tensors) for path, tensors in opened.compared.items()}
    averages = {name: measure(tensors) for name, tensors in opened.averages.items()}
    result = AverageResult(averages, losses, None)
    if not result.loss <= min(losses.values()):  # also true for NaN
        return result
    load_model_tensors(model, opened.averages[result.best], where=str(run))
    result = AverageResult(averages, losses, target)
    _write(run, opened.trained, result, target)
    return result


def _write(
    run: Path, trained: TrainedModel, result: AverageResult, target: Path
) -> None:
    """Write the average in the format of a finished model."""
    from toque.workflows.final_model import write_trained
    from toque.workflows.trained_model.prompt_format import describe_prompts

    losses = {**result.checkpoints, **result.averages}
    rows = "".join(f"| {name} | {loss:.4f} |\n" for name, loss in losses.items())
    card = (
        f"# {run.name}, {result.best}\n\n"
        f"An average of the weights of a run by Toque {__version__}. Its texts were not scored, "
        "and its licence is not recorded.\n\n"
        "| model | held-out loss (nats per target token) |\n|---|---:|\n"
        f"{rows}\n"
        f"{describe_prompts(trained.record)}\n"
    )
    write_trained(trained, target, card=card)
