"""Drill: a crash test of short copies of a run, on the user's machine and disk.

Each copy must end with weights, an optimizer and losses that are bitwise identical to an
undisturbed run. Sessions are forked from a process that has imported torch, so a restart takes
tenths of a second. This process has computed nothing, because a forked child lacks the threads
that torch starts when it computes.
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
from toque.errors import (
    CheckFailed,
    CheckpointError,
    ConfigError,
    Interrupted,
    argument,
)
from toque.reporter import SILENT, Reporter
from toque.runs.history import METRICS, read_metrics
from toque.storage.atomic import sha256_of
from toque.storage.no_follow import open_append
from toque.workflows.results import Model, model_folder

if TYPE_CHECKING:
    from toque.training.observers.watchers import RunState

SAVES: Final = 8
"""Number of checkpoints per run."""
_MAX_CHECKPOINTS: Final = 10
"""Maximum number of checkpoints in the scratch folder at a time."""
_POLL_SECONDS: Final = 0.002
_SAME: Final = "bitwise identical at the end"
QUIET: Final = (
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
"""Overrides that switch off everything without an effect on updates."""

_REPORTED: Final = f"damage reported, previous checkpoint used, {_SAME}"
_EXPECTED: Final = {
    "two runs in one folder": f"second refused (exit code {CheckpointError.exit_code}), {_SAME}",
    "killed (SIGKILL)": _SAME,
    "stopped (SIGTERM)": f"step saved, exit code {Interrupted.exit_code}, {_SAME}",
    "a flipped bit": _REPORTED,
    "a truncated file": _REPORTED,
}
"""Expected outcome of each fault."""
Results = Mapping[str, Any]
"""Results of a run by name: hashes of its files, and the loss of every step."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a fault, a row of the table."""

    fault: str
    done: str
    expected: str
    happened: str
    verdict: Literal["ok", "FAILED"]
    seconds: float


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
        return {
            "run": str(self.run),
            "ok": not self.failed,
            "versions": {
                "python": platform.python_version(),
                "torch": version("torch"),
            },
            "cores": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else None,
            "outcomes": [asdict(o) for o in self.outcomes],
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
        steps: Updates of each copy.
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
            f"{folder} is not a run folder (it has no config.yaml). Name a run, e.g. "
            "runs/cookbook."
        )
    if steps < SAVES or kills < 0:
        raise ConfigError(
            f"{argument('steps')} must be at least {SAVES} and {argument('kills')} at least 0, not "
            f"{steps} and {kills}."
        )

    overrides = [
        *QUIET,
        f"train.save_every={steps // SAVES} steps",
        f"train.evaluate_every={2 * (steps // SAVES) + 1} steps",
    ]
    load_copy = partial(
        load_config, folder / "config.yaml", trust_code=trust_code or None
    )
    settings = load_copy(overrides).config
    refuse_foreign_code(settings.foreign_code)
    if converted := convert_times_to_steps(settings, steps):
        overrides += converted
        reporter.notice(
            "note: learning rates that depend on the clock differ between runs, so the copies "
            f"use one step in place of each second: {', '.join(converted)}"
        )

    with _make_scratch_folder(folder) as scratch:
        # Import torch before the first fork.
        importlib.import_module("toque.workflows.training_child")
        faults = _Drill(
            folder,
            Path(scratch),
            load_copy,
            overrides,
            steps,
            kills,
            random.Random(seed),
            reporter.notice,
        )
        return DrillResult(folder, tuple(faults.outcomes()))


