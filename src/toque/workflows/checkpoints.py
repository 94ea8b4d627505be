"""List of a run's checkpoints and best models, in a folder or a bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from toque.errors import CheckpointError
from toque.reporter import SILENT, Reporter, clock_text, size_text
from toque.reports.page import Grid, aligned
from toque.runs.history import METRICS, event_in
from toque.runs.places import BucketPlace, FolderPlace, Place, is_in_a_bucket, read_small_file
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
    "the address of the run", "list and read", "Nothing there was changed.", RunBucketError
)


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint or a best model."""

    place: str
    """Place below the run, e.g. best/step-00000200."""
    step: int
    seconds: float
    """Training time until it was saved."""
    metrics: Mapping[str, float]
    """Scores of its evaluation; empty where it was saved without one."""
    bytes: int
    reason: str
    """Reason why the run keeps it."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints and best models of a run, the oldest first."""

    address: str
    best_by: str
    """Metric that the best models are chosen by."""
    steps: Sequence[SavedStep]
    damaged: Sequence[str]
    """Sentences about those that cannot be read."""

    def record(self) -> dict[str, Any]:
        """The list as JSON."""
        rows = [vars(one) | {"metrics": dict(one.metrics)} for one in self.steps]
        return {
            "run": self.address,
            "best_by": self.best_by,
            "checkpoints": rows,
            "damaged": [*self.damaged],
        }

    def __str__(self) -> str:
        """The table for people."""
        metrics = [*dict.fromkeys(("loss", self.best_by))]
        heads = ("", "trained for", *(f"held-out {name}" for name in metrics), "size", "kept as")
        rows = [
            (
                one.place,
                clock_text(one.seconds),
                *(f"{one.metrics[name]:.4f}" if name in one.metrics else "-" for name in metrics),
                size_text(one.bytes),
                one.reason,
            )
            for one in self.steps
        ]
        if not rows:
            return "\n".join([f"{self.address} has no checkpoint yet.", *self.damaged])
        return "\n".join([*aligned(Grid(heads, rows)), *self.damaged])


def checkpoints(run: Model, *, reporter: Reporter = SILENT) -> Checkpoints:
    """List the checkpoints and best models of a run, with the reason why each is kept.

    Args:
        run: a run's folder, or its address at gs:// or s3://; it may be training.
        reporter: hears of progress.

    Raises:
        ConfigError: no such folder.
        CheckpointError: the folder holds a link or is not a run, or the bucket cannot be read.
    """
    if not isinstance(run, TrainedRun) and is_in_a_bucket(str(run)):
        bucket = open_bucket(str(run).rstrip("/"), _LISTED)
        with reporter.working(f"listing {bucket.address}"):
            return _listed(BucketPlace(bucket), bucket.names())
    folder = existing_folder(run)
    refuse_links(folder, CheckpointError)
    paths = (path for kind in KINDS for path in folder.glob(f"{kind}/*/*"))
    return _listed(FolderPlace(folder), [path.relative_to(folder).as_posix() for path in paths])


def _listed(place: Place, names: Sequence[str]) -> Checkpoints:
    from toque.evaluation.evaluator import goal_of  # with torch
    from toque.training.checkpoint.saved import MANIFEST, parse_manifest

    folders = {"/".join(parts[:2]) for parts in (n.split("/") for n in names) if parts[0] in KINDS}
    if not folders and not any(place.look(name) for name in (METRICS, CONFIG)):
        raise CheckpointError(
            f"{place.address} is not a run: it has no checkpoint, no {METRICS} and no {CONFIG}. "
            "Name a run such as runs/mine."
        )
    manifests: dict[str, Manifest] = {}
    damaged: list[str] = []
    for folder in sorted(one for one in folders if is_step(one.partition("/")[2])):
        path = f"{place.address}/{folder}"
        if (text := read_small_file(place, f"{folder}/{MANIFEST}")) is None:
            damaged.append(f"{path} has no {MANIFEST}: it was not finished, or was just removed.")
            continue
        try:
            manifests[folder] = parse_manifest(text, f"{path}/{MANIFEST}")
        except CheckpointError as error:
            damaged.append(str(error))

    newest = max(manifests.values(), key=lambda one: one.step, default=None)
    train = {} if newest is None else newest.settings.get("train", {})
    goal = goal_of(str(train.get("best_by", "loss")))
    evaluated = _evaluations(place)
    reasons = _reasons(manifests, goal, _model_step(place))
    steps = [
        SavedStep(
            folder,
            one.step,
            float(one.progress.get("seconds", 0.0)),
            one.metrics or evaluated.get(one.step, {}),
            sum(entry.bytes for entry in one.files),
            reasons[folder],
        )
        for folder, one in manifests.items()
    ]
    return Checkpoints(place.address, goal.metric, steps, damaged)


def _evaluations(place: Place) -> dict[int, dict[str, float]]:
    """Scores of the evaluations of a run, those of its texts included, by their step."""
    events, scores = Tail(place, METRICS), dict[int, dict[str, float]]()
    while (lines := events.lines()) or events.behind:
        for event in filter(None, map(event_in, lines)):
            if event["event"] == "evaluation":
                scores[event["step"]] = {**event.get("texts", {}), **event.get("metrics", {})}
    return scores


def _model_step(place: Place) -> int | None:
    """The step of the weights that the finished model has; None before the end of a run."""
    try:
        ended = decode_json(read_small_file(place, END) or b"{}", dict[str, Any])
    except msgspec.DecodeError:
        return None
    step = ended.get("model_step")
    return step if isinstance(step, int) else None


def _reasons(
    manifests: Mapping[str, Manifest], goal: Goal, model_step: int | None
) -> dict[str, str]:
    """The reason why a run keeps each checkpoint and best model, by its folder."""
    by_kind = {
        kind: [folder for folder in manifests if folder.startswith(f"{kind}/")] for kind in KINDS
    }
    best = sorted(by_kind["best"], key=lambda one: goal.rank(manifests[one].metrics))
    reasons = {folder: f"{goal}, number {n}" for n, folder in enumerate(best, start=1)}
    newest_first = by_kind["checkpoints"][::-1]
    reasons |= {folder: f"one of the {len(newest_first)} newest" for folder in newest_first}
    if newest_first:
        reasons[newest_first[0]] = "newest, from which training continues"
    for folder in best or newest_first[:1]:
        if manifests[folder].step == model_step:
            reasons[folder] += "; the finished model"
    return reasons
