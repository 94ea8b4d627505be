"""Experiment trackers: figures, texts, settings and the report of a run for Trackio and others.

Each tracker has a thread of its own. One that hangs, fails or is slow loses what it was to get,
which is counted. All of it is copied from the files of the run folder, which stay the record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from toque.training.callbacks import Callback
from toque.training.events import RunEnd, StepInfo
from toque.training.observers.background_thread import BackgroundThread
from toque.training.observers.tracker_names import TrackerNames
from toque.training.observers.tracker_services import Open, Row, Tracker
from toque.units import Progress

END_PATIENCE_SECONDS: Final = 10.0
"""How long a finished run waits for a tracker's last records."""
_MOST_WAITING: Final = 1000
_MOST_BYTES: Final = 1 << 22
"""Of samples.jsonl that are read at once: the newest texts."""


class TrackerFeed(Callback):
    """Feeds one tracker for as long as a command trains and writes the finished model.

    `take` is called with every record of metrics.jsonl; as a callback it sends the texts of an
    evaluation and reports losses; `finish` ends it.

    Args:
        name: of the tracker.
        open_tracker: connects to it; called in the background thread, where it may take long.
        warn: takes a sentence about what could not be delivered.
        names: what figures are called.
        samples: samples.jsonl of the run; None for no texts.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Open,
        *,
        warn: Callable[[Progress, str], None],
        names: TrackerNames | None = None,
        samples: Path | None = None,
    ) -> None:
        self._open = open_tracker
        self._names = TrackerNames() if names is None else names
        self._tracker: Tracker | None = None
        self._thread = BackgroundThread(
            f"records for {name}", capacity=_MOST_WAITING, describe=_first_line, warn=warn
        )
        self._samples = samples
        self._read = _size(samples)  # what earlier sessions wrote was sent then
        self._failed = False
        self._at = Progress()

    def take(self, record: Mapping[str, Any]) -> None:
        """Queue the figures of a record of metrics.jsonl."""
        if record["event"] == "end":
            self._failed = record["error"] is not None
            return
        step, values = int(record.get("step", 0)), self._names.figures(record)
        if values:
            self._thread.offer(lambda: self._opened().log(step, values))

    def on_step(self, info: StepInfo) -> None:
        """Warn when records are lost."""
        self._at = info.progress
        self._thread.warn_of_losses(info.progress)

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Send the texts that were written at it; whoever writes them comes before."""
        self._send_texts()

    def on_fit_end(self, end: RunEnd) -> None:
        """Report losses; the finished model's scores are still to come."""
        self._at = end.progress
        self._thread.warn_of_losses(end.progress)

    def finish(self, *, failed: bool, scores: Path | None = None, page: Path | None = None) -> None:
        """Send the last texts, the final scores and the report, and end; waits a little for it.

        Args:
            failed: whether the command ended with an error.
            scores: evaluation.json; left out where it is not there.
            page: the report.
        """
        failed, found = failed or self._failed, _json(scores)
        self._send_texts()
        step, final = found.get("step"), self._names.final(found)
        if final and isinstance(step, int):
            self._thread.offer(lambda: self._opened().log(step, final))
        if page is not None:
            self._thread.offer(lambda: self._opened().file(page))
        self._thread.offer(lambda: self._end(failed=failed))
        self._thread.close(self._at, patience_seconds=END_PATIENCE_SECONDS)

    def _send_texts(self) -> None:
        if self._samples is None:
            return
        begin, self._read = self._read, _size(self._samples)
        for step, rows in _by_step(_rows(self._samples, begin, self._read)).items():
            self._thread.offer(lambda step=step, rows=rows: self._opened().texts(step, rows))  # type: ignore[misc]

    def _opened(self) -> Tracker:
        if self._tracker is None:
            self._tracker = self._open()
        return self._tracker

    def _end(self, *, failed: bool) -> None:
        if self._tracker is not None:
            self._tracker.end(failed=failed)


def _rows(samples: Path, begin: int, end: int) -> Iterator[Row]:
    """The texts in a part of samples.jsonl; lines of another form are left out."""
    begin = max(begin, end - _MOST_BYTES)
    try:
        with samples.open("rb") as file:
            file.seek(begin)
            lines = file.read(end - begin).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            found = json.loads(line)
            score = found["metrics"].get("recipe_score")
            yield found["step"], found["prompt"], found["text"], found.get("reference"), score
        except (ValueError, KeyError, TypeError, AttributeError):
            continue


def _by_step(rows: Iterator[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(row)
    return found


def _size(path: Path | None) -> int:
    try:
        return path.stat().st_size if path is not None else 0
    except OSError:
        return 0


def _json(path: Path | None) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes()) if path is not None else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"the last failed with {type(error).__name__}" + (f": {lines[0][:200]}" if lines else "")
