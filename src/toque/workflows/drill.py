"""Drill: the crash test of a run on the user's own machine and disk, with short copies of it.

Every fault is done to runs in a scratch folder beside the user's; each must come to the end of a
run that was left alone: the same weights, optimizer and losses, bit for bit.
"""

from __future__ import annotations

import itertools
import os
import platform
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from toque.config import load_config
from toque.errors import CheckFailed, CheckpointError, ConfigError, Interrupted, argument
from toque.reporter import SILENT, Reporter
from toque.workflows.killed_sessions import (
    Facts,
    Session,
    differing,
    events,
    facts_of,
    kill_and_continue,
    newest_bytes,
    newest_checkpoint,
    newest_step,
    preload,
    steps_done,
)
from toque.workflows.results import Model, folder_of

if TYPE_CHECKING:
    from toque.training.observers.user_callbacks import RunState

SAVES: Final = 8
"""Saves of each run of the drill, the last one included."""
_COPIES: Final = 10
"""Checkpoints that lie in the scratch folder at most."""
_SAME: Final = "same bits at the end"
QUIET: Final = (
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
"""Settings of a drill's runs that leave out what changes no update."""


class StopAt:
    """Ends a session after so many updates of the run; the schedules stay those of the whole."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state: RunState) -> str | None:
        """Stop when it is enough."""
        return "stop" if state.step >= self.step else None

    on_train_begin = on_step_end  # a session may have nothing more to do


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    fault: str
    done: str
    expected: str
    happened: str
    verdict: Literal["ok", "FAILED", "skipped"]
    seconds: float = 0.0


@dataclass(frozen=True)
class DrillResult:
    """The outcome of every fault."""

    run: Path
    outcomes: tuple[Outcome, ...]

    @property
    def failed(self) -> list[str]:
        """The faults that came out otherwise than promised."""
        return [outcome.fault for outcome in self.outcomes if outcome.verdict == "FAILED"]

    def record(self) -> dict[str, Any]:
        """One JSON object, with the versions and cores it holds for."""
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
        CheckpointError: no space, or the run does not train undisturbed.
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
                [*QUIET, f"run_dir={copy}", f"train.save_every={save_every} steps",
                 f"train.evaluate_every={2 * save_every + 1} steps"],
            )  # fmt: skip
            stop = StopAt(steps)
            return Session(lambda: train_in_child(settings, log, callbacks=[stop]), log)

        def begin(copy: Path) -> None:
            # How updates are computed was measured by the run; another choice is other bits.
            if (folder / RESOURCES).exists():
                shutil.copy(folder / RESOURCES, copy / RESOURCES)

        chance = random.Random(seed)
        faults = _Faults(start, begin, scratch, steps, save_every, kills, chance, reporter)
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
            f"The drill needs space for about {_COPIES} checkpoints beside {run}: "
            f"{_COPIES * size:,} bytes, and {free:,} are free. Make space first."
        )


@dataclass
class _Faults:
    """The faults, one after another, in `scratch`."""

    start: Callable[[Path], Session]
    """Starts, or continues, the training of a run folder."""
    begin: Callable[[Path], None]
    """Makes an empty folder ready for a run."""
    scratch: Path
    steps: int
    save_every: int
    kills: int
    chance: random.Random
    reporter: Reporter
    _whole: Facts = field(default_factory=dict)
    _life: float = 0.0
    """Seconds of the undisturbed run."""
    _training: float = 0.0
    """Seconds of it from its first event on."""
    _sessions: list[Session] = field(default_factory=list)

    def run(self) -> Iterator[Outcome]:
        """Do everything; what a fault leaves is removed before the next.

        Raises:
            ConfigError: the run is shorter than the drill.
            CheckpointError: the run does not even train undisturbed; its last words are given.
        """
        try:
            self._undisturbed()
            for fault in (
                self._two_runs,
                self._killed,
                self._terminated,
                lambda: self._damaged("a flipped bit", "model.safetensors", self._flip),
                lambda: self._damaged("a file cut short", "optimizer.safetensors", self._cut),
            ):
                began = time.monotonic()
                outcome = fault()
                yield replace(outcome, seconds=round(time.monotonic() - began, 1))
        finally:
            for session in self._sessions:
                session.stop()

    def _started(self, run: Path) -> Session:
        session = self.start(run)
        self._sessions = [s for s in self._sessions if s.code is None] + [session]
        return session

    def _fresh(self, name: str) -> Path:
        run = self.scratch / name
        run.mkdir()
        self.begin(run)
        return run

    def _undisturbed(self) -> None:
        self.reporter.notice("a run that is left alone")
        run, began = self._fresh("whole"), time.monotonic()
        session = self._started(run)
        session.wait_until(lambda: bool(events(run)))
        starting = time.monotonic() - began
        code = session.wait()
        self._life = time.monotonic() - began
        self._training = self._life - starting
        if code != 0:
            raise CheckpointError(
                f"The run does not train here even undisturbed (exit code {code}): "
                f"{_last_words(session)} Mend that first; start the drill in the folder the run "
                "was started in."
            )
        self._whole = facts_of(run)
        if self._whole["last step"] < self.steps:
            raise ConfigError(
                f"The run ends after {self._whole['last step']} steps, and the drill takes "
                f"{self.steps}. Set {argument('steps')} to that, or drill a longer run."
            )
        shutil.rmtree(run)

    def _ends_the_same(self, run: Path, session: Session | None = None) -> list[str]:
        """Continue `run` to its end; what is wrong with it then. The folder is removed."""
        session = session or self._started(run)
        code = session.wait()
        if code != 0:
            return [f"continuing ended with exit code {code}: {_last_words(session)}"]
        wrong = [f"other {name}" for name in differing(self._whole, facts_of(run))]
        shutil.rmtree(run)
        return wrong

    def _two_runs(self) -> Outcome:
        self.reporter.notice("two runs in one folder")
        run, wrong = self._fresh("shared"), []
        first = self._started(run)
        refused = CheckpointError.exit_code
        if first.wait_until(lambda: steps_done(run) >= 1):
            first.send(signal.SIGSTOP)  # or it may be done before the second has begun
            second = self._started(run)
            code = second.wait()
            first.send(signal.SIGCONT)
            if code != refused or "in use" not in second.said():
                wrong.append(f"the second ended with exit code {code}: {_last_words(second)}")
        wrong += self._ends_the_same(run, first)
        return _judged(
            "two runs in one folder",
            "started a second one while the first trained",
            f"second refused (exit code {refused}), first undisturbed, {_SAME}",
            wrong,
            f"second refused, first finished, {_SAME}",
        )

    def _killed(self) -> Outcome:
        def fresh(n: int) -> Path:
            for old in self.scratch.glob("killed-*"):
                shutil.rmtree(old)
            return self._fresh(f"killed-{n}")

        found = kill_and_continue(
            self._started, fresh, self._whole,
            kills=self.kills, span=self._life, training=self._training, chance=self.chance,
            say=lambda n: self.reporter.notice(f"SIGKILL {n} of {self.kills}"),
        )  # fmt: skip
        for old in self.scratch.glob("killed-*"):
            shutil.rmtree(old)
        doing = ", ".join(f"{count} while {name}" for name, count in found.while_.items() if count)
        return _judged(
            "killed (SIGKILL)",
            f"at {found.kills} random moments ({doing}), continued each time",
            _SAME,
            found.wrong,
            f"{found.finished} finished {'run' if found.finished == 1 else 'runs'}: {_SAME}",
        )

    def _terminated(self) -> Outcome:
        """SIGTERM; leaves a copy of the interrupted run for the faults that damage it."""
        self.reporter.notice("SIGTERM")
        run, wrong = self._fresh("stopped"), []
        after = self.chance.randrange(2 * self.save_every + 1, 3 * self.save_every + 1)
        session = self._started(run)
        if session.wait_until(lambda: steps_done(run) >= after):
            session.send(signal.SIGTERM)
        code = session.wait()
        saved, reached = newest_step(run), steps_done(run)
        if code != Interrupted.exit_code:
            wrong.append(f"it ended with exit code {code}")
        elif saved != reached:
            wrong.append(f"step {reached} was reached and {saved} saved")
        else:
            shutil.copytree(run, self.scratch / "interrupted", symlinks=True)
        wrong += self._ends_the_same(run)
        return _judged(
            "told to stop (SIGTERM)",
            f"after step {after}, continued",
            f"step finished and saved, exit code {Interrupted.exit_code}, {_SAME}",
            wrong,
            f"saved at step {saved}, exit code {code}, {_SAME}",
        )

    def _flip(self, path: Path) -> str:
        data = bytearray(path.read_bytes())
        bit = self.chance.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        return f"flipped bit {bit:,} of {path.name}"

    def _cut(self, path: Path) -> str:
        size = self.chance.randrange(path.stat().st_size)
        with path.open("r+b") as file:
            file.truncate(size)
        return f"cut {path.name} at {size:,} bytes"

    def _damaged(self, fault: str, name: str, damage: Callable[[Path], str]) -> Outcome:
        """The newest checkpoint of the interrupted run is damaged, and the run continued."""
        self.reporter.notice(fault)
        expected = f"the damage named, the checkpoint before it used, {_SAME}"
        mould, run = self.scratch / "interrupted", self.scratch / "damaged"
        if not mould.exists():
            return Outcome(fault, "nothing", expected, "no run was interrupted whole", "skipped")
        shutil.copytree(mould, run, symlinks=True)
        newest = newest_checkpoint(run)
        done = f"{damage(newest / name)} of the newest checkpoint ({newest.name})"
        session = self._started(run)
        wrong = self._ends_the_same(run, session)
        if f"skipped {newest.name}" not in "".join(session.said().split("\n")):
            wrong.append("the damaged checkpoint was not named")
        return _judged(fault, done, expected, wrong, f"named, fell back, {_SAME}")


def _judged(fault: str, done: str, expected: str, wrong: list[str], said: str) -> Outcome:
    happened = "; ".join(dict.fromkeys(wrong)) if wrong else said
    return Outcome(fault, done, expected, happened, "FAILED" if wrong else "ok")


def _last_words(session: Session) -> str:
    return " ".join(session.said().strip().splitlines()[-3:])
