"""Sessions of training in processes of their own, to be killed at any moment.

A session is forked from a process that has imported torch and transformers and computed nothing:
a restart costs tenths of a second, and is a fresh trainer all the same. (A process that has
computed must not be forked: its threads are not there in the child.)
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from toque.runs.history import METRICS, read_metrics
from toque.storage.atomic import sha256_of
from toque.storage.no_follow import open_append

_LOOK_EVERY: Final = 0.002
"""Seconds between two looks at a session that is waited for."""

Facts = Mapping[str, Any]
"""Results of training by name, for comparing: hashes, and the loss of every step."""


class Session:
    """One training process."""

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
        until = time.monotonic() + seconds
        if self.wait_until(lambda: time.monotonic() >= until):
            self.send(signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    def said(self) -> str:
        """The text that it printed."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""


def _run(body: Callable[[], int], log: Path) -> None:
    file = open_append(log)
    for standard in (1, 2):  # output and errors
        os.dup2(file, standard)
    sys.exit(body())


def preload() -> None:
    """Import what a session needs, and compute nothing."""
    for name in (
        "torch",
        "transformers.models.auto.modeling_auto",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.t5.modeling_t5",
        "toque.models.families",
        "toque.workflows.train",
    ):
        importlib.import_module(name)


def newest_checkpoint(run: Path) -> Path:
    """The folder of the newest checkpoint, whole or not; that of step 0, which is absent, if none.

    >>> newest_checkpoint(Path("no-run")).name
    'step-00000000'
    """
    steps = [path.name.rpartition("-")[2] for path in (run / "checkpoints").glob("step-*")]
    return run / "checkpoints" / f"step-{max(map(int, steps), default=0):08d}"


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint folder; 0 for none."""
    return int(newest_checkpoint(run).name.rpartition("-")[2])


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
    last = newest_checkpoint(run)
    files = {
        "weights": last / "model.safetensors",
        "optimizer": last / "optimizer.safetensors",
        **{f"model/{path.name}": path for path in (run / "model").glob("*.safetensors")},
    }
    hashes = {name: sha256_of(path) for name, path in files.items() if path.exists()}
    losses = {e["step"]: e["loss"] for e in events(run) if e["event"] == "step"}
    return {"last step": newest_step(run), **hashes, "losses": losses}


def _log_bytes(run: Path) -> int:
    return (run / METRICS).stat().st_size if (run / METRICS).exists() else 0


def _reports_more(run: Path, before: int) -> bool:
    return _log_bytes(run) > before


def differing(whole: Facts, other: Facts) -> list[str]:
    """Names of the facts that are not equal."""
    return [n for n in {**whole, **other} if whole.get(n) != other.get(n)]


@dataclass
class Kills:
    """The outcome of killing runs again and again."""

    kills: int = 0
    finished: int = 0
    """Runs that came to their end, each compared."""
    steps: list[int] = field(default_factory=list)
    """Newest step reported when each kill came."""
    while_: dict[str, int] = field(default_factory=lambda: {"starting": 0, "saving": 0})
    """Number of kills by what the session was doing."""
    wrong: list[str] = field(default_factory=list)
    """Differences, and sessions that failed, as sentences."""

    def note(self, run: Path, began: float) -> None:
        """Count a kill by what the session was doing."""
        self.kills += 1
        self.steps.append(steps_done(run))
        log = run / METRICS
        running = log.exists() and log.stat().st_mtime >= began
        unfinished = [p for p in run.glob("*/temp-*") if p.stat().st_mtime >= began]
        doing = "starting" if not running else "saving" if unfinished else "training"
        if doing == "training" and (run / "evaluation.json").exists():
            doing = "ending"
        self.while_[doing] = self.while_.get(doing, 0) + 1


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
    """SIGKILL at moments drawn evenly from each session's life.

    A run that comes to its end before its kill is compared, and the next one begins.

    Args:
        start: starts, or continues, the run in a folder.
        fresh: the folder of the nth run.
        whole: facts of a run that was left alone.
        kills: how many.
        span: seconds; the life of an undisturbed run.
        training: seconds of it after its first event. If not 0, every other kill is drawn from
            these: where starting takes longest, most kills would meet a session that starts.
        chance: where the moments come from.
        facts: how a finished run is described.
        after_kill: called with the folder and the number of kills before the run continues.
    """
    found, run = Kills(), fresh(0)
    while True:
        began, before = time.time(), _log_bytes(run)
        session = start(run)
        late = training > 0 and found.kills % 2 == 1
        if (
            found.kills < kills
            and (not late or session.wait_until(partial(_reports_more, run, before)))
            and session.killed_after(chance.uniform(0.0, training if late else span))
        ):
            found.note(run, began)
            after_kill(run, found.kills)
            continue
        code = session.wait()
        found.finished += 1
        if code != 0:
            last = session.said().strip().splitlines()[-1:]
            found.wrong.append(f"a session ended with {code}: {' '.join(last)}")
        else:
            found.wrong += [f"other {name}" for name in differing(whole, facts(run))]
        if found.kills >= kills or code != 0:
            return found
        run = fresh(found.finished)
