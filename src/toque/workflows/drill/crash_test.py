"""Crash test: the faults that are done to a run, and what must come of each.

Every fault is done to short runs in a scratch folder; each must come to the end of a run that was
left alone: the same weights, optimizer and losses, bit for bit.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from toque.errors import CheckpointError, ConfigError, Interrupted, argument
from toque.reporter import LogReporter
from toque.workflows.drill.sessions import (
    Facts,
    Session,
    differing,
    events,
    facts_of,
    kill_and_continue,
    newest_checkpoint,
    newest_step,
    steps_done,
)
from toque.workflows.drill.tiny_disk import (
    NoTinyDiskError,
    mount_tiny_disk,
    pages_of,
    resize_tiny_disk,
)

INTERRUPTED: Final = Interrupted.exit_code
REFUSED: Final = CheckpointError.exit_code
_NO_TINY_DISK: Final = 79
"""Exit code of the full disk's process when the kernel refuses one; its output says why."""
_SAME: Final = "same bits at the end"

Start = Callable[[Path], Session]
"""Starts, or continues, the training of a run folder."""
Verdict = Literal["ok", "FAILED", "skipped"]
Say = Callable[[str, float | None], None]
"""Told what is being done, and about how many seconds are left."""


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    fault: str
    done: str
    expected: str
    happened: str
    verdict: Verdict
    seconds: float = 0.0


