"""History of a run, built from the events in `metrics.jsonl` while the file grows.

The file is untrusted, so malformed events are skipped.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, final

import msgspec

from toque.errors import ConfigError
from toque.runs.curves import Curves, RunningMean
from toque.runs.metric_names import ACCURACY, MARGIN, PAIR_LOSS, REWARD, name_pair_loss
from toque.units import Duration, Progress

METRICS: Final = "metrics.jsonl"
FINISHED: Final = "finished"
"""Reason in the `end` event of a complete run."""
SYSTEM: Final = "system "
"""Prefix for the names of curves about the machine, over time."""
_MAX_EVALUATIONS: Final = 2000
_MAX_WARNINGS: Final = 40
_MAX_SESSIONS: Final = 200
_MAX_STEPS: Final = 1000
"""Number of steps with stored sums, because checkpoints are written in the background."""
_RISE_RATIO: Final = 1.02
"""Ratio of the held-out loss to its minimum that counts as a rise."""
_MIN_RISE: Final = 0.01
"""Smallest rise in nats, because the loss of pairs may be almost 0."""
_MAX_GPUS: Final = 16

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)] | None
"""Finite number, or None for infinity and NaN."""
_Value = Annotated[int, msgspec.Meta(gt=-(1 << 62), lt=1 << 62)] | _Number
"""Integer or `_Number`."""


class _Row(msgspec.Struct):
    step: _Count


class StartRow(_Row):
    """Start of a session."""

    epoch: _Number = None
    run_seconds: _Number = None
    parameters: dict[str, _Number] | None = None


class StepRow(_Row):
    """Update. Its sums cover the updates since the previous row."""

    epoch: Annotated[float, msgspec.Meta(ge=0, le=1e300)] = 0.0
    loss: _Number = None
    lr: _Number = None
    grad_norm: _Number = None
    tokens: _Count | None = None
    target_tokens: _Count | None = None
    seconds: _Number = None
    run_seconds: _Number = None
    """Seconds so far that count towards train.stop_after."""
    tokens_per_second: _Number = None
    data_wait_seconds: _Number = None
    pad_fraction: _Number = None
    mfu: _Number = None
    parts: dict[str, _Number] = {}
    """Seconds of each `phases.Part`."""
    reward: _Number = None
    reward_std: _Number = None
    equal_groups: _Number = None
    cut_texts: _Number = None
    entropy: _Number = None
    text_tokens: _Number = None
    kl: _Number = None
    accuracy: _Number = msgspec.field(default=None, name=ACCURACY)
    margin: _Number = msgspec.field(default=None, name=MARGIN)
    chosen_logps: _Number = msgspec.field(default=None, name="logps/chosen")
    rejected_logps: _Number = msgspec.field(default=None, name="logps/rejected")

    @property
    def measure(self) -> str:
        """Name of the value that training improves: reward, pair_loss or loss."""
        if self.reward is not None:
            return REWARD
        return "loss" if self.accuracy is None else PAIR_LOSS

    @property
    def value(self) -> float | None:
        """Value of `measure`."""
        return self.loss if self.reward is None else self.reward


class EvaluationRow(_Row):
    """Evaluation on held-out data."""

    metrics: dict[str, _Value] = {}
    seconds: _Number = None


class SaveRow(_Row):
    """Saved checkpoint."""

    blocked_seconds: _Number = None


class GpuRow(msgspec.Struct):
    """Sample of a GPU in a `system` event."""

    index: _Count
    name: str | None = None
    utilisation_percent: _Number = None
    memory_used_bytes: _Number = None
    memory_total_bytes: _Number = None
    power_watts: _Number = None
    temperature_celsius: _Number = None
    throttled: list[str] = []


class SystemRow(_Row):
    """Sample of the machine, over the `seconds` since the previous sample."""

    seconds: _Number = None
    cpu_percent: _Number = None
    cpu_percent_by_core: list[_Number] = []
    process_cpu_percent: _Number = None
    memory_used_bytes: _Number = None
    memory_total_bytes: _Number = None
    process_resident_bytes: _Number = None
    disk_read_bytes_per_second: _Number = None
    disk_write_bytes_per_second: _Number = None
    network_received_bytes_per_second: _Number = None
    network_sent_bytes_per_second: _Number = None
    gpus: list[GpuRow] = []


class GradientsRow(_Row):
    """Gradient norms of groups of layers."""

    groups: dict[str, dict[str, _Number]] = {}


class EndRow(_Row):
    """End of a session."""

    seconds: _Number = None


_FORMS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "start": StartRow,
    "step": StepRow,
    "evaluation": EvaluationRow,
    "save": SaveRow,
    "system": SystemRow,
    "gradients": GradientsRow,
    "end": EndRow,
}
"""Types of the checked fields, by kind of event."""
_UNDONE: Final = frozenset({"step", "evaluation", "save", "system", "gradients"})
"""Kinds of events that a session undoes if it continues from an earlier step."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a run's valid events, except events that a continued session has undone."""
    events: list[dict[str, Any]] = []
    for event in _read_events(path):
        if event["event"] == "start":
            step = event["step"]
            events = [
                earlier
                for earlier in events
                if earlier["event"] not in _UNDONE or earlier["step"] <= step
            ]
        events.append(event)
    return events


