"""Feeds of experiment trackers: a run's metrics, generated texts, settings and report.

Each feed has its own thread. It copies records from the run folder, and counts the records that it
loses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from toque.runs.history import number
from toque.runs.places import FolderPlace
from toque.runs.run_record import FinalScores, Tail
from toque.storage.json_files import decode_json
from toque.training.callbacks import Callback, RunEnd, StepInfo
from toque.training.observers.background_thread import BackgroundThread
from toque.training.observers.tracker_services import Connect, Row, Tracker
from toque.units import Progress

# Seconds that a finished run waits for a tracker's last records.
END_PATIENCE_SECONDS: Final = 10.0
# Maximum characters of a text for a tracker. samples.jsonl has the entire text.
_MAX_TEXT: Final = 2_000
_DIFFICULTIES: Final = {"easy": 1.0, "medium": 2.0}
_ANY_DIFFICULTY: Final = 3.0

Record = Mapping[str, Any]
Pairs = Iterator[tuple[str, object]]
Stages = Sequence[Record]


def tracker_values(
    record: Record,
    *,
    stages: Stages = (),
    recipe_scores: frozenset[str] = frozenset(),
) -> dict[str, float]:
    """Return the numbers in a record of metrics.jsonl by the names that other trainers use.

    Args:
        record: Record of an event. Some events have no numbers.
        stages: The curriculum's stages, with `min_quality` and `max_difficulty`.
        recipe_scores: The names of the scores of recipes.

    >>> tracker_values({"event": "step", "step": 3, "lr": 0.1, "mfu": None})
    {'train/learning_rate': 0.1}
    >>> tracker_values({"event": "evaluation", "metrics": {"loss": 2.0}})
    {'val_loss': 2.0}
    """
    match record["event"]:
        case "step":
            return _keep_numbers(_step_pairs(record, stages))
        case "evaluation":
            return _keep_numbers(_evaluation_pairs(record, recipe_scores))
        case "gradients":
            return _keep_numbers(_gradient_pairs(record))
        case "system":
            return _keep_numbers(_system_pairs(record))
    return {}


def _step_pairs(record: Record, stages: Stages) -> Pairs:
    for name, value in record.items():
        if name not in ("step", "stage", "peak_memory_bytes"):
            tracker_name = "learning_rate" if name == "lr" else name
            yield f"train/{tracker_name}", value
    for part, seconds in (record.get("parts") or {}).items():
        yield f"train/seconds/{part}", seconds
    yield "system/gpu_peak_memory_bytes", record.get("peak_memory_bytes")

    stage = record.get("stage")  # counted from 1
    if isinstance(stage, int) and 1 <= stage <= len(stages):
        bounds = stages[stage - 1]
        max_difficulty = str(bounds.get("max_difficulty"))
        difficulty_level = _DIFFICULTIES.get(max_difficulty, _ANY_DIFFICULTY)
        yield "curriculum/stage", stage
        yield "curriculum/quality_threshold", bounds.get("min_quality", 0.0)
        yield "curriculum/difficulty_level", difficulty_level


def _evaluation_pairs(record: Record, recipe_scores: frozenset[str]) -> Pairs:
    yield "val_epoch", record.get("epoch")
    yield "val_seconds", record.get("seconds")
    for prefix, key in (("val_", "metrics"), ("eval/", "texts")):
        for name, value in (record.get(key) or {}).items():
            name_prefix = "recipe/" if name in recipe_scores else prefix
            yield f"{name_prefix}{name}", value


def _gradient_pairs(record: Record) -> Pairs:
    for group, values in record.get("groups", {}).items():
        for name, value in values.items():
            yield f"gradients/{group}/{name}", value


def _system_pairs(record: Record) -> Pairs:
    for name, value in record.items():
        if name not in ("step", "seconds"):
            yield f"system/{name}", value
    for core, percent in enumerate(record.get("cpu_percent_by_core") or ()):
        yield f"system/cpu.{core}/percent", percent
    yield "system/memory_percent", _memory_percent(record)
    yield from _gpu_pairs(record.get("gpus") or ())


def _gpu_pairs(gpus: Sequence[Record]) -> Pairs:
    """Yield the readings of each GPU, and their means over the GPUs."""
    readings_by_name: dict[str, list[float]] = {}
    for gpu in gpus:
        prefix = f"system/gpu.{gpu['index']}"
        values = {
            "utilization": gpu.get("utilisation_percent"),
            "memory_percent": _memory_percent(gpu),
            "power_watts": gpu.get("power_watts"),
            "temperature_celsius": gpu.get("temperature_celsius"),
        }
        for name, value in values.items():
            yield f"{prefix}/{name}", value
            if (reading := number(value)) is not None:
                readings_by_name.setdefault(name, []).append(reading)
        yield f"{prefix}/throttled", float(bool(gpu.get("throttled")))
    for name, readings in readings_by_name.items():
        yield f"system/gpu_{name}", sum(readings) / len(readings)


def _memory_percent(record: Record) -> float | None:
    used = record.get("memory_used_bytes")
    total = record.get("memory_total_bytes")
    if used is None or not total:
        return None
    return 100.0 * float(used) / float(total)


def _keep_numbers(pairs: Pairs) -> dict[str, float]:
    numbers = ((name, number(value)) for name, value in pairs)
    return {name: value for name, value in numbers if value is not None}


class TrackerFeed(Callback):
    """Feed of one tracker while a command trains and writes the finished model.

    `take` receives every record of metrics.jsonl. As a callback, the feed sends generated texts and
    warns of lost records. `finish` ends it.

    Args:
        name: Name of the tracker.
        open_tracker: Function that connects the tracker. It may be slow, so the background thread
            calls it.
        warn: Function that shows a warning.
        values: Function that returns a record's numbers by their names in trackers.
        samples: Path of the file with the generated texts.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Connect,
        *,
        warn: Callable[[Progress, str], None],
        values: Callable[[Record], dict[str, float]] = tracker_values,
        samples: Path,
    ) -> None:
        self._open = open_tracker
        self._values = values
        self._tracker: Tracker | None = None
        self._thread = BackgroundThread(
            f"records for {name}", 1000, _describe_error, warn
        )
        self._texts = Tail(FolderPlace(samples.parent), samples.name)
        self._read_new_lines()  # skip them, because earlier sessions have sent their texts
        self._failed = False
        self._at = Progress()

    def take(self, record: Record) -> None:
        """Queue the numbers of a record of metrics.jsonl."""
        if record["event"] == "end":
            self._failed = record["error"] is not None
            return
        step = int(record.get("step", 0))
        values = self._values(record)
        if values:
            self._thread.offer(lambda: self._connect().log(step, values))

    def on_step(self, info: StepInfo) -> None:
        """Warn when records are lost."""
        self._at = info.progress
        self._thread.warn_of_losses(info.progress)

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Send the evaluation's texts, which an earlier callback has written to the file."""
        self._send_texts()

    def on_fit_end(self, end: RunEnd) -> None:
        """Warn of losses. The scores of the finished model follow in `finish`."""
        self._at = end.progress
        self._thread.warn_of_losses(end.progress)

    def finish(
        self, *, failed: bool, scores: Path | None = None, page: Path | None = None
    ) -> None:
        """Send the last texts, the final scores and the report, and end the tracker.

        Args:
            failed: True if the command failed.
            scores: The file evaluation.json, if it exists.
            page: The report, if it exists.
        """
        self._send_texts()
        if scores is not None:
            with suppress(OSError, msgspec.DecodeError):
                self._send_scores(decode_json(scores.read_bytes(), FinalScores))
        if page is not None:
            self._thread.offer(lambda: self._connect().store_file(page))

        def end() -> None:
            if self._tracker is not None:
                self._tracker.end(failed=failed or self._failed)

        self._thread.offer(end)
        self._thread.close(self._at, patience_seconds=END_PATIENCE_SECONDS)

    def _send_scores(self, scores: FinalScores) -> None:
        step = scores.step
        metrics = _keep_numbers(
            (f"final/{name}", value) for name, value in scores.metrics.items()
        )
        if metrics and step is not None:
            self._thread.offer(lambda: self._connect().log(step, metrics))

    def _send_texts(self) -> None:
        rows_by_step: dict[int, list[Row]] = {}
        for line in self._read_new_lines():
            if (row := _parse_sample(line)) is not None:
                rows_by_step.setdefault(row.step, []).append(row)
        for step, rows in rows_by_step.items():
            self._thread.offer(partial(self._log_texts, step, rows))

    def _log_texts(self, step: int, rows: Sequence[Row]) -> None:
        self._connect().log_texts(step, rows)

    def _read_new_lines(self) -> list[str]:
        lines: list[str] = []
        with suppress(OSError):  # the texts remain in their file
            lines += self._texts.read_lines()
            while self._texts.behind:
                lines += self._texts.read_lines()
        return lines

    def _connect(self) -> Tracker:
        if self._tracker is None:
            self._tracker = self._open()
        return self._tracker


def _parse_sample(line: str) -> Row | None:
    """Parse a line of samples.jsonl. Return None for a line in another format."""
    try:
        sample = decode_json(line, dict[str, Any])
        metrics = sample["metrics"]
        reference = sample.get("reference")
        if reference is not None:
            reference = reference[:_MAX_TEXT]
        return Row(
            sample["step"],
            sample["prompt"][:_MAX_TEXT],
            sample["text"][:_MAX_TEXT],
            reference,
            metrics.get("cookable"),
            metrics.get("recipe_score"),
        )
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return None


def _describe_error(error: Exception) -> str:
    description = f"the last failed with {type(error).__name__}"
    lines = str(error).strip().splitlines()
    return f"{description}: {lines[0][:200]}" if lines else description
