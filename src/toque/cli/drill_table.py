"""`toque drill`: the crash test of a run on the user's own machine and disk."""

from __future__ import annotations

import itertools
import json
import os
import platform
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from toque.config import Resolved, load_config
from toque.errors import CheckFailed, CheckpointError, ConfigError, ToqueError
from toque.workflows.drill.crash_test import Drill, Outcome
from toque.workflows.drill.sessions import Session, newest_step, preload

if TYPE_CHECKING:
    from toque.training.observers.user_callbacks import RunState

SAVES: Final = 8
"""Of each run of the drill, the last one included."""
_COPIES: Final = 10
"""Checkpoints that lie in the scratch folder at most."""
_QUIET: Final = (
    "train.keep_last=2",
    "train.early_stopping=null",
    "checkpoint.upload=null",
    "evaluation.max_examples=8",
    "evaluation.generate=0",
    "evaluation.prompts=[]",
    "observe.log_every=1 step",
    "observe.trackers=[]",
    "observe.webhook=null",
    "observe.callbacks=[]",
)
"""What the runs of a drill do without: nothing of it changes an update."""


class StopAt:
    """Ends a session after so many updates of the run; the schedules stay those of the whole."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_begin(self, state: RunState) -> str | None:
        """Stop a session that has nothing more to do."""
        return "stop" if state.step >= self.step else None

    def on_step_end(self, state: RunState) -> str | None:
        """Stop when it is enough."""
        return "stop" if state.step >= self.step else None


def run_drill(path: Path, *, kills: int, steps: int, seed: int, as_json: bool) -> None:
    """Do everything to copies of the run, print the table, remove the copies.

    Raises:
        ConfigError: no run there, or numbers that make no drill.
        CheckpointError: no room, or the run does not train undisturbed.
        CheckFailed: something came out otherwise than promised.
    """
    if not (path / "config.yaml").exists():
        raise ConfigError(f"{path} is no run folder (config.yaml). Name one, e.g. runs/cookbook.")
    if steps < SAVES or kills < 0:
        raise ConfigError(
            f"--steps is {steps} and --kills {kills}. At least {SAVES} steps are needed, so that "
            "there is something to save in between, and kills cannot be negative."
        )
    save_every = steps // SAVES
    console = Console(stderr=True)

    def say(text: str, left: float | None) -> None:
        about = "" if left is None else f"; about {_clock(left)} left"
        console.print(f"{text}{about}", highlight=False, soft_wrap=True)

    _refuse_small_disk(path)
    preload()
    from toque.training.autotune.cache import RESOURCES  # with torch, which refusing does without

    with _scratch_beside(path) as scratch:
        logs, numbers = scratch / "logs", itertools.count()
        logs.mkdir()

        def start(run: Path) -> Session:
            settings = load_config(
                str(path / "config.yaml"),
                [*_QUIET, f"run_dir={run}", f"train.save_every={save_every} steps",
                 f"train.evaluate_every={2 * save_every + 1} steps"],
            )  # fmt: skip
            return Session(lambda: _train(settings, steps), logs / f"{next(numbers)}.log")

        def begin(run: Path) -> None:
            # How updates are computed was measured by the run; another choice is other bits.
            if (path / RESOURCES).exists():
                shutil.copy(path / RESOURCES, run / RESOURCES)

        drill = Drill(start, begin, scratch, steps, save_every, kills, random.Random(seed), say)
        outcomes = drill.run()
    _tell(path, outcomes, as_json=as_json)
    failed = [outcome.fault for outcome in outcomes if outcome.verdict == "FAILED"]
    if failed:
        raise CheckFailed(
            f"{len(failed)} of {len(outcomes)} faults came out otherwise than promised: "
            f"{', '.join(failed)}. Do not rely on continuing runs on this machine and disk; "
            "please report the table with your versions."
        )


def _train(settings: Resolved, steps: int) -> int:
    from toque.workflows.train import run_training

    try:
        outcome = run_training(settings, own=[StopAt(steps)])
    except ToqueError as error:
        print(f"toque: {error}", file=sys.stderr)
        return error.exit_code
    return 75 if outcome.interrupted else 0


@contextmanager
def _scratch_beside(run: Path) -> Iterator[Path]:
    """A folder on the disk of the run, which is the one under test; removed at the end."""
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f"drill-{run.name}-", dir=run.resolve().parent))
    except OSError as error:
        raise CheckpointError(
            f"{run.resolve().parent} cannot be written: {error.strerror}. The drill works in a "
            "folder beside the run, so that its disk is the one that is tested; give yourself the "
            "right to write there, or copy the run elsewhere."
        ) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _refuse_small_disk(run: Path) -> None:
    newest = run / "checkpoints" / f"step-{newest_step(run):08d}"
    size = sum(file.stat().st_size for file in newest.glob("*"))
    free = shutil.disk_usage(run).free
    if free < _COPIES * size:
        raise CheckpointError(
            f"The drill needs room for about {_COPIES} checkpoints beside {run}: "
            f"{_COPIES * size:,} bytes, and {free:,} are free. Make room first."
        )


def _tell(run: Path, outcomes: list[Outcome], *, as_json: bool) -> None:
    if as_json:
        found = {
            "run": str(run),
            "ok": all(o.verdict != "FAILED" for o in outcomes),
            "versions": {"python": platform.python_version(), "torch": version("torch")},
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "outcomes": [asdict(o) for o in outcomes],
        }
        print(json.dumps(found, indent=1))
        return
    table = Table("fault", "what was done", "expected", "what happened", "", show_lines=True)
    for o in outcomes:
        table.add_row(o.fault, o.done, o.expected, o.happened, o.verdict)
    Console().print(table, highlight=False)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
