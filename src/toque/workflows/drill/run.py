"""Drill: the crash test of a run on the user's own machine and disk, with copies of it."""

from __future__ import annotations

import itertools
import os
import platform
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from toque.config import load_config
from toque.errors import CheckFailed, CheckpointError, ConfigError, argument
from toque.reporter import SILENT, Reporter
from toque.workflows.drill.crash_test import Drill, Outcome
from toque.workflows.drill.sessions import Session, newest_bytes, preload
from toque.workflows.results import Model, folder_of

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
    "checkpoint.layout=whole",  # its files are harmed by their names
    "evaluation.max_examples=8",
    "evaluation.generate=0",
    "evaluation.metrics=auto",  # the run may be anyone's, and its metrics code
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

    def on_step_end(self, state: RunState) -> str | None:
        """Stop when it is enough."""
        return "stop" if state.step >= self.step else None

    on_train_begin = on_step_end  # a session may have nothing more to do


@dataclass(frozen=True)
class DrillResult:
    """What came of every fault."""

    run: Path
    outcomes: tuple[Outcome, ...]

    @property
    def failed(self) -> list[str]:
        """The faults that came out otherwise than promised."""
        return [outcome.fault for outcome in self.outcomes if outcome.verdict == "FAILED"]

    def record(self) -> dict[str, Any]:
        """As one JSON object, with the versions and cores it holds for."""
        return {
            "run": str(self.run),
            "ok": not self.failed,
            "versions": {"python": platform.python_version(), "torch": version("torch")},
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "outcomes": [asdict(o) for o in self.outcomes],
        }

    def raise_if_failed(self) -> None:
        """Refuse to go on with a run that does not survive.

        Raises:
            CheckFailed: something came out otherwise than promised.
        """
        if self.failed:
            raise CheckFailed(
                f"{len(self.failed)} of {len(self.outcomes)} faults came out otherwise than "
                f"promised: {', '.join(self.failed)}. Do not rely on continuing runs on this "
                "machine and disk; please report the table with your versions."
            )


def drill(
    run: Model, *, kills: int = 10, steps: int = 24, seed: int = 1, reporter: Reporter = SILENT
) -> DrillResult:
    """Do the crash test to short copies of a run, on its disk; the run itself is only read.

    Sessions are forked: call this in a process that has not computed with torch yet.

    Args:
        run: what is copied.
        kills: times a copy is killed with SIGKILL at a random moment.
        steps: updates of each copy.
        seed: where random moments and bits come from.
        reporter: hears what is being done.

    Returns:
        `outcomes` of every fault, and the names of those that `failed`.

    Raises:
        ConfigError: no run there, or numbers that make no drill.
        CheckpointError: no room, or the run does not train undisturbed.
    """
    folder = folder_of(run)
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"{folder} is no run folder (config.yaml). Name one, e.g. runs/cookbook.")
    if steps < SAVES or kills < 0:
        raise ConfigError(
            f"{argument('steps')} is {steps} and {argument('kills')} {kills}. At least {SAVES} "
            "steps are needed, so that there is something to save in between, and kills cannot be "
            "negative."
        )
    save_every = steps // SAVES

    def say(text: str, left: float | None) -> None:
        about = "" if left is None else f"; about {_clock(left)} left"
        reporter.notice(f"{text}{about}")

    _refuse_small_disk(folder)
    preload()
    # With torch, which refusing does without.
    from toque.training.autotune.resources import RESOURCES
    from toque.workflows.train import train_in_child

    with _scratch_beside(folder) as scratch:
        logs, numbers = scratch / "logs", itertools.count()
        logs.mkdir()

        def start(copy: Path) -> Session:
            log = logs / f"{next(numbers)}.log"
            settings = load_config(
                folder / "config.yaml",
                [*_QUIET, f"run_dir={copy}", f"train.save_every={save_every} steps",
                 f"train.evaluate_every={2 * save_every + 1} steps"],
            )  # fmt: skip
            stop = StopAt(steps)
            return Session(lambda: train_in_child(settings, log, callbacks=[stop]), log)

        def begin(copy: Path) -> None:
            # How updates are computed was measured by the run; another choice is other bits.
            if (folder / RESOURCES).exists():
                shutil.copy(folder / RESOURCES, copy / RESOURCES)

        faults = Drill(start, begin, scratch, steps, save_every, kills, random.Random(seed), say)
        return DrillResult(folder, tuple(faults.run()))


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
    size = newest_bytes(run)
    free = shutil.disk_usage(run).free
    if free < _COPIES * size:
        raise CheckpointError(
            f"The drill needs room for about {_COPIES} checkpoints beside {run}: "
            f"{_COPIES * size:,} bytes, and {free:,} are free. Make room first."
        )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
