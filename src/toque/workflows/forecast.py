"""Forecast of the space and the learning rate of a run, without allocating its model."""

from __future__ import annotations

import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toque.config import RunConfig
from toque.errors import CheckpointError, ConfigError, DataError
from toque.reporter import size_text
from toque.runs.estimate import checkpoint_bytes, kept_bytes
from toque.runs.outlined_update import outlining
from toque.units import Progress
from toque.workflows.plan.outlined_model import plain_outline

if TYPE_CHECKING:
    from toque.training.trainer import Trainer


@dataclass(frozen=True)
class Space:
    """Bytes on disk that a run's checkpoints take."""

    checkpoint: int
    best: int
    """Bytes of one of the best models: weights alone."""
    most: int
    """Bytes of all that is kept, and of one of each kind being written besides."""
    keep_last: int
    keep_best: int
    free: int
    """Bytes free on the disk of the run's folder."""
    how: str
    """Origin of the sizes."""

    def in_words(self) -> str:
        """One sentence or two."""
        kept = f"the newest {self.keep_last}"
        if self.keep_best:
            kept += f" and the best {self.keep_best}, {size_text(self.best)} each"
        said = (
            f"A checkpoint takes {size_text(self.checkpoint)} ({self.how}). Kept are {kept}: at "
            f"most {size_text(self.most)} while one is being written; {size_text(self.free)} are "
            "free."
        )
        return said if self.most <= self.free else f"{said} THAT IS TOO LITTLE: saves would fail."


def space_of(config: RunConfig) -> Space:
    """Sizes from the run's newest checkpoint, or from the model's outline before there is one.

    Raises:
        ConfigError: a model that cannot be made, or whose size is not known before its first save.
        DataError: no store, which says how many tokens the model must know.
    """
    run, train = Path(config.run_dir), config.train
    checkpoint, best, how = _measured(run) or _outlined(config)
    most = kept_bytes(config, checkpoint, best)
    free = shutil.disk_usage(_existing(run)).free
    return Space(checkpoint, best, most, train.keep_last, train.keep_best, free, how)


def refuse_small_disk(trainer: Trainer, config: RunConfig) -> None:
    """Refuse to train where not even the next save fits; nothing that is made there could be kept.

    Raises:
        CheckpointError: with the bytes that are needed and those that are free.
    """
    from toque.training.checkpoint.state_tensors import bytes_of, model_tensors
    from toque.training.optim.factory import state_bytes

    if trainer.finished:
        return
    weights = bytes_of(model_tensors(trainer.model))
    whole = checkpoint_bytes(config, weights, state_bytes(trainer.optimizer))
    best = weights if config.train.keep_best else 0
    folder = Path(config.run_dir)
    free = shutil.disk_usage(_existing(folder)).free
    if whole + best <= free:
        return
    kept = f" and the best model, {size_text(best)} (train.keep_best=0 keeps none)" if best else ""
    raise CheckpointError(
        f"The disk of {folder} has {size_text(free)} free, and the next save does not fit: a "
        f"checkpoint, {size_text(whole)} (weights, optimizer and averages){kept}. Nothing that "
        "training makes could be kept, so it does not begin. Make room, or choose another run_dir."
    )


def _existing(folder: Path) -> Path:
    return next(p for p in (folder, *folder.absolute().parents) if p.is_dir())


def _measured(run: Path) -> tuple[int, int, str] | None:
    from toque.training.checkpoint.manifest import read_manifest
    from toque.training.checkpoint.saved import Checkpoint

    for folder in sorted((run / "checkpoints").glob("step-*"), reverse=True):
        try:
            found = Checkpoint(folder, read_manifest(folder))
            weights = found.bytes_of("model")
        except CheckpointError:
            continue  # `toque verify` says what is wrong with it
        return sum(e.bytes for e in found.manifest.files), weights, f"as {folder.name} does"
    return None


def _outlined(config: RunConfig) -> tuple[int, int, str]:
    from toque.data.store.token_store import TokenStore
    from toque.training.checkpoint.state_tensors import bytes_of, model_tensors
    from toque.training.optim.factory import build_optimizer, state_bytes

    if config.adapter is not None:
        raise ConfigError("only the adapter is saved, and the first save shows how little that is.")
    with outlining():
        model = plain_outline(config, TokenStore.open(config.data.store))
        state = state_bytes(build_optimizer(model, name=config.optim.name))
        weights = bytes_of(model_tensors(model))
    whole = checkpoint_bytes(config, weights, state)
    return whole, weights, "weights and optimizer, by their shapes"


@dataclass(frozen=True)
class LrCurve:
    """The learning rate over the run, at even distances."""

    unit: str
    length: float
    """Length of the run, in `unit`."""
    rates: list[float]
    stages: list[tuple[float, str]]
    """Begin of each stage of a curriculum, as a share of the run, and the examples it sees."""


def course_of(config: RunConfig, points: int) -> LrCurve:
    """The learning rate at `points` moments of the run, as the trainer will compute it.

    Raises:
        ConfigError: something is given in a unit that only the prepared data can place.
    """
    from toque.config.cross_checks import share_of
    from toque.data.loader.curriculum import stage_in_words
    from toque.training.lr_schedules import schedule_from_settings

    stop = config.train.stop_after
    by_clock = {"seconds": stop.seconds} if stop.seconds is not None else {}
    totals = {stop.unit: stop.amount, **by_clock, **_expected(config)}
    lr_at = schedule_from_settings(
        config.optim, stop, {unit: float(amount) for unit, amount in totals.items()}
    )
    rates = [lr_at(_progress(totals, i / (points - 1))) for i in range(points)]
    stages = config.curriculum.stages if config.curriculum is not None else ()
    begins = [(share_of(stage.begins, stop) or 0.0, stage_in_words(stage)) for stage in stages]
    unit = "steps" if "steps" in totals else stop.unit
    return LrCurve(unit, float(totals[unit]), rates, begins)


def _expected(config: RunConfig) -> dict[str, float]:
    """The run's totals in every unit, if its data is prepared; else what needs no data."""
    from toque.data.store.token_store import TokenStore
    from toque.workflows.build import build_stream

    optim, stop = config.optim, config.train.stop_after
    asked = {d.unit for d in (optim.warmup, optim.cooldown) if d is not None and d.amount}
    asked |= {optim.cycles.first.unit} if optim.cycles is not None else set()
    try:
        store = TokenStore.open(config.data.store)
        with outlining():
            model = plain_outline(config, store)
        return build_stream(config, store, model).totals(stop)
    except (ConfigError, DataError) as error:
        if asked <= {stop.unit, "%"}:
            return {}
        raise ConfigError(
            f"The run is {stop} long, and its schedule is given in {', '.join(sorted(asked))}: how "
            f"many of one make the other is known from the prepared data. ({error})"
        ) from error


def _progress(totals: dict[str, float], share: float) -> Progress:
    at = defaultdict(float, {unit: amount * share for unit, amount in totals.items()})
    return Progress(
        step=round(at["steps"]),
        epoch=at["epochs"],
        examples=round(at["examples"]),
        tokens=round(at["tokens"]),
        seconds=at["seconds"],
    )
