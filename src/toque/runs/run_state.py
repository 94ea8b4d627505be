"""State of a run as its files tell it: waiting, running, scoring, ended, killed or silent."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from toque.reporter import clock_text
from toque.runs.run_record import RunRecord

Kind = Literal["waiting", "running", "scoring", "ended", "killed", "silent", "checkpoint"]
_QUIET_SECONDS: Final = 120.0  # without output, after which a run is silent or its silence is said
_LEFT: Final = ("interrupted", "taken_over", "folder moved")  # what goes on; other ends are scored
_ENDED: Final = {
    "finished": "Finished",
    "early_stopping": "Stopped early, as requested",
    "interrupted": "Interrupted and saved; the same command continues it",
    "non_finite": "Stopped on a loss that is not finite",
}


@dataclass(frozen=True)
class RunStatus:
    """State of a run in a word, for a table, and in a sentence."""

    kind: Kind
    sentence: str


def state_of(run: RunRecord, *, now: float | None = None) -> RunStatus:
    """The state of a run, just read, as far as its files tell; `now` is in seconds since 1970."""
    now = time.time() if now is None else now
    holder, history, at = run.holder, run.history, run.history.progress.step
    if run.at:
        return RunStatus("checkpoint", f"A checkpoint of step {at:,}.")
    # A process that reads its own run is not training it any more.
    is_alive = (holder.state == "alive" and holder.pid != str(os.getpid())) or run.is_elsewhere
    if not history.start:
        outlook = "it is being set up" if is_alive else "metrics appear here when training begins"
        return RunStatus("waiting", f"No update yet: {outlook}.")
    if (end := history.end) is not None:
        words = ended_in_words(end)
        is_whole = end.get("reason") not in _LEFT and not end.get("error")
        if is_alive and is_whole and not run.is_scored:
            return RunStatus("scoring", f"{words} Its best model is being scored and written.")
        if is_alive and not is_whole:
            return RunStatus("waiting", f"{words} A new session is being set up.")
        return RunStatus("ended", words)
    quiet = 0.0 if run.written_at is None else max(0.0, now - run.written_at)
    if is_alive:
        since = f"; nothing new for {clock_text(quiet)}" if quiet > _QUIET_SECONDS else ""
        return RunStatus("running", f"Running, at step {at:,}{since}.")
    then = "nothing was saved, so the same command begins again."
    if history.saved:
        then = f"the same command continues from step {history.saved:,}, the newest checkpoint."
    last = f"The last metrics are of step {at:,}; {then}"
    if holder.state == "gone":
        who = f"process {holder.pid}" if holder.pid else "its process"
        return RunStatus("killed", f"Killed: {who} is gone and recorded no end. {last}")
    if quiet <= _QUIET_SECONDS:
        return RunStatus("running", f"Running, at step {at:,}.")
    return RunStatus(
        "silent",
        f"No end is recorded and nothing came for {clock_text(quiet)}: killed, or stopped with its "
        f"machine. {last}",
    )


def ended_in_words(end: Mapping[str, Any]) -> str:
    """An `end` event as a sentence.

    >>> ended_in_words({"event": "end", "step": 1200, "reason": "early_stopping"})
    'Stopped early, as requested, at step 1,200.'
    """
    reason = str(end.get("reason"))
    words = _ENDED.get(reason, reason.replace("_", " ").capitalize())
    error = f" ({end['error']})" if end.get("error") else ""
    return f"{words}{error}, at step {end['step']:,}."
