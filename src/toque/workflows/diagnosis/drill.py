"""Drill: the crash test of a run on the user's own machine and disk, with short copies of it.

Each copy must end with the weights, optimizer and losses of a run that was left alone, bit for bit.
Sessions are forked from a process that has imported torch and computed nothing: a restart costs
tenths of a second, and the threads of a process that has computed would not be there in the child.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from toque.config import Resolved, RunConfig, load_config
from toque.config.user_code import refuse_foreign_code
from toque.errors import CheckFailed, CheckpointError, ConfigError, Interrupted, argument
from toque.reporter import SILENT, Reporter
from toque.runs.history import METRICS, read_metrics
from toque.storage.atomic import sha256_of
from toque.storage.no_follow import open_append
from toque.workflows.results import Model, folder_of

if TYPE_CHECKING:
    from toque.training.observers.watchers import RunState

SAVES: Final = 8  # of each run, the last one included
_COPIES: Final = 10  # checkpoints that lie in the scratch folder at most
_LOOK_EVERY: Final = 0.002  # seconds between two looks at a session that is waited for
_SAME: Final = "same bits at the end"
QUIET: Final = (
    "train.keep_last=2",
    "train.early_stopping=null",
    "train.best_by=loss",  # no texts are written that could be scored
    "train.strategy=auto",  # each copy is one process
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
)  # settings of a drill's runs that leave out what changes no update

_NAMED: Final = f"the damage named, the checkpoint before it used, {_SAME}"
_PROMISED: Final = {
    "two runs in one folder": f"second refused (exit code {CheckpointError.exit_code}), {_SAME}",
    "killed (SIGKILL)": _SAME,
    "told to stop (SIGTERM)": f"step saved, exit code {Interrupted.exit_code}, {_SAME}",
    "a flipped bit": _NAMED,
    "a file cut short": _NAMED,
}  # every fault, and what is expected of a run that meets it
Facts = Mapping[str, Any]
"""Results of training by name, for comparing: hashes, and the loss of every step."""


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    fault: str
    done: str
    expected: str
    happened: str
    verdict: Literal["ok", "FAILED"]
    seconds: float


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
        """Raise CheckFailed where something came out otherwise than promised."""
        if self.failed:
            raise CheckFailed(
                f"{len(self.failed)} of {len(self.outcomes)} faults came out otherwise than "
                f"promised: {', '.join(self.failed)}. Do not rely on continuing runs on this "
                "machine and disk; please report the table with your versions."
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
    """Do the crash test to short copies of a run, on its disk; the run itself is only read.

    Sessions are forked: call this in a process that has not computed with torch yet.

    Args:
        run: what is copied.
        kills: times a copy is killed with SIGKILL at a random moment.
        steps: updates of each copy.
        seed: where random moments and bits come from.
        trust_code: import the optimizer and the tasks' metrics that the run's config.yaml names.
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
    words = [*QUIET, f"train.save_every={steps // SAVES} steps"]
    words.append(f"train.evaluate_every={2 * (steps // SAVES) + 1} steps")
    copied = partial(load_config, folder / "config.yaml", trust_code=trust_code or None)
    settings = copied(words).config
    refuse_foreign_code(settings.foreign_code)
    if by_steps := steps_for_time(settings, steps):
        words += by_steps
        reporter.notice(
            "note: by the clock no two runs have the same learning rates, so in the copies a "
            f"second is a step: {', '.join(by_steps)}"
        )
    needed = _COPIES * sum(file.stat().st_size for file in _newest_checkpoint(folder).glob("*"))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"The drill needs space for about {_COPIES} checkpoints beside {folder}: {needed:,} "
            f"bytes, and {free:,} are free. Make space first."
        )
    place = folder.resolve().parent
    try:
        scratch = tempfile.TemporaryDirectory(
            prefix=f"drill-{folder.name}-", dir=place, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise CheckpointError(
            f"{place} cannot be written: {error.strerror}. The drill works in a folder beside the "
            "run, so that its disk is the one that is tested; give yourself the right to write "
            "there, or copy the run elsewhere."
        ) from error
    with scratch:
        importlib.import_module("toque.workflows.preloaded")  # before the first fork
        chance = random.Random(seed)
        place = Path(scratch.name)
        done = _Drill(folder, place, copied, words, steps, kills, chance, reporter.notice)
        return DrillResult(folder, tuple(done.outcomes()))


def steps_for_time(config: RunConfig, least: int) -> list[str]:
    """Overrides that put times of the clock which a learning rate follows in steps, one a second.

    A whole run becomes `least` steps or more, and every part of it shorter than it.
    """
    optim, length = config.optim, config.train.stop_after
    parts = {"optim.warmup": optim.warmup, "optim.cooldown": optim.cooldown}
    parts["optim.cycles.first"] = optim.cycles.first if optim.cycles is not None else None
    found: dict[str, float] = {}
    most = length.amount if length.unit == "steps" else math.inf
    if length.seconds is not None:
        found["train.stop_after"] = most = max(least, round(length.seconds))
    for name, part in parts.items():
        if part is not None and part.seconds is not None:
            found[name] = max(1, min(round(part.seconds), most - 1))
    return [f"{name}={n:.0f} steps" for name, n in found.items()]


class StopAt:
    """Ends a session after so many updates of the run; the schedules stay those of the whole."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state: RunState) -> str | None:
        """Stop when it is enough."""
        return "stop" if state.step >= self.step else None

    on_train_begin = on_step_end  # a session may have nothing more to do


@dataclass
class _Drill:
    """The faults, one after another, done to copies of `model` in `scratch`."""

    model: Path
    scratch: Path
    copied: Callable[[Sequence[str]], Resolved]  # the run's configuration, with overrides
    words: Sequence[str]  # overrides of every copy
    steps: int
    kills: int
    chance: random.Random
    say: Callable[[str], None]
    sessions: list[Session] = field(default_factory=list)
    whole: Facts = field(default_factory=dict)  # of the undisturbed run

    @property
    def save_every(self) -> int:
        """Steps between two saves."""
        return self.steps // SAVES

    @property
    def interrupted(self) -> Path:
        """Copy of a run that SIGTERM stopped, to be damaged."""
        return self.scratch / "interrupted"

    def outcomes(self) -> Iterator[Outcome]:
        """Do everything; an error where the run does not train undisturbed or is too short."""
        try:
            life, training = self._undisturbed()
            # Each gives what it has done and what is wrong afterwards.
            faults: tuple[Callable[[], tuple[str, list[str]]], ...] = (
                self._two_runs,
                partial(self._killed, life, training),
                self._terminated,
                partial(self._damaged, self._flip),
                partial(self._damaged, self._cut),
            )
            for (fault, expected), do in zip(_PROMISED.items(), faults, strict=True):
                self.say(fault)
                began = time.monotonic()
                done, wrong = do()
                happened = "; ".join(dict.fromkeys(wrong)) or "as expected"
                seconds = round(time.monotonic() - began, 1)
                yield Outcome(fault, done, expected, happened, "FAILED" if wrong else "ok", seconds)
        finally:
            for session in self.sessions:
                session.send(signal.SIGKILL)
                session.wait()

    def _started(self, run: Path) -> Session:
        """A session that begins or continues the training of a run folder."""
        from toque.training.checkpoint.store import run_lock
        from toque.training.resources import RESOURCES
        from toque.workflows.train import train_in_child  # with torch, which refusing does without

        # How updates are computed was measured by the run; another choice is other bits.
        if not run.exists():
            with run_lock(run / "checkpoints"):  # by which the folder is a run's
                if (self.model / RESOURCES).exists():
                    shutil.copy(self.model / RESOURCES, run / RESOURCES)
        log, stop = self.scratch / f"{len(self.sessions)}.log", StopAt(self.steps)
        settings = self.copied([*self.words, f"run_dir={run}"])
        session = Session(lambda: train_in_child(settings, log, callbacks=[stop]), log)
        self.sessions.append(session)
        return session

    def _undisturbed(self) -> tuple[float, float]:
        """Train a copy and note what it comes to; its seconds, all and from its first event on."""
        self.say("a run that is left alone")
        run, began = self.scratch / "whole", time.monotonic()
        session = self._started(run)
        session.wait_until(lambda: bool(events(run)))
        reported = time.monotonic()
        code = session.wait()
        ended = time.monotonic()
        if code != 0:
            raise CheckpointError(
                f"The run does not train here even undisturbed (exit code {code}): "
                f"{session.last_words()} Mend that first; start the drill in the folder the run "
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
            return [f"continuing ended with exit code {code}: {session.last_words()}"]
        wrong = [f"other {name}" for name in differing(self.whole, facts_of(run))]
        shutil.rmtree(run)
        return wrong

    def _two_runs(self) -> tuple[str, list[str]]:
        run, wrong = self.scratch / "shared", []
        first = self._started(run)
        if first.wait_until(lambda: steps_done(run) >= 1):
            first.send(signal.SIGSTOP)  # or it may be done before the second has begun
            second = self._started(run)
            code = second.wait()
            first.send(signal.SIGCONT)
            if code != CheckpointError.exit_code or "in use" not in second.said():
                wrong.append(f"the second ended with exit code {code}: {second.last_words()}")
        wrong += self._ends_the_same(run, first)
        return "started a second one while the first trained", wrong

    def _killed(self, life: float, training: float) -> tuple[str, list[str]]:
        def fresh(n: int) -> Path:
            for old in self.scratch.glob("killed-*"):
                shutil.rmtree(old)
            return self.scratch / f"killed-{n}"

        found = kill_and_continue(
            self._started, fresh, self.whole,
            kills=self.kills, span=life, training=training, chance=self.chance,
            after_kill=lambda _run, n: self.say(f"SIGKILL {n} of {self.kills}"),
        )  # fmt: skip
        counts = Counter(doing for doing, _ in found.moments)
        doing = ", ".join(f"{count} while {name}" for name, count in counts.items())
        runs = f"{found.finished} finished {'run' if found.finished == 1 else 'runs'}"
        moments = f"at {len(found.moments)} random moments ({doing})"
        return f"{moments}, continued each time: {runs}", found.wrong

    def _terminated(self) -> tuple[str, list[str]]:
        run, wrong = self.scratch / "stopped", []
        after = self.chance.randrange(2 * self.save_every + 1, 3 * self.save_every + 1)
        session = self._started(run)
        if session.wait_until(lambda: steps_done(run) >= after):
            session.send(signal.SIGTERM)
        code, saved, reached = session.wait(), newest_step(run), steps_done(run)
        if code != Interrupted.exit_code:
            wrong.append(f"it ended with exit code {code}")
        elif saved != reached:
            wrong.append(f"step {reached} was reached and {saved} saved")
        else:
            shutil.copytree(run, self.interrupted, symlinks=True)
        wrong += self._ends_the_same(run, self._started(run))
        return f"after step {after}, saved at step {saved}, continued", wrong

    def _flip(self, checkpoint: Path) -> str:
        path = checkpoint / "model.safetensors"
        data = bytearray(path.read_bytes())
        bit = self.chance.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        return f"flipped bit {bit:,} of {path.name}"

    def _cut(self, checkpoint: Path) -> str:
        path = checkpoint / "optimizer.safetensors"
        size = self.chance.randrange(path.stat().st_size)
        os.truncate(path, size)
        return f"cut {path.name} at {size:,} bytes"

    def _damaged(self, damage: Callable[[Path], str]) -> tuple[str, list[str]]:
        """Damage the newest checkpoint of the interrupted run, and continue it."""
        if not self.interrupted.exists():
            return "nothing", ["not done: no run was interrupted whole"]
        run = self.scratch / "damaged"
        shutil.copytree(self.interrupted, run, symlinks=True)
        newest = _newest_checkpoint(run)
        done = f"{damage(newest)} of the newest checkpoint ({newest.name})"
        session = self._started(run)
        wrong = self._ends_the_same(run, session)
        if f"skipped {newest.name}" not in "".join(session.said().split("\n")):
            wrong.append("the damaged checkpoint was not named")
        return done, wrong


class Session:
    """One training process, whose output is appended to `log`."""

    def __init__(self, body: Callable[[], int], log: Path) -> None:
        self.log = log
        self._process = multiprocessing.get_context("fork").Process(target=_run, args=(body, log))
        self._process.start()

    @property
    def code(self) -> int | None:
        """Exit code, negative for the signal it died of; None while it runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """Wait for the end; the exit code."""
        self._process.join()
        assert self.code is not None
        return self.code

    def wait_until(self, true: Callable[[], bool]) -> bool:
        """Wait until `true()`; False when the session ended before."""
        while not true():
            if self.code is not None:
                return False
            time.sleep(_LOOK_EVERY)
        return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self.code is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def killed_after(self, seconds: float) -> bool:
        """True if SIGKILL met it that long from now; False when it ended by itself before."""
        self._process.join(seconds)
        self.send(signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    def said(self) -> str:
        """All that it printed."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def last_words(self) -> str:
        """The last three lines of it."""
        return " ".join(self.said().strip().splitlines()[-3:])


def _run(body: Callable[[], int], log: Path) -> None:
    file = open_append(log)
    for standard in (1, 2):  # output and errors
        os.dup2(file, standard)
    sys.exit(body())


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint folder, whole or not; 0 for none."""
    steps = [path.name.rpartition("-")[2] for path in (run / "checkpoints").glob("step-*")]
    return max(map(int, steps), default=0)


def _newest_checkpoint(run: Path) -> Path:
    """The folder of that step; of step 0 there is none."""
    return run / "checkpoints" / f"step-{newest_step(run):08d}"


def events(run: Path) -> list[dict[str, Any]]:
    """The events of a run that count; none before it has begun."""
    with suppress(OSError):
        return read_metrics(run / METRICS)
    return []


def steps_done(run: Path) -> int:
    """The newest step that `metrics.jsonl` records."""
    return max((e["step"] for e in events(run) if e["event"] == "step"), default=0)


def facts_of(run: Path) -> Facts:
    """SHA-256 of the last weights, optimizer and finished model, and the loss of every step.

    Of a step that was done more than once, the loss reported last is what stands.
    """
    last = _newest_checkpoint(run)
    files = {
        "weights": last / "model.safetensors",
        "optimizer": last / "optimizer.safetensors",
        **{f"model/{path.name}": path for path in (run / "model").glob("*.safetensors")},
    }
    hashes = {name: sha256_of(path) for name, path in files.items() if path.exists()}
    losses = {e["step"]: e["loss"] for e in events(run) if e["event"] == "step"}
    return {"last step": newest_step(run), **hashes, "losses": losses}


def differing(whole: Facts, other: Facts) -> list[str]:
    """Names of the facts that are not equal."""
    return [n for n in {**whole, **other} if whole.get(n) != other.get(n)]


@dataclass
class Kills:
    """The outcome of killing runs again and again."""

    moments: list[tuple[str, int]] = field(default_factory=list)
    """Activity of the session at each kill, and the newest step it had reported."""
    finished: int = 0  # runs that came to their end, each compared
    wrong: list[str] = field(default_factory=list)  # differences, and sessions that failed


def kill_and_continue(
    start: Callable[[Path], Session],
    fresh: Callable[[int], Path],
    whole: Facts,
    *,
    kills: int,
    span: float,
    training: float = 0.0,
    chance: random.Random,
    facts: Callable[[Path], Facts] = facts_of,
    after_kill: Callable[[Path, int], None] = lambda _run, _kills: None,
) -> Kills:
    """SIGKILL at moments drawn evenly from the `span` seconds of each session's life.

    Every other one is drawn from the `training` seconds after the first event, where those are
    given: where starting takes longest, most kills would meet a session that starts. A run that
    comes to its end before its kill is compared with `whole`, and the next `fresh` one begins.
    """
    found, run = Kills(), fresh(0)
    while True:
        began = time.time()
        session = start(run)
        if len(found.moments) < kills:
            if late := training > 0 and len(found.moments) % 2 == 1:
                session.wait_until(partial(_has_reported, run, began))
            if session.killed_after(chance.uniform(0.0, training if late else span)):
                found.moments.append((_doing(run, began), steps_done(run)))
                after_kill(run, len(found.moments))
                continue
        code = session.wait()
        found.finished += 1
        if code != 0:
            last = session.said().strip().splitlines()[-1:]
            found.wrong.append(f"a session ended with {code}: {' '.join(last)}")
        else:
            found.wrong += [f"other {name}" for name in differing(whole, facts(run))]
        if len(found.moments) >= kills or code != 0:
            return found
        run = fresh(found.finished)


def _has_reported(run: Path, began: float) -> bool:
    log = run / METRICS
    return log.exists() and log.stat().st_mtime >= began


def _doing(run: Path, began: float) -> str:
    """Activity of a session that began at that time, when it was killed."""
    if not _has_reported(run, began):
        return "starting"
    if any(path.stat().st_mtime >= began for path in run.glob("*/temp-*")):
        return "saving"
    return "ending" if (run / "evaluation.json").exists() else "training"
