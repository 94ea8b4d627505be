"""List of a run's checkpoints and best models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from toque.errors import CheckpointError
from toque.reporter import SILENT, Reporter, clock_text, size_text
from toque.reports.page import Grid, format_columns
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
from toque.workflows.results import Model, TrainedRun, resolve_model
from toque.workflows.saved_steps import KINDS, is_step

if TYPE_CHECKING:
    from toque.training.callbacks import Goal
    from toque.training.checkpoint.saved import Manifest

_LISTED = BucketUse(
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
    """Training time before the save, in seconds."""
    metrics: Mapping[str, float]
    """Scores of the checkpoint's evaluation; empty without one."""
    bytes: int
    reason: str
    """Reason why the run retains the checkpoint."""


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
        score_headings = [f"held-out {name}" for name in metrics]
        headings = ("", "trained for", *score_headings, "size", "kept as")
        rows = []
        for saved in self.steps:
            scores = [saved.metrics.get(name) for name in metrics]
            cells = ["-" if score is None else f"{score:.4f}" for score in scores]
            time = clock_text(saved.seconds)
            size = size_text(saved.bytes)
            rows.append((saved.place, time, *cells, size, saved.reason))
        return "\n".join([*format_columns(Grid(headings, rows)), *self.damaged])


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
    folder = resolve_model(run)
    refuse_links(folder, CheckpointError)
    paths = (path for kind in KINDS for path in folder.glob(f"{kind}/*/*"))
    names = [path.relative_to(folder).as_posix() for path in paths]
    return _list_steps(FolderPlace(folder), names)


def _list_steps(place: Place, names: Sequence[str]) -> Checkpoints:
    """List the checkpoints and best models of a run among the `names` of its files."""
    from toque.evaluation.evaluator import goal_of  # loads torch

    split_names = (name.split("/") for name in names)
    folders = {"/".join(parts[:2]) for parts in split_names if parts[0] in KINDS}
    if not folders and not any(place.look(name) for name in (METRICS, CONFIG)):
        raise CheckpointError(
            f"{place.address} is not a run: it has no checkpoint, no {METRICS} and no {CONFIG}. "
            "Name a run such as runs/my."
        )
    step_folders = [name for name in folders if is_step(name.partition("/")[2])]
    manifests, damaged = _read_manifests(place, sorted(step_folders))

    newest = max(manifests.values(), key=lambda manifest: manifest.step, default=None)
    train = {} if newest is None else newest.settings.get("train", {})
    goal = goal_of(str(train.get("best_by", "loss")))
    scores = _read_evaluations(place)
    reasons = _explain_retention(manifests, goal, _read_model_step(place))
    steps = [
        SavedStep(
            folder,
            manifest.step,
            float(manifest.progress.get("seconds", 0.0)),
            manifest.metrics or scores.get(manifest.step, {}),
            sum(entry.bytes for entry in manifest.files),
            reasons[folder],
        )
        for folder, manifest in manifests.items()
    ]
    return Checkpoints(place.address, goal.metric, steps, damaged)


def _read_manifests(
    place: Place, folders: Sequence[str]
) -> tuple[dict[str, Manifest], list[str]]:
    """Read the manifests by folder. Also return messages about folders without a valid one."""
    from toque.training.checkpoint.saved import MANIFEST, parse_manifest  # loads torch

    manifests: dict[str, Manifest] = {}
    damaged: list[str] = []
    for folder in folders:
        path = f"{place.address}/{folder}"
        text = read_small_file(place, f"{folder}/{MANIFEST}")
        if text is None:
            damaged.append(
                f"{path} has no {MANIFEST}. Its save is unfinished, or it was just removed."
            )
            continue
        try:
            manifests[folder] = parse_manifest(text, f"{path}/{MANIFEST}")
        except CheckpointError as error:
            damaged.append(str(error))
    return manifests, damaged


def _read_evaluations(place: Place) -> dict[int, dict[str, float]]:
    """Read the scores of all evaluations of a run, by step."""
    events = Tail(place, METRICS)
    scores: dict[int, dict[str, float]] = {}
    while (lines := events.read_lines()) or events.behind:
        for event in filter(None, map(parse_event, lines)):
            if event["event"] == "evaluation":
                texts = event.get("texts", {})
                metrics = event.get("metrics", {})
                scores[event["step"]] = {**texts, **metrics}
    return scores


def _read_model_step(place: Place) -> int | None:
    """Read the step of the finished model's weights. Return None if the run is not finished."""
    try:
        end = decode_json(read_small_file(place, END) or b"{}", dict[str, Any])
    except msgspec.DecodeError:
        return None
    step = end.get("model_step")
    return step if isinstance(step, int) else None


def _explain_retention(
    manifests: Mapping[str, Manifest], goal: Goal, model_step: int | None
) -> dict[str, str]:
    """Return the reason why the run keeps each checkpoint and best model, by folder.

    The folders of `manifests` are sorted by step.
    """
    newest_first = [name for name in manifests if name.startswith("checkpoints/")][::-1]
    best_first = sorted(
        (name for name in manifests if name.startswith("best/")),
        key=lambda name: goal.rank(manifests[name].metrics),
    )
    reasons = {
        name: f"{goal}, number {n}" for n, name in enumerate(best_first, start=1)
    }
    for name in newest_first:
        reasons[name] = f"one of the {len(newest_first)} newest"
    if newest_first:
        reasons[newest_first[0]] = "newest, from which training continues"

    # Without best models, the finished model has the newest weights.
    for name in best_first or newest_first[:1]:
        if manifests[name].step == model_step:
            reasons[name] += "; the finished model"
    return reasons
