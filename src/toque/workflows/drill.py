"""Drill: the crash test of a run on the user's own machine and disk, with short copies of it.

Every fault is done to runs in a scratch folder beside the user's; each must come to the end of a
run that was left alone: the same weights, optimizer and losses, bit for bit.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
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
    newest_checkpoint,
    newest_step,
    preload,
    steps_done,
)
from toque.workflows.results import Model, folder_of

if TYPE_CHECKING:
    from toque.training.observers.watchers import RunState

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
    needed = _COPIES * sum(file.stat().st_size for file in newest_checkpoint(folder).glob("*"))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"The drill needs space for about {_COPIES} checkpoints beside {folder}: {needed:,} "
            f"bytes, and {free:,} are free. Make space first."
        )
    preload()
    with _scratch_beside(folder) as scratch:
        faults = _Faults(folder, Path(scratch), steps, kills, random.Random(seed), reporter.notice)
        return DrillResult(folder, tuple(faults.run()))


def _scratch_beside(run: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder on the disk of the run, which is the one under test; removed at the end."""
    place = run.resolve().parent
    try:
        return tempfile.TemporaryDirectory(
            prefix=f"drill-{run.name}-", dir=place, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise CheckpointError(
            f"{place} cannot be written: {error.strerror}. The drill works in a folder beside the "
            "run, so that its disk is the one that is tested; give yourself the right to write "
            "there, or copy the run elsewhere."
        ) from error


class _Faults:
    """The faults, one after another, done to copies of `model` in `scratch`."""

    def __init__(
        self,
        model: Path,
        scratch: Path,
        steps: int,
        kills: int,
        chance: random.Random,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.scratch, self.steps, self.kills = model, scratch, steps, kills
        self.chance, self.say = chance, say
        self.save_every = steps // SAVES
        self.sessions: list[Session] = []
        self.whole: Facts = {}
        """Facts of the undisturbed run."""

    def run(self) -> Iterator[Outcome]:
        """Do everything; what a fault leaves is removed before the next.

        Raises:
            ConfigError: the run is shorter than the drill.
            CheckpointError: the run does not even train undisturbed; its last words are given.
        """
        try:
            life, training = self._undisturbed()
            for fault in (
                self._two_runs,
                lambda: self._killed(life, training),
                self._terminated,
                lambda: self._damaged("a flipped bit", "model.safetensors", self._flip),
                lambda: self._damaged("a file cut short", "optimizer.safetensors", self._cut),
            ):
                began = time.monotonic()
                outcome = fault()
                yield replace(outcome, seconds=round(time.monotonic() - began, 1))
        finally:
            for session in self.sessions:
                session.send(signal.SIGKILL)
                session.wait()

    def _started(self, run: Path) -> Session:
        """A session that begins or continues the training of a run folder."""
        from toque.workflows.train import train_in_child  # with torch, which refusing does without

        log, stop = self.scratch / f"{len(self.sessions)}.log", StopAt(self.steps)
        settings = load_config(
            self.model / "config.yaml",
            [*QUIET, f"run_dir={run}", f"train.save_every={self.save_every} steps",
             f"train.evaluate_every={2 * self.save_every + 1} steps"],
        )  # fmt: skip
        session = Session(lambda: train_in_child(settings, log, callbacks=[stop]), log)
        self.sessions.append(session)
        return session

    def _fresh(self, name: str) -> Path:
        from toque.training.resources import RESOURCES

        run = self.scratch / name
        run.mkdir()
        # How updates are computed was measured by the run; another choice is other bits.
        if (self.model / RESOURCES).exists():
            shutil.copy(self.model / RESOURCES, run / RESOURCES)
        return run

    def _undisturbed(self) -> tuple[float, float]:
        """Train a copy and note what it comes to; its seconds, all and from its first event on."""
        self.say("a run that is left alone")
        run, began = self._fresh("whole"), time.monotonic()
        session = self._started(run)
        session.wait_until(lambda: bool(events(run)))
        reported = time.monotonic()
        code = session.wait()
        ended = time.monotonic()
        if code != 0:
            raise CheckpointError(
                f"The run does not train here even undisturbed (exit code {code}): "
                f"{_last_words(session)} Mend that first; start the drill in the folder the run "
                "was started in."
            )
        self.whole = facts_of(run)
        if self.whole["last step"] < self.steps:
            raise ConfigError(
                f"The run ends after {self.whole['last step']} steps, and the drill takes "
                f"{self.steps}. Set {argument('steps')} to that, or drill a longer run."
            )
        shutil.rmtree(run)
        return ended - began, ended - reported

    def _ends_the_same(self, run: Path, session: Session) -> list[str]:
        """Wait for the end of a run; what is wrong with it then. The folder is removed."""
        code = session.wait()
        if code != 0:
            return [f"continuing ended with exit code {code}: {_last_words(session)}"]
        wrong = [f"other {name}" for name in differing(self.whole, facts_of(run))]
        shutil.rmtree(run)
        return wrong

    def _two_runs(self) -> Outcome:
        fault, refused = "two runs in one folder", CheckpointError.exit_code
        self.say(fault)
        run, wrong = self._fresh("shared"), []
        first = self._started(run)
        if first.wait_until(lambda: steps_done(run) >= 1):
            first.send(signal.SIGSTOP)  # or it may be done before the second has begun
            second = self._started(run)
            code = second.wait()
            first.send(signal.SIGCONT)
            if code != refused or "in use" not in second.said():
                wrong.append(f"the second ended with exit code {code}: {_last_words(second)}")
        wrong += self._ends_the_same(run, first)
        done = "started a second one while the first trained"
        expected = f"second refused (exit code {refused}), first undisturbed, {_SAME}"
        return _judged(fault, done, expected, wrong, f"second refused, first finished, {_SAME}")

    def _killed(self, life: float, training: float) -> Outcome:
        def fresh(n: int) -> Path:
            for old in self.scratch.glob("killed-*"):
                shutil.rmtree(old)
            return self._fresh(f"killed-{n}")

        found = kill_and_continue(
            self._started, fresh, self.whole,
            kills=self.kills, span=life, training=training, chance=self.chance,
            after_kill=lambda _run, n: self.say(f"SIGKILL {n} of {self.kills}"),
        )  # fmt: skip
        doing = ", ".join(f"{count} while {name}" for name, count in found.while_.items() if count)
        done = f"at {found.kills} random moments ({doing}), continued each time"
        runs = f"{found.finished} finished {'run' if found.finished == 1 else 'runs'}"
        return _judged("killed (SIGKILL)", done, _SAME, found.wrong, f"{runs}: {_SAME}")

    def _terminated(self) -> Outcome:
        """SIGTERM; leaves a copy of the interrupted run for the faults that damage it."""
        self.say("SIGTERM")
        run, wrong = self._fresh("stopped"), []
        after = self.chance.randrange(2 * self.save_every + 1, 3 * self.save_every + 1)
        session = self._started(run)
        if session.wait_until(lambda: steps_done(run) >= after):
            session.send(signal.SIGTERM)
        code, interrupted = session.wait(), Interrupted.exit_code
        saved, reached = newest_step(run), steps_done(run)
        if code != interrupted:
            wrong.append(f"it ended with exit code {code}")
        elif saved != reached:
            wrong.append(f"step {reached} was reached and {saved} saved")
        else:
            shutil.copytree(run, self.scratch / "interrupted", symlinks=True)
        wrong += self._ends_the_same(run, self._started(run))
        expected = f"step finished and saved, exit code {interrupted}, {_SAME}"
        said = f"saved at step {saved}, exit code {code}, {_SAME}"
        done = f"after step {after}, continued"
        return _judged("told to stop (SIGTERM)", done, expected, wrong, said)

    def _flip(self, path: Path) -> str:
        data = bytearray(path.read_bytes())
        bit = self.chance.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        return f"flipped bit {bit:,} of {path.name}"

    def _cut(self, path: Path) -> str:
        size = self.chance.randrange(path.stat().st_size)
        os.truncate(path, size)
        return f"cut {path.name} at {size:,} bytes"

    def _damaged(self, fault: str, name: str, damage: Callable[[Path], str]) -> Outcome:
        """The newest checkpoint of the interrupted run is damaged, and the run continued."""
        self.say(fault)
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