def read_history(path: Path) -> RunHistory:
    """Read a run's history from its entire file.

    Raises:
        OSError: The file cannot be read.
    """
    history = RunHistory()
    for event in _read_events(path):
        history.add(event)
    return history


def _read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the valid events in a file."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        yield from filter(None, map(parse_event, lines))


def parse_event(line: str) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl. Return None if it is incomplete or not a valid event."""
    try:
        event = json.loads(line, parse_constant=lambda _: None)
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            return None
        msgspec.convert(event, _FORMS.get(event["event"], msgspec.Struct))
    except (ValueError, RecursionError):  # msgspec.ValidationError is a ValueError
        return None
    return event


def number(value: object) -> float | None:
    """Convert a JSON number to a finite float. Return None for any other value.

    >>> number(2), number(True), number(float("nan")), number("2")
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # The comparison is false for NaN. A larger integer may overflow a float.
    return float(value) if abs(value) < 1e300 else None


_STEP_CURVES: Final = (
    "lr",
    "grad_norm",
    "tokens_per_second",
    "pad_fraction",
    "mfu",
)
"""Plotted fields of every `StepRow`."""
_OBJECTIVE_CURVES: Final = (
    "equal_groups",
    "cut_texts",
    "entropy",
    "text_tokens",
    "kl",
    ACCURACY,
    MARGIN,
    "logps/chosen",
    "logps/rejected",
)
"""Plotted fields that only some objectives measure."""


class _Sums(NamedTuple):
    """Sums of a run up to a step."""

    progress: Progress = Progress()
    smoothed: RunningMean = RunningMean()


@dataclass
class RunSession:
    """Part of a run, from a start event to an end event."""

    from_step: int
    to_step: int | None = None
    """Last step. None if the session is still running or was killed."""
    seconds: float = 0.0
    reason: str = ""


