"""Repeated SIGKILLs of training sessions at random moments."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from toque.runs.history import METRICS
from toque.workflows.diagnosis.run_facts import (
    Facts,
    facts_of,
    find_differences,
    steps_done,
)
from toque.workflows.diagnosis.training_session import Session


@dataclass
class Kills:
    """Outcome of repeated kills."""

    moments: list[tuple[str, int]] = field(default_factory=list)
    """Activity and newest logged step at each kill."""
    finished: int = 0
    """Number of runs that reached their end."""
    problems: list[str] = field(default_factory=list)
    """Differences from the expected results, and failed sessions."""


def kill_and_continue(
    start: Callable[[Path], Session],
    new_folder: Callable[[int], Path],
    expected: Facts,
    *,
    kills: int,
    span: float,
    training: float = 0.0,
    chance: random.Random,
    facts: Callable[[Path], Facts] = facts_of,
    after_kill: Callable[[Path, int], None] = lambda _run, _kills: None,
) -> Kills:
    """Kill sessions with SIGKILL at random moments, and continue each run to its end.

    The moments are uniform in the `span` seconds of a session. A session may spend most of this
    time on its start, so every second moment is uniform in the `training` seconds after its first
    event. A run that ends before its kill is compared with `expected`, and a new run begins.

    Args:
        start: Begins or continues the training of a folder.
        new_folder: Returns the folder of a new run by its number.
        expected: Results of an undisturbed run.
        kills: Number of kills.
        span: Duration of an undisturbed session in seconds.
        training: Duration of an undisturbed session after its first event in seconds, or 0.
        chance: Source of the random moments.
        facts: Returns the results of a run.
        after_kill: Receives the folder and the number of kills so far.
    """
    result = Kills()
    run = new_folder(0)
    while True:
        began = time.time()
        session = start(run)
        n_kills = len(result.moments)
        if n_kills < kills:
            seconds = span
            if training > 0 and n_kills % 2 == 1:
                seconds = training
                session.wait_until(partial(_has_logged, run, began))
            if session.kill_after(chance.uniform(0.0, seconds)):
                result.moments.append((_activity(run, began), steps_done(run)))
                after_kill(run, n_kills + 1)
                continue  # the next session continues this run

        # The run ended without a kill.
        code = session.wait()
        result.finished += 1
        if code != 0:
            last_line = session.read_log().strip().splitlines()[-1:]
            problem = f"a session ended with {code}: {' '.join(last_line)}"
            result.problems.append(problem)
            return result
        differing = find_differences(expected, facts(run))
        result.problems += [f"other {name}" for name in differing]
        if n_kills == kills:
            return result
        run = new_folder(result.finished)


def _has_logged(run: Path, began: float) -> bool:
    """Return whether a session that began at a time has logged an event."""
    log = run / METRICS
    return log.exists() and log.stat().st_mtime >= began


def _activity(run: Path, began: float) -> str:
    """Describe the activity of a session at its kill. The session began at the time `began`."""
    if not _has_logged(run, began):
        return "starting"
    if any(path.stat().st_mtime >= began for path in run.glob("*/temp-*")):
        return "saving"
    return "ending" if (run / "evaluation.json").exists() else "training"