def _make_scratch_folder(run: Path) -> tempfile.TemporaryDirectory[str]:
    """Make a folder next to the run, so that the drill tests the run's disk.

    Raises:
        CheckpointError: The disk has too little space, or cannot be written.
    """
    files = _newest_checkpoint(run).glob("*")
    needed = _MAX_CHECKPOINTS * sum(file.stat().st_size for file in files)
    free = shutil.disk_usage(run).free
    if free < needed:
        raise CheckpointError(
            f"The drill needs space for {_MAX_CHECKPOINTS} checkpoints next to {run}: "
            f"{needed:,} bytes, but only {free:,} are free. Free some disk space first."
        )
    parent = run.resolve().parent
    try:
        return tempfile.TemporaryDirectory(
            prefix=f"drill-{run.name}-", dir=parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise CheckpointError(
            f"{parent} cannot be written: {error.strerror}. The drill needs a folder next to the "
            "run, to test the run's disk. Change the permissions, or copy the run to another "
            "folder."
        ) from error


def convert_times_to_steps(config: RunConfig, min_steps: int) -> list[str]:
    """Return overrides that replace each second of a learning-rate schedule by a step.

    The run has at least `min_steps` steps, and every part of its schedule is shorter.
    """
    optim = config.optim
    length = config.train.stop_after
    steps: dict[str, float] = {}
    total = length.amount if length.unit == "steps" else math.inf
    if length.seconds is not None:
        total = max(min_steps, round(length.seconds))
        steps["train.stop_after"] = total

    parts = {"optim.warmup": optim.warmup, "optim.cooldown": optim.cooldown}
    if optim.cycles is not None:
        parts["optim.cycles.first"] = optim.cycles.first
    for name, part in parts.items():
        if part is not None and part.seconds is not None:
            steps[name] = max(1, min(round(part.seconds), total - 1))
    return [f"{name}={n:.0f} steps" for name, n in steps.items()]


class StopAt:
    """Callback that ends a session at a step without changing the schedules of the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state: RunState) -> str | None:
        """Request a stop at the step or later."""
        return "stop" if state.step >= self.step else None

    on_train_begin = on_step_end  # a session may begin at the step


Tested = tuple[str, list[str]]
"""Description of a fault that was caused, and the problems that followed."""


@dataclass
class _Drill:
    """Faults, one after another, on copies of a run in `scratch`."""

    run: Path
    scratch: Path
    load_copy: Callable[[Sequence[str]], Resolved]
    """Function that loads the run's configuration with overrides."""
    overrides: Sequence[str]
    """Overrides of every copy."""
    steps: int
    kills: int
    rng: random.Random
    notice: Callable[[str], None]
    sessions: list[Session] = field(default_factory=list)
    """All sessions that were started."""
    expected: Results = field(default_factory=dict)
    """Results of the undisturbed run."""

    @property
    def save_every(self) -> int:
        """Steps between two saves."""
        return self.steps // SAVES

    @property
    def interrupted(self) -> Path:
        """Copy of a run that SIGTERM stopped. The damage tests start from it."""
        return self.scratch / "interrupted"

    def outcomes(self) -> Iterator[Outcome]:
        """Test all faults.

        Raises:
            CheckpointError: The run does not train undisturbed.
            ConfigError: The run is shorter than the drill.
        """
        try:
            session_seconds, training_seconds = self._train_undisturbed()
            faults: tuple[Callable[[], Tested], ...] = (
                self._start_twice,
                partial(self._kill, session_seconds, training_seconds),
                self._terminate,
                partial(self._damage, self._flip_bit),
                partial(self._damage, self._truncate),
            )
            for (fault, expected), test in zip(_EXPECTED.items(), faults, strict=True):
                self.notice(fault)
                began = time.monotonic()
                action, problems = test()
                happened = "; ".join(dict.fromkeys(problems)) or "as expected"
                seconds = round(time.monotonic() - began, 1)
                verdict: Literal["ok", "FAILED"] = "FAILED" if problems else "ok"
                yield Outcome(fault, action, expected, happened, verdict, seconds)
        finally:
            # After an error, a session may still run.
            for session in self.sessions:
                session.send(signal.SIGKILL)
                session.wait()

    def _start_session(self, run: Path) -> Session:
        """Begin or continue the training of a run folder."""
        # Imported here because they load torch, which the checks of the arguments do not need.
        from toque.training.checkpoint.store import run_lock
        from toque.training.resources import RESOURCES
        from toque.workflows.training_child import train_in_child

        # A new measurement could choose other settings, which change the last bits of the results.
        # So a copy uses the run's measured settings.
        if not run.exists():
            with run_lock(run / "checkpoints"):  # this marks the folder as a run
                if (self.run / RESOURCES).exists():
                    shutil.copy(self.run / RESOURCES, run / RESOURCES)
        log = self.scratch / f"{len(self.sessions)}.log"
        settings = self.load_copy([*self.overrides, f"run_dir={run}"])
        callbacks = [StopAt(self.steps)]
        session = Session(
            lambda: train_in_child(settings, log, callbacks=callbacks), log
        )
        self.sessions.append(session)
        return session

    def _train_undisturbed(self) -> tuple[float, float]:
        """Train a copy and store its results.

        Returns:
            The seconds of the session, and the seconds after its first event.
        """
        self.notice("an undisturbed run")
        run = self.scratch / "undisturbed"
        began = time.monotonic()
        session = self._start_session(run)
        session.wait_until(lambda: bool(read_events(run)))
        first_event = time.monotonic()
        code = session.wait()
        end = time.monotonic()
        if code != 0:
            raise CheckpointError(
                f"The run does not train here even undisturbed (exit code {code}): "
                f"{session.last_lines()} Fix this first, and start the drill in the folder where "
                "you started the run."
            )

        self.expected = read_results(run)
        last_step = self.expected["last step"]
        if last_step < self.steps:
            raise ConfigError(
                f"{argument('steps')} is {self.steps}, but the run ends after {last_step} steps. "
                "Use fewer steps or a longer run."
            )
        shutil.rmtree(run)
        return end - began, end - first_event

    def _compare_end(self, run: Path, session: Session) -> list[str]:
        """Wait for the end of a run, return its problems, and remove its folder if it ended."""
        code = session.wait()
        if code != 0:
            return [f"continuing failed with exit code {code}: {session.last_lines()}"]
        differences = find_differences(self.expected, read_results(run))
        shutil.rmtree(run)
        return [f"other {name}" for name in differences]

    def _start_twice(self) -> Tested:
        run = self.scratch / "shared"
        problems = []
        first = self._start_session(run)
        if first.wait_until(lambda: last_logged_step(run) >= 1):
            # Pause the first session, which might otherwise end before the second one begins.
            first.send(signal.SIGSTOP)
            second = self._start_session(run)
            code = second.wait()
            first.send(signal.SIGCONT)
            if code != CheckpointError.exit_code or "in use" not in second.read_log():
                problems.append(
                    f"the second session exited with {code}: {second.last_lines()}"
                )
        problems += self._compare_end(run, first)
        return "started a second session while the first trained", problems

    def _kill(self, session_seconds: float, training_seconds: float) -> Tested:
        def new_folder(n: int) -> Path:
            for old in self.scratch.glob("killed-*"):
                shutil.rmtree(old)
            return self.scratch / f"killed-{n}"

        result = kill_and_continue(
            self._start_session,
            new_folder,
            self.expected,
            kills=self.kills,
            session_seconds=session_seconds,
            training_seconds=training_seconds,
            rng=self.rng,
            after_kill=lambda _run, n: self.notice(f"SIGKILL {n} of {self.kills}"),
        )
        counts = Counter(activity for activity, _ in result.moments)
        activities = ", ".join(
            f"{count} while {name}" for name, count in counts.items()
        )
        noun = "run" if result.finished == 1 else "runs"
        action = (
            f"at {len(result.moments)} random moments ({activities}), continued each time: "
            f"{result.finished} finished {noun}"
        )
        return action, result.problems

    def _terminate(self) -> Tested:
        run = self.scratch / "stopped"
        problems = []
        # A step after the second save, so that older checkpoints exist.
        step = self.rng.randrange(2 * self.save_every + 1, 3 * self.save_every + 1)
        session = self._start_session(run)
        if session.wait_until(lambda: last_logged_step(run) >= step):
            session.send(signal.SIGTERM)
        code = session.wait()
        saved_step, last_step = newest_step(run), last_logged_step(run)
        if code != Interrupted.exit_code:
            problems.append(f"it exited with {code}")
        elif saved_step != last_step:
            problems.append(f"it reached step {last_step} but saved step {saved_step}")
        else:
            shutil.copytree(run, self.interrupted, symlinks=True)
        problems += self._compare_end(run, self._start_session(run))
        return f"after step {step}, saved at step {saved_step}, continued", problems

    def _flip_bit(self, checkpoint: Path) -> str:
        path = checkpoint / "model.safetensors"
        data = bytearray(path.read_bytes())
        bit = self.rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        return f"flipped bit {bit:,} of {path.name}"

    def _truncate(self, checkpoint: Path) -> str:
        path = checkpoint / "optimizer.safetensors"
        size = self.rng.randrange(path.stat().st_size)
        os.truncate(path, size)
        return f"truncated {path.name} to {size:,} bytes"

    def _damage(self, damage: Callable[[Path], str]) -> Tested:
        """Damage the newest checkpoint of the interrupted run, and continue it."""
        if not self.interrupted.exists():
            return "nothing", ["not tested, because no session stopped correctly"]
        run = self.scratch / "damaged"
        shutil.copytree(self.interrupted, run, symlinks=True)
        newest = _newest_checkpoint(run)
        action = f"{damage(newest)} of the newest checkpoint ({newest.name})"
        session = self._start_session(run)
        problems = self._compare_end(run, session)
        # The log wraps lines, also within a name.
        if f"skipped {newest.name}" not in session.read_log().replace("\n", ""):
            problems.append("the damaged checkpoint was not reported")
        return action, problems


class Session:
    """Forked training process that writes its output to `log`.

    Args:
        body: Function that trains and returns the exit code.
        log: File that receives the output.
    """

    def __init__(self, body: Callable[[], int], log: Path) -> None:
        self.log = log
        self._process = multiprocessing.get_context("fork").Process(
            target=_run_with_log, args=(body, log)
        )
        self._process.start()

    @property
    def code(self) -> int | None:
        """Exit code, negative after a fatal signal; None while the process runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """Wait for the end. Return the exit code."""
        self._process.join()
        assert self.code is not None
        return self.code

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition. Return False if the session ends first."""
        while not condition():
            if self.code is not None:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the process runs."""
        if self.code is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill_after(self, seconds: float) -> bool:
        """Send SIGKILL after a time. Return False if the session ends first."""
        self._process.join(seconds)
        self.send(signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    def read_log(self) -> str:
        """Return the output so far."""
        if not self.log.exists():
            return ""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def last_lines(self) -> str:
        """Return the last three lines of the output."""
        return " ".join(self.read_log().strip().splitlines()[-3:])


def _run_with_log(body: Callable[[], int], log: Path) -> None:
    """Exit with the result of `body`, with standard output and standard error in `log`."""
    file = open_append(log)
    for standard_stream in (1, 2):
        os.dup2(file, standard_stream)
    sys.exit(body())


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint folder, which may be incomplete, or 0."""
    steps = [
        path.name.rpartition("-")[2] for path in (run / "checkpoints").glob("step-*")
    ]
    return max(map(int, steps), default=0)


def _newest_checkpoint(run: Path) -> Path:
    """Return the folder of the newest checkpoint. It does not exist for step 0."""
    return run / "checkpoints" / f"step-{newest_step(run):08d}"


def read_events(run: Path) -> list[dict[str, Any]]:
    """Read the events of a run, without undone updates. Without a file there are none."""
    with suppress(OSError):
        return read_metrics(run / METRICS)
    return []


def last_logged_step(run: Path) -> int:
    """Return the step of the newest step event, or 0."""
    steps = [event["step"] for event in read_events(run) if event["event"] == "step"]
    return max(steps, default=0)


def read_results(run: Path) -> Results:
    """Hash the last weights, optimizer and finished model, and read the loss of every step."""
    last = _newest_checkpoint(run)
    files = {
        "weights": last / "model.safetensors",
        "optimizer": last / "optimizer.safetensors",
    }
    for path in (run / "model").glob("*.safetensors"):
        files[f"model/{path.name}"] = path
    hashes = {name: sha256_of(path) for name, path in files.items() if path.exists()}
    losses = {
        event["step"]: event["loss"]
        for event in read_events(run)
        if event["event"] == "step"
    }
    return {"last step": newest_step(run), **hashes, "losses": losses}


def find_differences(expected: Results, actual: Results) -> list[str]:
    """Return the names of results that differ."""
    return [
        name
        for name in {**expected, **actual}
        if expected.get(name) != actual.get(name)
    ]


@dataclass
class Kills:
    """Outcome of repeated kills."""

    moments: list[tuple[str, int]] = field(default_factory=list)
    """Activity and newest logged step at each kill."""
    finished: int = 0
    """Number of runs that reached their end."""
    problems: list[str] = field(default_factory=list)
    """Differences from the expected results, and sessions that failed."""


def kill_and_continue(
    start: Callable[[Path], Session],
    new_folder: Callable[[int], Path],
    expected: Results,
    *,
    kills: int,
    session_seconds: float,
    training_seconds: float = 0.0,
    rng: random.Random,
    read: Callable[[Path], Results] = read_results,
    after_kill: Callable[[Path, int], None] = lambda _run, _kills: None,
) -> Kills:
    """Kill sessions with SIGKILL at random moments, and continue each run to its end.

    The moments are uniform in the time of a session. If starting takes most of this time, few kills
    would hit training, so every second moment is uniform in the time after the first event. A run
    that ends before its kill is compared, and a new one begins.

    Args:
        start: Begins or continues the training of a folder.
        new_folder: Returns the folder of a new run by its number.
        expected: Results of an undisturbed run.
        kills: Number of kills.
        session_seconds: Seconds of an undisturbed session.
        training_seconds: Seconds of an undisturbed session after its first event. 0: kill at any
            time of a session.
        rng: Source of the random moments.
        read: Returns the results of a run.
        after_kill: Receives the folder and the number of kills so far.
    """
    result = Kills()
    run = new_folder(0)
    while True:
        began = time.time()
        session = start(run)
        if len(result.moments) < kills:
            seconds = session_seconds
            if training_seconds > 0 and len(result.moments) % 2 == 1:
                seconds = training_seconds
                session.wait_until(partial(_has_logged, run, began))
            if session.kill_after(rng.uniform(0.0, seconds)):
                result.moments.append((_activity(run, began), last_logged_step(run)))
                after_kill(run, len(result.moments))
                continue

        # The session ended before its kill, or all kills are done.
        code = session.wait()
        result.finished += 1
        if code != 0:
            last_line = session.read_log().strip().splitlines()[-1:]
            result.problems.append(
                f"a session exited with {code}: {' '.join(last_line)}"
            )
            return result
        differences = find_differences(expected, read(run))
        result.problems += [f"other {name}" for name in differences]
        if len(result.moments) >= kills:
            return result
        run = new_folder(result.finished)


def _has_logged(run: Path, began: float) -> bool:
    log = run / METRICS
    return log.exists() and log.stat().st_mtime >= began


def _activity(run: Path, began: float) -> str:
    """Return the activity in which a session was killed. `began` is the time of its start."""
    if not _has_logged(run, began):
        return "starting"
    if any(path.stat().st_mtime >= began for path in run.glob("*/temp-*")):
        return "saving"
    return "ending" if (run / "evaluation.json").exists() else "training"
