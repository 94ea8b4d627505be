"""Experiment trackers: copies of metrics.jsonl for TensorBoard, W&B, MLflow and Trackio.

Each has a thread of its own. One that hangs, fails or is slow loses its copies, which are counted.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from toque.errors import ConfigError
from toque.training.callbacks import Callback
from toque.training.events import RunEnd, StepInfo
from toque.training.observers.background_thread import BackgroundThread
from toque.units import Progress

END_PATIENCE_SECONDS: Final = 5.0
"""How long a finished run waits for a tracker's last records."""
_MOST_WAITING: Final = 1000
_PREFIX: Final = {"step": "train", "evaluation": "eval"}


class Tracker(Protocol):
    """One service; created, used and ended in one thread."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the figures of an update or an evaluation."""

    def end(self, *, failed: bool) -> None:
        """The session is over."""


Open = Callable[[], Tracker]


class TrackerFeed(Callback):
    """Feeds one tracker with the figures of metrics.jsonl.

    `take` is called with every record of the file; as a callback it only reports losses.

    Args:
        name: of the tracker.
        open_tracker: connects to it; called in the background thread, where it may take long.
        warn: takes a sentence about what could not be delivered.
    """

    def __init__(
        self, name: str, open_tracker: Open, *, warn: Callable[[Progress, str], None]
    ) -> None:
        self._open = open_tracker
        self._tracker: Tracker | None = None
        self._thread = BackgroundThread(
            f"records for {name}", capacity=_MOST_WAITING, describe=_first_line, warn=warn
        )

    def take(self, record: Mapping[str, Any]) -> None:
        """Queue a record of metrics.jsonl: steps and evaluations, and the end."""
        event = record["event"]
        if event == "end":
            self._thread.offer(lambda: self._end(failed=record["error"] is not None))
        elif event in _PREFIX:
            step, values = int(record["step"]), figures(record)
            self._thread.offer(lambda: self._opened().log(step, values))

    def on_step(self, info: StepInfo) -> None:
        """Warn when records are lost."""
        self._thread.warn_of_losses(info.progress)

    def on_fit_end(self, end: RunEnd) -> None:
        """Wait a little for the queue; metrics.jsonl is closed by now."""
        self._thread.close(end.progress, patience_seconds=END_PATIENCE_SECONDS)

    def _opened(self) -> Tracker:
        if self._tracker is None:
            self._tracker = self._open()
        return self._tracker

    def _end(self, *, failed: bool) -> None:
        if self._tracker is not None:
            self._tracker.end(failed=failed)


def figures(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record, prefixed with train/ or eval/.

    >>> figures({"event": "step", "step": 3, "loss": 2.5, "mfu": None})
    {'train/loss': 2.5}
    >>> figures({"event": "evaluation", "step": 3, "epoch": 0.5, "metrics": {"loss": 2.0}})
    {'eval/epoch': 0.5, 'eval/loss': 2.0}
    """
    flat = {**record, **record.get("metrics", {})}
    prefix = _PREFIX[record["event"]]
    return {
        f"{prefix}/{name}": float(value)
        for name, value in flat.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def opener(name: str, *, folder: Path, settings: Mapping[str, Any]) -> Open:
    """A function that connects the tracker `name` to the run in `folder` with its `settings`.

    Raises:
        ConfigError: its package is not installed.
    """
    package, make = TRACKERS[name]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"observe.trackers names {name}, and the package {package} is not installed. Install "
            f"it (pip install 'toque[{_EXTRA.get(name, 'track')}]'), or take {name} out of "
            "observe.trackers: metrics.jsonl holds the same figures."
        )
    if name == "mlflow" and not os.environ.get(_MLFLOW_HOME):
        raise ConfigError(
            f"observe.trackers names mlflow, and {_MLFLOW_HOME} is not set. MLflow keeps runs on a "
            f"server: export {_MLFLOW_HOME}=http://..., or take mlflow out of observe.trackers."
        )
    return lambda: make(folder, settings)


class _TensorBoard:
    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))
        lines = "\n".join(f"{path}: {value}" for path, value in _flat(settings))
        self._writer.add_text("config", f"```\n{lines}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self, *, failed: bool) -> None:
        self._writer.close()


class _Wandb:
    """WANDB_PROJECT, WANDB_MODE and the rest of its environment are W&B's own."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "toque"),
            name=folder.name,
            dir=str(folder),
            config=dict(settings),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # Not `step=`: W&B refuses to go back, and a continued run goes back to its checkpoint.
        self._run.log({**values, "step": step})

    def end(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio:
    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        trackio = importlib.import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", "toque")
        self._run: Any = trackio.init(project=project, name=folder.name, config=dict(settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def end(self, *, failed: bool) -> None:
        self._run.finish()


class _Mlflow:
    """MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where it logs."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        tracking = importlib.import_module("mlflow.tracking")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "toque")
        self._client: Any = tracking.MlflowClient(tracking_uri=os.environ[_MLFLOW_HOME])
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._id: str = self._client.create_run(experiment, run_name=folder.name).info.run_id
        for path, value in _flat(settings):
            self._client.log_param(self._id, path, str(value)[:500])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)

    def end(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


TRACKERS: Final[Mapping[str, tuple[str, Callable[[Path, Mapping[str, Any]], Tracker]]]] = {
    "tensorboard": ("tensorboard", _TensorBoard),
    "wandb": ("wandb", _Wandb),
    "mlflow": ("mlflow", _Mlflow),
    "trackio": ("trackio", _Trackio),
}
"""Name -> the package it needs, and how it is opened."""
_MLFLOW_HOME: Final = "MLFLOW_TRACKING_URI"
_EXTRA: Final = {"wandb": "wandb", "mlflow": "mlflow"}


def _flat(settings: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{above}{name}.")
        else:
            found.append((f"{above}{name}", value))
    return found


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"the last failed with {type(error).__name__}" + (f": {lines[0][:200]}" if lines else "")
