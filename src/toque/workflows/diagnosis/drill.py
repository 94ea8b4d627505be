"""Drill: a crash test with short copies of a run, on the user's machine and disk.

Each copy must end with exactly the weights, optimizer and losses of an undisturbed run. Sessions
are forked from a process that has imported torch, so a restart takes tenths of a second.
"""

from __future__ import annotations

import importlib
import math
import os
import platform
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from toque.config import Resolved, RunConfig, load_config
from toque.config.user_code import refuse_foreign_code
from toque.errors import CheckFailed, CheckpointError, ConfigError, argument
from toque.reporter import SILENT, Reporter
from toque.workflows.diagnosis.drill_faults import SAVES, FaultTests, Outcome
from toque.workflows.diagnosis.run_facts import newest_checkpoint
from toque.workflows.results import Model, model_folder

_COPIES = 10
"""Maximum number of checkpoints in the scratch folder at a time."""
QUIET = (
    "train.keep_last=2",
    "train.early_stopping=null",
    "train.best_by=loss",  # the copies do not generate texts
    "train.strategy=auto",  # each copy is one process
    "checkpoint.upload=null",
    "checkpoint.layout=whole",  # the drill damages its files by name
    "evaluation.max_examples=8",
    "evaluation.generate=0",
    "evaluation.metrics=auto",  # metrics may be untrusted code
    "evaluation.prompts=[]",
    "observe.log_every=1 step",
    "observe.trackers=[]",
    "observe.webhook=null",
    "observe.callbacks=[]",
)
"""Overrides that switch off everything that does not affect the updates."""


@dataclass(frozen=True)
class DrillResult:
    """Outcomes of all faults."""

    run: Path
    outcomes: tuple[Outcome, ...]

    @property
    def failed(self) -> list[str]:
        """Faults with an unexpected outcome."""
        return [
            outcome.fault for outcome in self.outcomes if outcome.verdict == "FAILED"
        ]

    def record(self) -> dict[str, Any]:
        """Return the outcomes as JSON, with the versions and number of cores."""
        cores = None
        if hasattr(os, "sched_getaffinity"):  # only on Linux
            cores = len(os.sched_getaffinity(0))
        versions = {"python": platform.python_version(), "torch": version("torch")}
        return {
            "run": str(self.run),
            "ok": not self.failed,
            "versions": versions,
            "cores": cores,
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
        }

    def raise_if_failed(self) -> None:
        """Raise CheckFailed if a fault had an unexpected outcome."""
        if self.failed:
            raise CheckFailed(
                f"{len(self.failed)} of {len(self.outcomes)} faults had an unexpected outcome: "
                f"{', '.join(self.failed)}. Do not rely on resuming runs on this machine and disk. "
                "Please report the table with your versions."
            )


def drill(
    run: Model,
    *,
    kills: int = 10,
    steps: int = 24,
    seed: int = 1,
    trust_code: bool = False,
    reporter: Reporter = SILENT,
) -> DrillResult:
    """Run the crash test on short copies of a run, on its disk. The run itself is only read.

    The test forks, so call it in a process that has not computed with torch.

    Args:
        run: The run to copy.
        kills: Number of kills with SIGKILL at random moments.
        steps: Number of updates per copy.
        seed: Seed of the random moments and bits.
        trust_code: Import the optimizer and the metrics of tasks that the run's config.yaml names.
        reporter: Receives each fault before it begins.

    Returns:
        The `outcomes` of all faults, and the names of the `failed` ones.

    Raises:
        ConfigError: The folder is not a run, or `steps` or `kills` is too small.
        CheckpointError: The disk has too little space, or the run does not train undisturbed.
    """
    folder = model_folder(run)
    if not (folder / "config.yaml").exists():
        raise ConfigError(
            f"{folder} is not a run folder (it has no config.yaml). Name one, e.g. runs/cookbook."
        )
    if steps < SAVES or kills < 0:
        raise ConfigError(
            f"{argument('steps')} must be at least {SAVES} and {argument('kills')} at least 0, not "
            f"{steps} and {kills}."
        )
    load_copy = partial(
        load_config, folder / "config.yaml", trust_code=trust_code or None
    )
    overrides = _choose_overrides(load_copy, steps, reporter)

    _refuse_small_disk(folder)
    with _open_scratch(folder) as scratch:
        # All sessions are forked from this process, so they share the import.
        importlib.import_module("toque.workflows.training_child")
        tests = FaultTests(
            folder,
            Path(scratch),
            load_copy,
            overrides,
            steps,
            kills,
            random.Random(seed),
            reporter.notice,
        )
        return DrillResult(folder, tuple(tests.outcomes()))


def _choose_overrides(
    load_copy: Callable[[list[str]], Resolved], steps: int, reporter: Reporter
) -> list[str]:
    """Choose the settings that differ in the copies. Refuse a run that imports foreign code."""
    save_every = steps // SAVES
    overrides = [
        *QUIET,
        f"train.save_every={save_every} steps",
        # Not a multiple of the saves, so that most saves and evaluations have different steps.
        f"train.evaluate_every={2 * save_every + 1} steps",
    ]
    settings = load_copy(overrides).config
    refuse_foreign_code(settings.foreign_code)
    if converted := convert_times_to_steps(settings, steps):
        overrides += converted
        reporter.notice(
            "note: learning rates that depend on the clock differ between runs, so the copies "
            f"count one step per second: {', '.join(converted)}"
        )
    return overrides


def _refuse_small_disk(folder: Path) -> None:
    """Raise a CheckpointError if the disk of a run has no space for the copies."""
    newest = newest_checkpoint(folder)
    needed = _COPIES * sum(file.stat().st_size for file in newest.glob("*"))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"The drill needs space for {_COPIES} checkpoints next to {folder}: {needed:,} bytes, "
            f"but only {free:,} are free. Free some disk space first."
        )


def _open_scratch(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder next to a run.

    Raises:
        CheckpointError: The parent of the run cannot be written.
    """
    parent = folder.resolve().parent
    try:
        return tempfile.TemporaryDirectory(
            prefix=f"drill-{folder.name}-", dir=parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise CheckpointError(
            f"{parent} cannot be written: {error.strerror}. The drill needs a folder next to the "
            "run, to test the disk of the run. Change the permissions, or copy the run to another "
            "folder."
        ) from error


def convert_times_to_steps(config: RunConfig, min_steps: int) -> list[str]:
    """Return overrides that replace each second of a learning-rate schedule with a step.

    The run then has at least `min_steps` steps, and every part of its schedule is shorter.
    """
    optim, length = config.optim, config.train.stop_after
    steps: dict[str, float] = {}
    total_steps = length.amount if length.unit == "steps" else math.inf
    if length.seconds is not None:
        total_steps = max(min_steps, round(length.seconds))
        steps["train.stop_after"] = total_steps

    parts = {"optim.warmup": optim.warmup, "optim.cooldown": optim.cooldown}
    if optim.cycles is not None:
        parts["optim.cycles.first"] = optim.cycles.first
    for name, part in parts.items():
        if part is not None and part.seconds is not None:
            steps[name] = max(1, min(round(part.seconds), total_steps - 1))
    return [f"{name}={n:.0f} steps" for name, n in steps.items()]