@final
@dataclass
class RunHistory:
    """Curves, sums and newest events of a run, updated event by event."""

    start: Mapping[str, Any] = field(default_factory=dict)
    """Newest start event."""
    end: Mapping[str, Any] | None = None
    """End event of the newest session. None if the session is still running or was killed."""
    step: StepRow | None = None
    """Newest update."""
    system: SystemRow | None = None
    saved: int | None = None
    """Step of the newest checkpoint."""
    best: tuple[float, int] | None = None
    """Lowest held-out loss and its step."""
    measure: str = "loss"
    """`StepRow.measure` of the newest update."""
    evaluations: deque[EvaluationRow] = field(
        default_factory=lambda: deque(maxlen=_MAX_EVALUATIONS)
    )
    n_evaluations: int = 0
    evaluation_seconds: float = 0.0
    sessions: deque[RunSession] = field(
        default_factory=lambda: deque(maxlen=_MAX_SESSIONS)
    )
    warnings: deque[tuple[int, str]] = field(
        default_factory=lambda: deque(maxlen=_MAX_WARNINGS)
    )
    """Step and message of the newest warnings."""
    n_warnings: int = 0
    progress: Progress = Progress()
    """Updates, epochs, tokens and seconds so far."""
    gpu_joules: float | None = None
    """Energy of the GPUs while their power was measured. None if it was never measured."""
    curves: Curves = field(default_factory=Curves)
    """Curves by name: a field of step events, `MEASURE` and `MEASURE smoothed`, `reward high` and
    `reward low`, `data_wait`, `rollouts`, `held-out METRIC`, `group WHAT GROUP`, and SYSTEM with a
    field of system events or `gpu INDEX FIELD`."""
    _counted: Progress = Progress()
    """`progress`, but with the seconds that count towards train.stop_after."""
    _began_at: Progress = Progress()
    """`_counted` at the start of this session."""
    _spent_seconds: float = 0.0
    """Seconds spent on updates, evaluations and saves in this session."""
    _smoothed: RunningMean = field(default_factory=RunningMean)
    _sums_at_saves: dict[int, _Sums] = field(default_factory=dict)
    """Sums at each checkpoint. A session that continues from a checkpoint starts with its sums."""
    _sums_at_steps: dict[int, _Sums] = field(default_factory=dict)
    """Sums at the newest steps. A checkpoint's event is written some updates later, or never if the
    process was killed."""

    @property
    def stop_after(self) -> Duration | None:
        """Length of the run, or None if it is unknown."""
        try:
            return Duration.parse(str(self.start.get("stop_after", "")))
        except ConfigError:
            return None

    @property
    def done(self) -> float | None:
        """Completed fraction of the run, or None if it is unknown."""
        length = self.stop_after
        if self.end is not None and self.end.get("reason") == FINISHED:
            return 1.0  # a time limit may end a run before its length is reached
        if length is None or length.unit in ("%", "examples"):
            return None  # events do not count examples
        return length.fraction(self._counted)

    @property
    def overfitting_note(self) -> str:
        """Message for the user if the held-out loss has clearly risen above its minimum, or ""."""
        if not self.evaluations or self.best is None or self.measure == REWARD:
            return ""
        last = self.evaluations[-1]
        loss = number(last.metrics.get("loss"))
        lowest, step = self.best
        if loss is None or loss < max(_RISE_RATIO * lowest, lowest + _MIN_RISE):
            return ""
        return (
            f"The held-out loss was lowest at step {step:,} of {last.step:,} ({lowest:.4f}) and is "
            f"now {loss:.4f}: the model has begun to memorise its examples. More data helps most, "
            "then a pretrained model (model.start_from) or a smaller model. A shorter run "
            "(train.stop_after, train.early_stopping) loses nothing."
        )

    @property
    def seconds_left(self) -> float | None:
        """Seconds until training ends at this session's pace. None before the first update."""
        length, done = self.stop_after, self.done
        if length is None or done is None:
            return None
        session_share = done - length.fraction(self._began_at)
        if session_share <= 0:
            return None
        return self._spent_seconds * (1.0 - done) / session_share

    def add(self, event: Mapping[str, Any]) -> None:
        """Update the history with an event that `parse_event` returned."""
        kind = event["event"]
        if kind == "start":
            self._start_session(event)
        elif kind == "end":
            self._end_session(event)
        elif kind == "warning":
            step = int(number(event.get("step")) or 0)
            self.warnings.append((step, str(event.get("message"))))
            self.n_warnings += 1
        elif kind in _FORMS:
            add_row = getattr(self, f"_add_{kind}")  # e.g. `_add_step`
            add_row(msgspec.convert(event, _FORMS[kind]))

    def _start_session(self, event: Mapping[str, Any]) -> None:
        """Start a session, and discard earlier sessions' events past the step it starts from."""
        step = int(event["step"])
        self._undo_after(step)
        self._restore_sums(step)
        epoch = max(0.0, number(event.get("epoch")) or 0.0)
        self.progress = replace(self.progress, step=step, epoch=epoch)
        self.start = event
        self.end = None
        self.saved = step or None  # a session from step 0 has no checkpoint
        self._set_counted(number(event.get("run_seconds")))
        self._began_at = self._counted
        self._spent_seconds = 0.0
        self.sessions.append(RunSession(step))

    def _undo_after(self, step: int) -> None:
        """Remove points, evaluations and the newest update after a step."""
        for name, curve in self.curves.items():
            # The x values of system curves are measured minutes, not steps.
            if not name.startswith(SYSTEM):
                curve.drop_after(step)

        while self.evaluations and self.evaluations[-1].step > step:
            self.evaluations.pop()
            self.n_evaluations -= 1
        if self.best is not None and self.best[1] > step:
            losses = [(row.metrics.get("loss"), row.step) for row in self.evaluations]
            known_losses = [(loss, at) for loss, at in losses if loss is not None]
            self.best = min(known_losses, default=None)
        if self.step is not None and self.step.step > step:
            self.step = None

    def _restore_sums(self, step: int) -> None:
        """Restore the sums at the step from which a session continues."""
        sums = _Sums()
        if step:
            sums = self._sums_at_saves.get(step) or self._sums_at(step)
        self.progress, self._smoothed = sums
        saves = self._sums_at_saves.items()
        earlier = {at: saved for at, saved in saves if at < step}
        self._sums_at_saves = earlier | {step: sums}
        self._sums_at_steps.clear()

    def _end_session(self, event: Mapping[str, Any]) -> None:
        """Record the end of the newest session."""
        self.end = event
        if self.sessions:
            session = self.sessions[-1]
            session.to_step = int(event["step"])
            session.reason = str(event.get("reason"))
            session.seconds = number(event.get("seconds")) or 0.0

    def _add_step(self, row: StepRow) -> None:
        """Add an update to the curves and the sums."""
        x = float(row.step)
        seconds = row.seconds or 0.0
        self._add_curves(x, row)
        self.measure = row.measure
        self.curves[row.measure].add(x, row.value)
        if row.value is not None:
            self._smoothed = self._smoothed.add(row.value)
            self.curves[f"{row.measure} smoothed"].add(x, self._smoothed.value)

        before = self.progress
        self.progress = replace(
            before,
            step=row.step,
            epoch=row.epoch,
            tokens=before.tokens + (row.tokens or 0),
            target_tokens=before.target_tokens + (row.target_tokens or 0),
            seconds=before.seconds + seconds,
        )
        self._set_counted(row.run_seconds)
        self._spent_seconds += seconds
        self.step = row
        self._sums_at_steps[row.step] = _Sums(self.progress, self._smoothed)
        if len(self._sums_at_steps) > _MAX_STEPS:
            oldest = next(iter(self._sums_at_steps))
            del self._sums_at_steps[oldest]

    def _add_curves(self, x: float, row: StepRow) -> None:
        """Add the fields of an update to the curves, except its `measure`."""
        fields = msgspec.to_builtins(row)
        for name in _STEP_CURVES:
            self.curves[name].add(x, fields[name])
        for name in _OBJECTIVE_CURVES:
            if fields[name] is not None:
                self.curves[name].add(x, fields[name])
        if row.reward is not None and row.reward_std is not None:
            self.curves["reward high"].add(x, row.reward + row.reward_std)
            self.curves["reward low"].add(x, row.reward - row.reward_std)

        seconds = row.seconds
        rollout_seconds = row.parts.get("rollouts")
        if seconds and rollout_seconds is not None:
            self.curves["rollouts"].add(x, rollout_seconds / seconds)
        elif seconds and row.data_wait_seconds is not None:
            self.curves["data_wait"].add(x, row.data_wait_seconds / seconds)

    def _set_counted(self, run_seconds: float | None) -> None:
        """Set `_counted`. If `run_seconds` is None, the seconds of all updates count."""
        seconds = self.progress.seconds if run_seconds is None else run_seconds
        self._counted = replace(self.progress, seconds=seconds)

    def _sums_at(self, step: int) -> _Sums:
        """Return the sums at a step, or the newest sums if the step is not remembered."""
        return self._sums_at_steps.get(step, _Sums(self.progress, self._smoothed))

    def _add_evaluation(self, row: EvaluationRow) -> None:
        """Add the metrics of an evaluation to the curves, and update `best`."""
        for name, value in name_pair_loss(row.metrics).items():
            self.curves[f"held-out {name}"].add(float(row.step), value)
        loss = row.metrics.get("loss")
        if loss is not None and (self.best is None or loss < self.best[0]):
            self.best = (loss, row.step)
        self.evaluations.append(row)
        self.n_evaluations += 1
        seconds = row.seconds or 0.0
        self.evaluation_seconds += seconds
        self._spent_seconds += seconds

    def _add_save(self, row: SaveRow) -> None:
        self.saved = row.step
        self._sums_at_saves[row.step] = self._sums_at(row.step)
        self._spent_seconds += row.blocked_seconds or 0.0

    def _add_gradients(self, row: GradientsRow) -> None:
        for group, values in row.groups.items():
            if "grad_norm" in values:
                curve = self.curves[f"group grad_norm {group}"]
                curve.add(float(row.step), values["grad_norm"])

    def _add_system(self, row: SystemRow) -> None:
        """Add a sample of the machine to the curves, and its GPUs' energy to `gpu_joules`."""
        self.system = row
        seconds = row.seconds or 0.0
        watts = [gpu.power_watts for gpu in row.gpus if gpu.power_watts is not None]
        if watts:
            self.gpu_joules = (self.gpu_joules or 0.0) + sum(watts) * seconds
        # Every sample has a point in this curve, so its last x is the minutes so far.
        previous = self.curves[f"{SYSTEM}cpu_percent"].last
        minutes = (previous[0] if previous else 0.0) + seconds / 60
        for name, value in _scaled_fields(row):
            self.curves[SYSTEM + name].add(minutes, value)
        for gpu in row.gpus[:_MAX_GPUS]:
            for name, value in _scaled_fields(gpu):
                if value is not None:
                    self.curves[f"{SYSTEM}gpu {gpu.index} {name}"].add(minutes, value)


def _scaled_fields(row: SystemRow | GpuRow) -> Iterator[tuple[str, float | None]]:
    """Yield the fields with a unit in their name, bytes in GB and rates in MB per second."""
    for name in row.__struct_fields__:
        for suffix, size in _UNITS.items():
            if name.endswith(suffix):
                value = getattr(row, name)
                yield name, None if value is None else value / size


_UNITS: Final = {
    "_percent": 1.0,
    "_bytes": 1e9,
    "_bytes_per_second": 1e6,
    "_watts": 1.0,
    "_celsius": 1.0,
}
"""Size of the plotted unit in the field's unit, by the suffix of the field's name."""
