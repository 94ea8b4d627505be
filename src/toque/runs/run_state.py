"""State of a run according to its files: waiting, running, scoring, ended, killed or silent."""

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
"""Reasons after which a run can continue. After any other end, its model is scored."""
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
    """Describe the state of a run that has just been read. `now` is in seconds since 1970."""
    holder = run.holder
    history = run.history
    step = history.progress.step
    if run.at:
        return RunStatus("checkpoint", f"A checkpoint of step {step:,}.")
    # A process that reads its own run does not train it any more.
    is_alive = (
        holder.state == "alive" and holder.pid != str(os.getpid())
    ) or run.is_elsewhere
    if not history.start:
        outlook = (
            "it is being set up"
            if is_alive
            else "metrics appear here when training begins"
        )
        return RunStatus("waiting", f"No update yet: {outlook}.")

    if (end := history.end) is not None:
        sentence = describe_end(end)
        is_complete = end.get("reason") not in _CONTINUABLE and not end.get("error")
        if is_alive and is_complete and not run.is_scored:
            return RunStatus(
                "scoring", f"{sentence} Its best model is being scored and written."
            )
        if is_alive and not is_complete:
            return RunStatus("waiting", f"{sentence} A new session is being set up.")
        return RunStatus("ended", sentence)

    now = time.time() if now is None else now
    quiet = 0.0 if run.written_at is None else max(0.0, now - run.written_at)
    running = f"Running, at step {step:,}"
    if is_alive and quiet > _QUIET_SECONDS:
        return RunStatus("running", f"{running}; nothing new for {clock_text(quiet)}.")
    if is_alive or (holder.state != "gone" and quiet <= _QUIET_SECONDS):
        return RunStatus("running", f"{running}.")

    outlook = "Nothing was saved, so the same command starts again."
    if history.saved:
        outlook = f"The same command continues from step {history.saved:,}, the newest checkpoint."
    outlook = f"The last metrics are of step {step:,}. {outlook}"
    if holder.state == "gone":
        process = f"process {holder.pid}" if holder.pid else "its process"
        return RunStatus(
            "killed", f"Killed: {process} has ended without a record. {outlook}"
        )
    silence = (
        f"No end is recorded, and there are no new metrics for {clock_text(quiet)}"
    )
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
