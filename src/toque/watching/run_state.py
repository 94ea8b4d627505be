"""State of a watched run: waiting, running, scoring, ended or killed, in a word and a sentence."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Literal

from toque.reporter import clock_text
from toque.reports.run_states import ended_in_words
from toque.watching.watched_run import WatchedRun

Kind = Literal["waiting", "running", "scoring", "ended", "killed", "silent"]
_QUIET_SECONDS: Final = 120.0
"""After which a run that nobody vouches for counts as silent, and one that runs says since when."""
_SCORED: Final = ("finished", "early_stopping")
"""Ends after which the best model is scored and written."""


@dataclass(frozen=True)
class RunState:
    """A word for a table, and a sentence."""

    kind: Kind
    said: str


def state_of(run: WatchedRun, *, now: float | None = None) -> RunState:
    """The state of a run as far as its files tell.

    Args:
        run: just refreshed.
        now: seconds since 1970.
    """
    now = time.time() if now is None else now
    holder, facts, at = run.holder, run.facts, run.facts.progress.step
    is_alive = holder.state == "alive" or run.is_elsewhere
    if not run.has_begun:
        said = "it is being set up" if is_alive else "figures appear here when training begins"
        return RunState("waiting", f"No update yet: {said}.")
    if facts.end is not None:
        return _after_the_end(run, is_alive=is_alive)
    quiet = _quiet_seconds(run, now)
    if is_alive:
        since = f"; nothing new for {clock_text(quiet)}" if quiet > _QUIET_SECONDS else ""
        return RunState("running", f"Running, at step {at:,}{since}.")
    if holder.state == "gone":
        who = f"process {holder.pid}" if holder.pid else "its process"
        return RunState(
            "killed",
            f"Killed: {who} is gone and wrote no end. The last figures are of step {at:,}; "
            f"{_continues(run)}",
        )
    if quiet <= _QUIET_SECONDS:
        return RunState("running", f"Running, at step {at:,}.")
    return RunState(
        "silent",
        f"No end was written and nothing came for {clock_text(quiet)}: killed, or stopped with its "
        f"machine. The last figures are of step {at:,}; {_continues(run)}",
    )


def _after_the_end(run: WatchedRun, *, is_alive: bool) -> RunState:
    end = run.facts.end or {}
    said = ended_in_words(end)
    if is_alive and not run.is_scored and end.get("reason") in _SCORED:
        return RunState("scoring", f"{said} Its best model is being scored and written.")
    if is_alive and end.get("reason") not in _SCORED:
        return RunState("waiting", f"{said} A new session is being set up.")
    return RunState("ended", said)


def _continues(run: WatchedRun) -> str:
    saved = run.facts.saved
    if not saved:
        return "nothing was saved, so the same command begins again."
    return f"the same command continues from step {saved:,}, the newest checkpoint."


def _quiet_seconds(run: WatchedRun, now: float) -> float:
    return 0.0 if run.written_at is None else max(0.0, now - run.written_at)
