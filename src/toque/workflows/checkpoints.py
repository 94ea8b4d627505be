"""List of a run's checkpoints and best models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from toque.errors import CheckpointError
from toque.reporter import SILENT, Reporter, clock_text, size_text
from toque.reports.page import Grid, aligned
from toque.runs.history import METRICS, parse_event
from toque.runs.places import (
    BucketPlace,
    FolderPlace,
    Place,
    is_in_a_bucket,
    read_small_file,
)
from toque.runs.run_record import CONFIG, END, Tail
from toque.storage.bucket import BucketUse, RunBucketError, open_bucket
from toque.storage.json_files import decode_json
from toque.storage.no_follow import refuse_links
from toque.workflows.results import Model, TrainedRun, existing_folder
from toque.workflows.saved_steps import KINDS, is_step

if TYPE_CHECKING:
    from toque.training.callbacks import Goal
    from toque.training.checkpoint.saved import Manifest

_LISTED: Final = BucketUse(
    "the address of the run",
    "list and read",
    "Nothing there was changed.",
    RunBucketError,
)


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint or a best model."""

    place: str
    """Path in the run, e.g. best/step-00000200."""
    step: int
    seconds: float
    """Training time before the save."""
    metrics: Mapping[str, float]
    """Scores of its evaluation; empty without one."""
    bytes: int
    reason: str
    """Reason why the run keeps it."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints and best models of a run, the oldest first."""

    address: str
    best_by: str
    """Metric that selects the best models."""
    steps: Sequence[SavedStep]
    damaged: Sequence[str]
    """Messages about checkpoints that cannot be read."""

    def record(self) -> dict[str, Any]:
        """Return the list as JSON."""
        rows = [vars(saved) | {"metrics": dict(saved.metrics)} for saved in self.steps]
        return {
            "run": self.address,
            "best_by": self.best_by,
            "checkpoints": rows,
            "damaged": [*self.damaged],
        }

    def __str__(self) -> str:
        """Return the list as a table."""
        if not self.steps:
            return "\n".join([f"{self.address} has no checkpoint yet.", *self.damaged])
        metrics = [*dict.fromkeys(("loss", self.best_by))]
        heads = (
            "",
            "trained for",
            *(f"held-out {name}" for name in metrics),
            "size",
            "kept as",
        )
        rows = []
        for saved in self.steps:
            scores = [saved.metrics.get(name) for name in metrics]
            rows.append(
                (
                    saved.place,
                    clock_text(saved.seconds),
                    *("-" if score is None else f"{score:.4f}" for score in scores),
                    size_text(saved.bytes),
                    saved.reason,
                )
            )
        return "\n".join([*aligned(Grid(heads, rows)), *self.damaged])


def checkpoints(run: Model, *, reporter: Reporter = SILENT) -> Checkpoints:
    """List the checkpoints and best models of a run, with the reason why the run keeps each.

    Args:
        run: A run folder, or its address at gs:// or s3://. The run may be training.
        reporter: Receives the progress.

    Raises:
        ConfigError: The folder does not exist.
        CheckpointError: The folder contains a link or is not a run, or the bucket cannot be read.
    """
    if not isinstance(run, TrainedRun) and is_in_a_bucket(str(run)):
        bucket = open_bucket(str(run).rstrip("/"), _LISTED)
        with reporter.working(f"listing {bucket.address}"):
            return _list_steps(BucketPlace(bucket), bucket.names())
    folder = existing_folder(run)
    refuse_links(folder, CheckpointError)
    paths = (path for kind in KINDS for path in folder.glob(f"{kind}/*/*"))
    return _list_steps(
        FolderPlace(folder), [path.relative_to(folder).as_posix() for path in paths]
    )


def _list_steps(place: Place, names: Sequence[str]) -> Checkpoints:
    from toque.evaluation.evaluator import goal_of  # loads torch
    from toque.training.checkpoint.saved import MANIFEST, parse_manifest

    split_names = (name.split("/") for name in names)
    folders = {"/".join(parts[:2]) for parts in split_names if parts[0] in KINDS}
    if not folders and not any(place.look(name) for name in (METRICS, CONFIG)):
        raise CheckpointError(
            f"{place.address} is not a run: it has no checkpoint, no {METRICS} and no {CONFIG}. "
            "Name a run such as runs/my."
        )
    manifests: dict[str, Manifest] = {}
    damaged: list[str] = []
    for folder in sorted(name for name in folders if is_step(name.partition("/")[2])):
        path = f"{place.address}/{folder}"
        if (text := read_small_file(place, f"{folder}/{MANIFEST}")) is None:
            damaged.append(
                f"{path} has no {MANIFEST}. Its save is unfinished, or it was just removed."
            )
            continue
        try:
            manifests[folder] = parse_manifest(text, f"{path}/{MANIFEST}")
        except CheckpointError as error:
            damaged.append(str(error))

    newest = max(manifests.values(), key=lambda manifest: manifest.step, default=None)
    train = {} if newest is None else newest.settings.get("train", {})
    goal = goal_of(str(train.get("best_by", "loss")))
    evaluated = _evaluations(place)
    reasons = _reasons(manifests, goal, _model_step(place))
    steps = [
        SavedStep(
            folder,
            manifest.step,
            float(manifest.progress.get("seconds", 0.0)),
            manifest.metrics or evaluated.get(manifest.step, {}),
            sum(entry.bytes for entry in manifest.files),
            reasons[folder],
        )
        for folder, manifest in manifests.items()
    ]
    return Checkpoints(place.address, goal.metric, steps, damaged)


def _evaluations(place: Place) -> dict[int, dict[str, float]]:
    """Read the scores of all evaluations of a run, by step."""
    events = Tail(place, METRICS)
    scores: dict[int, dict[str, float]] = {}
    while (lines := events.read_lines()) or events.behind:
        for event in filter(None, map(parse_event, lines)):
            if event["event"] == "evaluation":
                scores[event["step"]] = {
                    **event.get("texts", {}),
                    **event.get("metrics", {}),
                }
    return scores


def _model_step(place: Place) -> int | None:
    """Read the step of the finished model's weights. None: the run is not finished."""
    try:
        end = decode_json(read_small_file(place, END) or b"{}", dict[str, Any])
    except msgspec.DecodeError:
        return None
    step = end.get("model_step")
    return step if isinstance(step, int) else None


def _reasons(
    manifests: Mapping[str, Manifest], goal: Goal, model_step: int | None
) -> dict[str, str]:
    """Return the reason why the run keeps each checkpoint and best model, by folder."""
    by_kind = {
        kind: [folder for folder in manifests if folder.startswith(f"{kind}/")]
        for kind in KINDS
    }
    best = sorted(
        by_kind["best"], key=lambda folder: goal.rank(manifests[folder].metrics)
    )
    reasons = {folder: f"{goal}, number {n}" for n, folder in enumerate(best, start=1)}
    newest_first = by_kind["checkpoints"][::-1]
    reasons |= {
        folder: f"one of the {len(newest_first)} newest" for folder in newest_first
    }
    if newest_first:
        reasons[newest_first[0]] = "newest, from which training continues"
    for folder in best or newest_first[:1]:
        if manifests[folder].step == model_step:
            reasons[folder] += "; the finished model"
    return reasons
