"""Faults of the drill: crashes and damage, each tested on copies of a run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from toque.config import Resolved
from toque.errors import CheckpointError, ConfigError, Interrupted, argument
from toque.workflows.diagnosis.kills import kill_and_continue
from toque.workflows.diagnosis.run_facts import (
    Facts,
    events,
    facts_of,
    find_differences,
    newest_checkpoint,
    newest_step,
    steps_done,
)
from toque.workflows.diagnosis.training_session import Session, StopAt

SAVES = 8
"""Number of checkpoints per run."""
_IDENTICAL = "bitwise identical at the end"
_REPORTED = f"damage reported, previous checkpoint used, {_IDENTICAL}"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a fault: a row of the printed table."""

    fault: str
    done: str
    """Action by which the test caused the fault."""
    expected: str
    happened: str
    verdict: Literal["ok", "FAILED"]
    seconds: float


class _Fault(NamedTuple):
    """A fault with its expected outcome."""

    name: str
    expected: str
    test: Callable[[], tuple[str, list[str]]]
    """Function that causes the fault. It returns its action and the problems that followed."""


class _Times(NamedTuple):
    """Seconds of an undisturbed session."""

    session: float
    training: float
    """Seconds after the first event."""


@dataclass
class FaultTests:
    """Tests of all faults, one after another, on copies of a run in `scratch`."""

    run: Path
    scratch: Path
    load_copy: Callable[[Sequence[str]], Resolved]
    """Function that loads the run's configuration with overrides."""
    overrides: Sequence[str]
    """Overrides of every copy."""
    steps: int
    kills: int
    chance: random.Random
    say: Callable[[str], None]
    _sessions: list[Session] = field(default_factory=list)
    _expected: Facts = field(default_factory=dict)
    """Facts of the undisturbed run."""

    @property
    def _save_every(self) -> int:
        """Number of steps between two saves."""
        return self.steps // SAVES

    @property
    def _interrupted(self) -> Path:
        """Folder of a run that SIGTERM stopped, for later damage."""
        return self.scratch / "interrupted"

    def outcomes(self) -> Iterator[Outcome]:
        """Test all faults.

        Raises:
            CheckpointError: The run does not train undisturbed.
            ConfigError: The run is shorter than the drill.
        """
        try:
            times = self._train_undisturbed()
            for fault in self._list_faults(times):
                self.say(fault.name)
                began = time.monotonic()
                action, problems = fault.test()
                seconds = round(time.monotonic() - began, 1)
                happened = "; ".join(dict.fromkeys(problems)) or "as expected"
                verdict: Literal["ok", "FAILED"] = "FAILED" if problems else "ok"
                yield Outcome(
                    fault.name, action, fault.expected, happened, verdict, seconds
                )
        finally:
            for session in self._sessions:
                session.send(signal.SIGKILL)
                session.wait()

    def _list_faults(self, times: _Times) -> list[_Fault]:
        """List the faults in order. The damage tests use the run that SIGTERM stopped earlier."""
        refused = f"second refused (exit code {CheckpointError.exit_code})"
        saved = f"step saved, exit code {Interrupted.exit_code}"
        flip, truncate = self._flip_bit, self._truncate
        return [
            _Fault(
                "two runs in one folder", f"{refused}, {_IDENTICAL}", self._start_twice
            ),
            _Fault("killed (SIGKILL)", _IDENTICAL, partial(self._kill, times)),
            _Fault("stopped (SIGTERM)", f"{saved}, {_IDENTICAL}", self._terminate),
            _Fault("a flipped bit", _REPORTED, partial(self._damage, flip)),
            _Fault("a truncated file", _REPORTED, partial(self._damage, truncate)),
        ]

    def _start_session(self, run: Path) -> Session:
        """Begin or continue the training of a run folder."""
        # These load torch, which the checks of the arguments do not need.
        from toque.training.checkpoint.store import run_lock
        from toque.training.resources import RESOURCES
        from toque.workflows.training_child import train_in_child

        # Other measured settings could change the last bits, so a copy uses the run's settings.
        if not run.exists():
            with run_lock(run / "checkpoints"):  # this marks the folder as a run
                if (self.run / RESOURCES).exists():
                    shutil.copy(self.run / RESOURCES, run / RESOURCES)
        log = self.scratch / f"{len(self._sessions)}.log"
        settings = self.load_copy([*self.overrides, f"run_dir={run}"])
        callbacks = [StopAt(self.steps)]
        session = Session(
            lambda: train_in_child(settings, log, callbacks=callbacks), log
        )
        self._sessions.append(session)
        return session

    def _train_undisturbed(self) -> _Times:
        """Train a copy, store its facts, and return its times."""
        self.say("an undisturbed run")
        run = self.scratch / "whole"
        began = time.monotonic()
        session = self._start_session(run)
        session.wait_until(lambda: bool(events(run)))
        first_event = time.monotonic()
        code = session.wait()
        end = time.monotonic()
        if code != 0:
            raise CheckpointError(
                f"The run fails here even without faults (exit code {code}): "
                f"{session.last_lines()} Fix this first, and start the drill in the folder where "
                "you started the run."
            )
        self._expected = facts_of(run)
        if self._expected["last step"] < self.steps:
            raise ConfigError(
                f"{argument('steps')} is {self.steps}, but the run ends after "
                f"{self._expected['last step']} steps. Use fewer steps or a longer run."
            )
        shutil.rmtree(run)
        return _Times(session=end - began, training=end - first_event)

    def _finish_and_compare(self, run: Path, session: Session) -> list[str]:
        """Wait for the end of a run, return its problems, and remove its folder."""
        code = session.wait()
        if code != 0:
            return [f"continuing ended with exit code {code}: {session.last_lines()}"]
        differing = find_differences(self._expected, facts_of(run))
        shutil.rmtree(run)
        return [f"other {name}" for name in differing]

    def _start_twice(self) -> tuple[str, list[str]]:
        """Start a second session of a run while the first session trains."""
        run = self.scratch / "shared"
        problems = []
        first = self._start_session(run)
        if first.wait_until(lambda: steps_done(run) >= 1):
            # Pause the first session, because it might end before the second one begins.
            first.send(signal.SIGSTOP)
            second = self._start_session(run)
            code = second.wait()
            first.send(signal.SIGCONT)
            if code != CheckpointError.exit_code or "in use" not in second.read_log():
                problems.append(
                    f"the second ended with exit code {code}: {second.last_lines()}"
                )
        problems += self._finish_and_compare(run, first)
        return "started a second session while the first trained", problems

    def _kill(self, times: _Times) -> tuple[str, list[str]]:
        """Kill sessions with SIGKILL at random moments, and continue each time."""

        def replace_folder(number: int) -> Path:
            for old in self.scratch.glob("killed-*"):
                shutil.rmtree(old)
            return self.scratch / f"killed-{number}"

        result = kill_and_continue(
            self._start_session,
            replace_folder,
            self._expected,
            kills=self.kills,
            span=times.session,
            training=times.training,
            chance=self.chance,
            after_kill=lambda _run, n: self.say(f"SIGKILL {n} of {self.kills}"),
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

    def _terminate(self) -> tuple[str, list[str]]:
        """Stop a session with SIGTERM, keep a copy of its folder, and continue it."""
        run = self.scratch / "stopped"
        problems = []
        # A step between two saves, so that the session saves it because of the signal.
        step = self.chance.randrange(2 * self._save_every + 1, 3 * self._save_every + 1)
        session = self._start_session(run)
        if session.wait_until(lambda: steps_done(run) >= step):
            session.send(signal.SIGTERM)
        code = session.wait()
        saved_step = newest_step(run)
        last_step = steps_done(run)
        if code != Interrupted.exit_code:
            problems.append(f"it ended with exit code {code}")
        elif saved_step != last_step:
            problems.append(f"it reached step {last_step} but saved step {saved_step}")
        else:
            shutil.copytree(run, self._interrupted, symlinks=True)
        problems += self._finish_and_compare(run, self._start_session(run))
        return f"after step {step}, saved at step {saved_step}, continued", problems

    def _damage(self, damage: Callable[[Path], str]) -> tuple[str, list[str]]:
        """Damage the newest checkpoint of the interrupted run, and continue it."""
        if not self._interrupted.exists():
            return "nothing", ["not tested, because no session stopped correctly"]
        run = self.scratch / "damaged"
        shutil.copytree(self._interrupted, run, symlinks=True)
        newest = newest_checkpoint(run)
        action = f"{damage(newest)} of the newest checkpoint ({newest.name})"
        session = self._start_session(run)
        problems = self._finish_and_compare(run, session)
        log_text = session.read_log().replace("\n", "")  # the console wraps long lines
        if f"skipped {newest.name}" not in log_text:
            problems.append("the damaged checkpoint was not reported")
        return action, problems

    def _flip_bit(self, checkpoint: Path) -> str:
        path = checkpoint / "model.safetensors"
        data = bytearray(path.read_bytes())
        bit = self.chance.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        return f"flipped bit {bit:,} of {path.name}"

    def _truncate(self, checkpoint: Path) -> str:
        path = checkpoint / "optimizer.safetensors"
        size = self.chance.randrange(path.stat().st_size)
        os.truncate(path, size)
        return f"truncated {path.name} to {size:,} bytes"