@dataclass
class Drill:
    """The faults, one after another.

    Args:
        start: starts the training of a folder.
        begin: makes an empty folder ready for a run.
        scratch: where all happens.
        steps: updates of each run.
        save_every: updates between saves; at most a fourth of `steps`.
        kills: SIGKILLs.
        chance: where random moments and bits come from.
        say: told how far it has come.
    """

    start: Start
    begin: Callable[[Path], None]
    scratch: Path
    steps: int
    save_every: int
    kills: int
    chance: random.Random
    say: Say
    outcomes: list[Outcome] = field(default_factory=list)
    _whole: Facts = field(default_factory=dict)
    _life: float = 0.0
    """Seconds of the undisturbed run."""
    _training: float = 0.0
    """Of these, those from its first event on."""
    _owed: float = 0.0
    """Runs' lives that are still to come, about."""
    _sessions: list[Session] = field(default_factory=list)

    def run(self) -> list[Outcome]:
        """Do everything; what a fault leaves is removed before the next.

        Raises:
            ConfigError: the run is shorter than the drill.
            CheckpointError: the run does not even train undisturbed; its last words are given.
        """
        faults = (
            (1.6, self._two_runs),
            (0.55 * self.kills + 1.0, self._killed),
            (1.3, self._terminated),
            (0.8, self._flipped),
            (0.8, self._cut),
            (2.0, self._full_disk),
        )
        self._owed = sum(lives for lives, _ in faults)
        try:
            self._undisturbed()
            for lives, fault in faults:
                began = time.monotonic()
                outcome = fault()
                seconds = round(time.monotonic() - began, 1)
                self.outcomes.append(replace(outcome, seconds=seconds))
                self._owed -= lives
        finally:
            for session in self._sessions:
                session.stop()
        return self.outcomes

    def _report(self, text: str, done: float = 0.0) -> None:
        self.say(text, max(0.0, self._owed - done) * self._life if self._life else None)

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
        self._report("a run that is left alone")
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

    def _judged(self, fault: str, done: str, expected: str, wrong: list[str], said: str) -> Outcome:
        happened = "; ".join(dict.fromkeys(wrong)) if wrong else said
        return Outcome(fault, done, expected, happened, "FAILED" if wrong else "ok")

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
        self._report("two runs in one folder")
        run = self._fresh("shared")
        first = self._started(run)
        wrong = []
        if first.wait_until(lambda: steps_done(run) >= 1):
            first.send(signal.SIGSTOP)  # or it may be done before the second has begun
            second = self._started(run)
            code = second.wait()
            first.send(signal.SIGCONT)
            if code != REFUSED or "in use" not in second.said():
                wrong.append(f"the second ended with exit code {code}: {_last_words(second)}")
        wrong += self._ends_the_same(run, first)
        return self._judged(
            "two runs in one folder",
            "started a second one while the first trained",
            f"second refused (exit code {REFUSED}), first undisturbed, {_SAME}",
            wrong,
            f"second refused, first finished, {_SAME}",
        )

    def _killed(self) -> Outcome:
        def said(kills: int) -> None:
            self._report(f"SIGKILL {kills} of {self.kills}", 0.55 * kills)

        def fresh(n: int) -> Path:
            for old in self.scratch.glob("killed-*"):
                shutil.rmtree(old)
            return self._fresh(f"killed-{n}")

        said(0)
        found = kill_and_continue(
            self._started, fresh, self._whole,
            kills=self.kills, span=self._life, training=self._training, chance=self.chance,
            say=said,
        )  # fmt: skip
        doing = ", ".join(f"{count} while {name}" for name, count in found.while_.items() if count)
        for old in self.scratch.glob("killed-*"):
            shutil.rmtree(old)
        return self._judged(
            "killed (SIGKILL)",
            f"at {found.kills} random moments ({doing}), continued each time",
            _SAME,
            found.wrong,
            f"{found.finished} finished {'run' if found.finished == 1 else 'runs'}: {_SAME}",
        )

    def _terminated(self) -> Outcome:
        """SIGTERM; leaves a copy of the interrupted run for the faults that damage it."""
        self._report("SIGTERM")
        run, wrong = self._fresh("stopped"), []
        after = self.chance.randrange(2 * self.save_every + 1, 3 * self.save_every + 1)
        session = self._started(run)
        if session.wait_until(lambda: steps_done(run) >= after):
            session.send(signal.SIGTERM)
        code = session.wait()
        saved, reached = newest_step(run), steps_done(run)
        if code != INTERRUPTED:
            wrong.append(f"it ended with exit code {code}")
        elif saved != reached:
            wrong.append(f"step {reached} was reached and {saved} saved")
        else:
            shutil.copytree(run, self.scratch / "interrupted", symlinks=True)
        wrong += self._ends_the_same(run)
        return self._judged(
            "told to stop (SIGTERM)",
            f"after step {after}, continued",
            f"step finished and saved, exit code {INTERRUPTED}, {_SAME}",
            wrong,
            f"saved at step {saved}, exit code {code}, {_SAME}",
        )

    def _flipped(self) -> Outcome:
        def flip(path: Path) -> str:
            data = bytearray(path.read_bytes())
            bit = self.chance.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            return f"bit {bit:,} of {path.name}"

        return self._damaged("a flipped bit", "flipped", "model.safetensors", flip)

    def _cut(self) -> Outcome:
        def cut(path: Path) -> str:
            size = self.chance.randrange(path.stat().st_size)
            with path.open("r+b") as file:
                file.truncate(size)
            return f"{path.name} at {size:,} bytes"

        return self._damaged("a file cut short", "cut", "optimizer.safetensors", cut)

    def _damaged(self, fault: str, verb: str, name: str, damage: Callable[[Path], str]) -> Outcome:
        self._report(fault)
        expected = f"the damage named, the checkpoint before it used, {_SAME}"
        mould, run = self.scratch / "interrupted", self.scratch / "damaged"
        if not mould.exists():
            return Outcome(fault, "nothing", expected, "no run was interrupted whole", "skipped")
        shutil.copytree(mould, run, symlinks=True)
        newest = newest_checkpoint(run)
        what = damage(newest / name)
        session = self._started(run)
        wrong = self._ends_the_same(run, session)
        if f"skipped {newest.name}" not in "".join(session.said().split("\n")):
            wrong.append("the damaged checkpoint was not named")
        return self._judged(
            fault,
            f"{verb} {what} of the newest checkpoint ({newest.name})",
            expected,
            wrong,
            f"named, fell back, {_SAME}",
        )

    def _full_disk(self) -> Outcome:
        self._report("a full disk")
        run = self._fresh("full")
        size = pages_of(newest_checkpoint(self.scratch / "interrupted"))
        log = self.scratch / "full.log"
        session = Session(lambda: self._on_a_tiny_disk(run, size, LogReporter(log)), log)
        self._sessions.append(session)
        code = session.wait()
        fault = "a full disk"
        expected = (
            "those saves fail, said and counted; training goes on; the checkpoint before is whole; "
            f"with room again {_SAME}"
        )
        done = "room for one checkpoint only, then for all"
        words = session.said().strip().splitlines()
        shutil.rmtree(run, ignore_errors=True)
        if code == _NO_TINY_DISK:
            return Outcome(fault, "nothing", expected, " ".join(words[-1:]), "skipped")
        wrong = words[-3:] if code != 0 else []
        return self._judged(fault, done, expected, wrong, f"said, trained on, {_SAME}")

    def _on_a_tiny_disk(self, run: Path, size: int, log: LogReporter) -> int:
        """In a process of its own, which alone sees the disk; logs what is wrong."""
        disk, wrong = run / "checkpoints", []
        disk.mkdir()
        try:
            # Half a checkpoint of room beside the first, however small: an adapter's is some kB.
            mount_tiny_disk(disk, size + size // 2 + 2 * os.sysconf("SC_PAGE_SIZE"))
        except NoTinyDiskError as error:
            log.line(f"no small disk can be made here: {error}")
            return _NO_TINY_DISK
        code = self.start(run).wait()
        failed = sum("could not be saved" in str(e.get("message")) for e in events(run))
        if code != REFUSED or steps_done(run) != self.steps:
            wrong.append(f"it ended with exit code {code} at step {steps_done(run)}")
        if not failed:
            wrong.append("no save was said to have failed")
        if newest_step(run) != self.save_every:
            wrong.append(f"the newest checkpoint is of step {newest_step(run)}")
        resize_tiny_disk(disk, 16 * size + (1 << 20))
        code = self.start(run).wait()
        if code != 0:
            wrong.append(f"with room again it ended with exit code {code}")
        wrong += [f"other {name}" for name in differing(self._whole, facts_of(run))]
        for fault in wrong:
            log.line(fault)
        return int(bool(wrong))


def _last_words(session: Session) -> str:
    return " ".join(session.said().strip().splitlines()[-3:])
