"""State of a run, read from its files: waiting, running, scoring, ended, killed or silent."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from toque.reporter import clock_text
from toque.runs.run_record import RunRecord

Kind = Literal[
    "waiting", "running", "scoring", "ended", "killed", "silent", "checkpoint"
]
_QUIET_SECONDS: Final = 120.0
"""Seconds without new metrics after which a run counts as silent."""
_CONTINUABLE: Final = ("interrupted", "taken_over", "folder moved")
"""Reasons for an end after which the run can continue. After any other end, the model is scored.
"""
_END_TEXTS: Final = {
    "finished": "Finished",
    "early_stopping": "Stopped early, as requested",
    "interrupted": "Interrupted and saved; the same command continues it",
    "non_finite": "Stopped on a loss that is not finite",
}


@dataclass(frozen=True)
class RunStatus:
    """State of a run as a word, for a table, and as a sentence."""

    kind: Kind
    sentence: str


def state_of(run: RunRecord, *, now: float | None = None) -> RunStatus:
    """Describe the state of a run that was just read. `now` is in seconds since 1970."""
    history = run.history
    if run.at:
        step = history.progress.step
        return RunStatus("checkpoint", f"A checkpoint of step {step:,}.")

    # A process that reads its own run has finished training it.
    holder = run.holder
    is_held = holder.state == "alive" and holder.pid != str(os.getpid())
    is_alive = is_held or run.is_elsewhere
    if not history.start:
        outlook = "metrics appear here when training begins"
        if is_alive:
            outlook = "it is being set up"
        return RunStatus("waiting", f"No update yet: {outlook}.")
    if history.end is not None:
        return _ended_state(history.end, is_alive=is_alive, is_scored=run.is_scored)

    now = time.time() if now is None else now
    quiet_seconds = 0.0
    if run.written_at is not None:
        quiet_seconds = max(0.0, now - run.written_at)
    return _unended_state(run, quiet_seconds, is_alive=is_alive)


def _ended_state(
    end: Mapping[str, Any], *, is_alive: bool, is_scored: bool
) -> RunStatus:
    """Describe a run after its newest session recorded an end."""
    sentence = describe_end(end)
    is_complete = end.get("reason") not in _CONTINUABLE and not end.get("error")
    if is_alive and not is_complete:
        return RunStatus("waiting", f"{sentence} A new session is being set up.")
    if is_alive and not is_scored:
        scoring = "Its best model is being scored and written."
        return RunStatus("scoring", f"{sentence} {scoring}")
    return RunStatus("ended", sentence)


def _unended_state(
    run: RunRecord, quiet_seconds: float, *, is_alive: bool
) -> RunStatus:
    """Describe a run without a recorded end of its newest session."""
    holder = run.holder
    step = run.history.progress.step
    is_quiet = quiet_seconds > _QUIET_SECONDS
    quiet = clock_text(quiet_seconds)
    if is_alive or (holder.state != "gone" and not is_quiet):
        note = f"; nothing new for {quiet}" if is_quiet else ""
        return RunStatus("running", f"Running, at step {step:,}{note}.")

    restart = "Nothing was saved, so the same command starts again."
    if saved := run.history.saved:
        restart = (
            f"The same command continues from step {saved:,}, the newest checkpoint."
        )
    outlook = f"The last metrics are of step {step:,}. {restart}"
    if holder.state == "gone":
        process = f"process {holder.pid}" if holder.pid else "its process"
        killed = f"Killed: {process} has ended without a record."
        return RunStatus("killed", f"{killed} {outlook}")
    silence = f"No end is recorded, and there are no new metrics for {quiet}"
    return RunStatus(
        "silent", f"{silence}: killed, or stopped with its machine. {outlook}"
    )


def describe_end(end: Mapping[str, Any]) -> str:
    """Describe an `end` event.

    >>> describe_end({"event": "end", "step": 1200, "reason": "early_stopping"})
    'Stopped early, as requested, at step 1,200.'
    """
    reason = str(end.get("reason"))
    text = _END_TEXTS.get(reason, reason.replace("_", " ").capitalize())
    error = f" ({end['error']})" if end.get("error") else ""
    return f"{text}{error}, at step {end['step']:,}."
