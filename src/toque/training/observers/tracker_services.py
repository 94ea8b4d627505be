"""Tracker services: TensorBoard, Trackio and W&B behind one interface."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from toque.errors import ConfigError


class Row(NamedTuple):
    """Generated text, as a row of a tracker's table."""

    step: int
    prompt: str
    text: str
    reference: str | None
    cookable: float | None
    recipe_score: float | None


COLUMNS: Final = Row._fields


class Tracker(Protocol):
    """Tracker's run. One thread creates, uses and ends it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of an event."""

    def log_texts(self, step: int, rows: Sequence[Row]) -> None:
        """Log the generated texts of a step as a table."""

    def store_file(self, path: Path) -> None:
        """Store a file of the run, such as its report."""

    def end(self, *, failed: bool) -> None:
        """End the tracker's run."""


Connect = Callable[[], Tracker]


def tracker_connector(
    name: str, *, folder: Path, settings: Mapping[str, Any]
) -> Connect:
    """Return a function that connects a tracker to a run.

    Raises:
        ConfigError: The tracker's package is not installed.
    """
    make, extra = TRACKERS[name]
    spec = importlib.util.find_spec(name)
    # A spec without an origin is only a folder of that name. W&B leaves a folder `wandb` in the
    # working directory.
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"observe.trackers names {name}, but the package {name} is not installed. Install it "
            f"(pip install 'toque[{extra}]') or remove {name} from observe.trackers. "
            "metrics.jsonl contains the same metrics."
        )
    return partial(make, folder, settings)


class _TensorBoard:
    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text(
            "config", _verbatim(json.dumps(settings, indent=2, default=str))
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_texts(self, step: int, rows: Sequence[Row]) -> None:
        parts = [
            f"**{' '.join(row.prompt.split())}** (cookable {row.cookable}, recipe score "
            f"{row.recipe_score})\n\n{_verbatim(row.text)}"
            for row in rows
        ]
        self._writer.add_text("samples", "\n\n---\n\n".join(parts), step)

    def store_file(self, path: Path) -> None:
        # TensorBoard does not store files, but it can show the path.
        self._writer.add_text("report", str(path))

    def end(self, *, failed: bool) -> None:
        self._writer.close()


class _Wandb:
    """Run on W&B. The library reads WANDB_MODE and its other environment variables itself."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run: Any = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "toque"),
            name=folder.name,
            dir=str(folder),
            config=dict(settings),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # W&B's `step=` must not decrease, but a continued run returns to its checkpoint's step.
        self._run.log({**values, "step": step})

    def log_texts(self, step: int, rows: Sequence[Row]) -> None:
        table = self._wandb.Table(
            columns=list(COLUMNS), data=[list(row) for row in rows]
        )
        self._run.log({"samples": table, "step": step})

    def store_file(self, path: Path) -> None:
        artifact = self._wandb.Artifact(f"{path.stem}-{self._run.id}", type="report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def end(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio:
    """Run on Trackio: local files, no account. The library reads TRACKIO_DIR itself."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._run: Any = self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "toque"),
            name=folder.name,
            config=dict(settings),
            resume="allow",  # a continued run stays one run
            embed=False,
            auto_log_gpu=False,  # the system sampler's records have steps, Trackio's do not
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_texts(self, step: int, rows: Sequence[Row]) -> None:
        data = [row._asdict() for row in rows]
        self._run.log({"samples": self._trackio.Table(data=data)}, step=step)

    def store_file(self, path: Path) -> None:
        self._run.log_artifact(
            path, name=f"{path.stem}-{self._run.name}", type="report"
        )

    def end(self, *, failed: bool) -> None:
        self._run.finish()


TRACKERS: Final[
    Mapping[str, tuple[Callable[[Path, Mapping[str, Any]], Tracker], str]]
] = {
    "trackio": (_Trackio, "track"),
    "tensorboard": (_TensorBoard, "track"),
    "wandb": (_Wandb, "wandb"),
}
"""Class of each tracker and the extra that installs it, by the name of its package."""


def _verbatim(text: str) -> str:
    """Return Markdown that shows `text` unchanged, even if it contains code fences."""
    return "\n".join(f"    {line}" for line in text.splitlines())
