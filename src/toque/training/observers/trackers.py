"""Experiment trackers: metrics, texts, settings and the report of a run for Trackio and others.

Each has a thread of its own and copies what the run folder holds; what it loses is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from toque.runs.history import number
from toque.runs.places import FolderPlace
from toque.runs.run_record import FinalScores, Tail
from toque.storage.json_files import decode_json
from toque.training.callbacks import Callback, RunEnd, StepInfo
from toque.training.observers.background_thread import BackgroundThread
from toque.training.observers.tracker_services import Open, Row, Tracker
from toque.units import Progress

END_PATIENCE_SECONDS: Final = 10.0  # seconds that a finished run waits for a tracker's last records
_LONGEST: Final = 2_000  # characters of a text that is sent; samples.jsonl has all of it
_DIFFICULTIES: Final = {"easy": 1.0, "medium": 2.0}  # 3.0 stands for any

Pairs = Iterator[tuple[str, object]]
Stages = Sequence[Mapping[str, Any]]


def tracker_values(
    record: Mapping[str, Any], *, stages: Stages = (), recipe_scores: frozenset[str] = frozenset()
) -> dict[str, float]:
    """Numbers of a record of metrics.jsonl by the names that other trainers use; none for some.

    `stages` are the curriculum's, each with `min_quality` and `max_difficulty`, `recipe_scores` the
    names of scores that are of recipes.

    >>> tracker_values({"event": "step", "step": 3, "lr": 0.1, "mfu": None})
    {'train/learning_rate': 0.1}
    >>> tracker_values({"event": "evaluation", "metrics": {"loss": 2.0}})
    {'val_loss': 2.0}
    """
    found: Pairs = iter(())
    match record["event"]:
        case "step":
            found = _step(record, stages)
        case "evaluation":
            found = _evaluation(record, recipe_scores)
        case "gradients":
            found = _gradients(record)
        case "system":
            found = _system(record)
    return _numbers(found)


def _step(record: Mapping[str, Any], stages: Stages) -> Pairs:
    for name, value in record.items():
        if name not in ("step", "stage", "peak_memory_bytes"):
            yield f"train/{'learning_rate' if name == 'lr' else name}", value
    for part, seconds in (record.get("parts") or {}).items():
        yield f"train/seconds/{part}", seconds
    yield "system/gpu_peak_memory_bytes", record.get("peak_memory_bytes")
    stage = record.get("stage")
    if isinstance(stage, int) and 1 <= stage <= len(stages):
        bounds = stages[stage - 1]
        yield "curriculum/stage", stage
        yield "curriculum/quality_threshold", bounds.get("min_quality", 0.0)
        hardest = str(bounds.get("max_difficulty"))
        yield "curriculum/difficulty_level", _DIFFICULTIES.get(hardest, 3.0)


def _evaluation(record: Mapping[str, Any], recipe_scores: frozenset[str]) -> Pairs:
    yield "val_epoch", record.get("epoch")
    yield "val_seconds", record.get("seconds")
    for kind, of_kind in (("val_", "metrics"), ("eval/", "texts")):
        for name, value in (record.get(of_kind) or {}).items():
            yield f"recipe/{name}" if name in recipe_scores else f"{kind}{name}", value


def _gradients(record: Mapping[str, Any]) -> Pairs:
    for group, values in record.get("groups", {}).items():
        for name, value in values.items():
            yield f"gradients/{group}/{name}", value


def _system(record: Mapping[str, Any]) -> Pairs:
    for name, value in record.items():
        if name not in ("step", "seconds"):
            yield f"system/{name}", value
    for core, percent in enumerate(record.get("cpu_percent_by_core") or ()):
        yield f"system/cpu.{core}/percent", percent
    yield "system/memory_percent", _memory_percent(record)
    of_all: dict[str, list[float]] = {}
    for gpu in record.get("gpus") or ():
        values = {
            "utilization": gpu.get("utilisation_percent"),
            "memory_percent": _memory_percent(gpu),
            "power_watts": gpu.get("power_watts"),
            "temperature_celsius": gpu.get("temperature_celsius"),
        }
        for name, value in values.items():
            yield f"system/gpu.{gpu['index']}/{name}", value
            if (known := number(value)) is not None:
                of_all.setdefault(name, []).append(known)
        yield f"system/gpu.{gpu['index']}/throttled", float(bool(gpu.get("throttled")))
    for name, each in of_all.items():
        yield f"system/gpu_{name}", sum(each) / len(each)  # the mean of all GPUs


def _memory_percent(record: Mapping[str, Any]) -> float | None:
    used, total = record.get("memory_used_bytes"), record.get("memory_total_bytes")
    return 100.0 * used / total if used is not None and total else None


def _numbers(pairs: Pairs) -> dict[str, float]:
    return {name: found for name, value in pairs if (found := number(value)) is not None}


class TrackerFeed(Callback):
    """Feeds one tracker for as long as a command trains and writes the finished model.

    `take` gets every record of metrics.jsonl, of which `values` gives the numbers by their names in
    trackers; as a callback it sends texts (`samples`, their file) and reports losses; `finish` ends
    it. `open_tracker` is called in the background thread, where it may take long.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Open,
        *,
        warn: Callable[[Progress, str], None],
        values: Callable[[Mapping[str, Any]], dict[str, float]] = tracker_values,
        samples: Path | None = None,
    ) -> None:
        self._open, self._values = open_tracker, values
        self._tracker: Tracker | None = None
        self._thread = BackgroundThread(f"records for {name}", 1000, _first_line, warn)
        self._texts = Tail(FolderPlace(samples.parent), samples.name) if samples else None
        self._new_lines()  # what earlier sessions wrote was sent then
        self._failed = False
        self._at = Progress()

    def take(self, record: Mapping[str, Any]) -> None:
        """Queue the numbers of a record of metrics.jsonl."""
        if record["event"] == "end":
            self._failed = record["error"] is not None
            return
        step, values = int(record.get("step", 0)), self._values(record)
        if values:
            self._thread.offer(lambda: self._opened().log(step, values))

    def on_step(self, info: StepInfo) -> None:
        """Warn when records are lost."""
        self._at = info.progress
        self._thread.warn_of_losses(info.progress)

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Send the texts that were written at it; their writer comes before."""
        self._send_texts()

    def on_fit_end(self, end: RunEnd) -> None:
        """Report losses; the finished model's scores are still to come."""
        self._at = end.progress
        self._thread.warn_of_losses(end.progress)

    def finish(self, *, failed: bool, scores: Path | None = None, page: Path | None = None) -> None:
        """Send the last texts, the scores of evaluation.json and the report; wait a little."""
        self._send_texts()
        found = FinalScores()
        with suppress(OSError, msgspec.DecodeError):
            found = decode_json(scores.read_bytes(), FinalScores) if scores is not None else found
        step, final = found.step, _numbers((f"final/{n}", v) for n, v in found.metrics.items())
        if final and step is not None:
            self._thread.offer(lambda: self._opened().log(step, final))
        if page is not None:
            self._thread.offer(lambda: self._opened().file(page))

        def end() -> None:
            if self._tracker is not None:
                self._tracker.end(failed=failed or self._failed)

        self._thread.offer(end)
        self._thread.close(self._at, patience_seconds=END_PATIENCE_SECONDS)

    def _send_texts(self) -> None:
        by_step: dict[int, list[Row]] = {}
        for line in self._new_lines():
            if (row := _row(line)) is not None:
                by_step.setdefault(row[0], []).append(row)
        for step, rows in by_step.items():
            self._thread.offer(lambda step=step, rows=rows: self._opened().texts(step, rows))  # type: ignore[misc]

    def _new_lines(self) -> list[str]:
        found: list[str] = []
        with suppress(OSError):  # the texts stay in their file
            while self._texts is not None:
                found += self._texts.lines()
                if not self._texts.behind:
                    break
        return found

    def _opened(self) -> Tracker:
        if self._tracker is None:
            self._tracker = self._open()
        return self._tracker


def _row(line: str) -> Row | None:
    """A text of samples.jsonl; None for a line of another form."""
    try:
        found = decode_json(line, dict[str, Any])
        score = found["metrics"].get("recipe_score")
        cut = [None if text is None else text[:_LONGEST]
               for text in (found["prompt"], found["text"], found.get("reference"))]  # fmt: skip
        return found["step"], *cut, score
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"the last failed with {type(error).__name__}" + (f": {lines[0][:200]}" if lines else "")
