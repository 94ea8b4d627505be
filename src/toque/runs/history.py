"""History of a run: the only reader of `metrics.jsonl`, event by event while the file grows.

The file may come from anyone, so an event of another form is left out whole.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Final, Literal, final

import msgspec

from toque.errors import ConfigError
from toque.units import Duration, Progress

MOST_POINTS: Final = 600  # points of a drawn line: about one a pixel
_SMOOTHED_OVER: Final = 0.04  # share of the values so far that the running mean looks back on

Point = tuple[float, float | None]
Points = tuple[list[float], list[float | None]]  # (xs, ys)
METRICS: Final = "metrics.jsonl"
FINISHED: Final = "finished"
"""Reason in the `end` event of a run that was trained to its end."""
SYSTEM: Final = "system "  # first part of the names of curves over the machine's own time
MOST_EVALUATIONS: Final = 2000
MOST_WARNINGS: Final = 40
_MOST_SESSIONS: Final = 200
_MOST_ROWS: Final = 1000  # updates' rows while a checkpoint is written in the background
_TURNED: Final = 1.02  # held-out loss over its lowest, from which it has risen for good
_MOST_GPUS: Final = 16
_MOST_CURVES: Final = 400

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)] | None  # None: not finite
_Value = Annotated[int, msgspec.Meta(gt=-(1 << 62), lt=1 << 62)] | _Number  # a count stays one


class _Placed(msgspec.Struct):
    step: _Count


class StartRow(_Placed):
    """A session begins."""

    epoch: _Number = None
    run_seconds: _Number = None
    parameters: dict[str, _Number] | None = None


class StepRow(_Placed):
    """An update, and sums over the updates since the row before."""

    epoch: Annotated[float, msgspec.Meta(ge=0, le=1e300)] = 0.0
    loss: _Number = None
    lr: _Number = None
    grad_norm: _Number = None
    tokens: _Count | None = None
    target_tokens: _Count | None = None
    seconds: _Number = None
    run_seconds: _Number = None  # time of the run so far, as train.stop_after counts it
    tokens_per_second: _Number = None
    data_wait_seconds: _Number = None
    pad_fraction: _Number = None
    mfu: _Number = None


class EvaluationRow(_Placed):
    """An evaluation on held-out data."""

    metrics: dict[str, _Value] = {}
    seconds: _Number = None


class SaveRow(_Placed):
    """A checkpoint."""

    blocked_seconds: _Number = None


class GpuRow(msgspec.Struct):
    """A GPU, as a `system` event has it."""

    index: _Count
    name: str | None = None
    utilisation_percent: _Number = None
    memory_used_bytes: _Number = None
    memory_total_bytes: _Number = None
    power_watts: _Number = None
    temperature_celsius: _Number = None
    throttled: list[str] = []


class SystemRow(_Placed):
    """A look at the machine, over the `seconds` since the look before."""

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


class GradientsRow(_Placed):
    """Gradient norms of groups of layers."""

    groups: dict[str, dict[str, _Number]] = {}


class EndRow(_Placed):
    """A session ends."""

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
"""Fields of an event that every reader may rely on, where they are present."""
_UNDONE: Final = frozenset({"step", "evaluation", "save", "system", "gradients"})
"""Events beyond a step that no longer count once a session continues from that step."""


@dataclass(frozen=True)
class MetricInfo:
    """Name for people, unit, and direction of a metric."""

    title: str
    unit: str
    better: Literal["lower", "higher"] | None = "higher"


METRIC_NAMES: Final[Mapping[str, MetricInfo]] = {
    "loss": MetricInfo("loss", "nats per target token", "lower"),
    "perplexity": MetricInfo("perplexity", "perplexity", "lower"),
    "bits_per_byte": MetricInfo("bits per byte", "bits per byte of text", "lower"),
    "repetition": MetricInfo("repetition", "share of four-word sequences", "lower"),
    "hallucinated_ingredients": MetricInfo(
        "hallucinated ingredients", "share of listed ingredients", "lower"
    ),
    "lr": MetricInfo("learning rate", "learning rate", None),
    "grad_norm": MetricInfo("gradient norm", "norm before clipping", None),
    "tokens_per_second": MetricInfo("speed", "tokens per second"),
    "data_wait": MetricInfo("waiting for data", "share of the time", "lower"),
    "pad_fraction": MetricInfo("padding", "share of computed tokens", "lower"),
    "mfu": MetricInfo("utilisation", "share of peak arithmetic"),
}
"""Metrics that are no scores of texts; of a score, higher is better unless it stands here."""


def metric_named(name: str) -> MetricInfo:
    """Title, unit and direction of a metric; of one of a user's own, as its name has it.

    >>> metric_named("ingredient_coverage").title, metric_named("loss").better
    ('ingredient coverage', 'lower')
    """
    title = name.replace("_", " ")
    # Of a task's answers by its name; there a score is the better the lower it is, too.
    lower = name.endswith(("_no_class", "_repetition", "_hallucinated_ingredients"))
    return METRIC_NAMES.get(name) or MetricInfo(title, title, "lower" if lower else "higher")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The events of a run but those that a continued session undid, torn lines and other forms."""
    events: list[dict[str, Any]] = []
    for event in _events(path):
        if event["event"] == "start":
            at = event["step"]
            events = [e for e in events if e["event"] not in _UNDONE or e["step"] <= at]
        events.append(event)
    return events


def history_of(path: Path) -> RunHistory:
    """The history in a whole file; an OSError where it cannot be read."""
    history = RunHistory()
    for event in _events(path):
        history.take(event)
    return history


def _events(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        yield from filter(None, map(event_in, lines))


def event_in(line: str) -> dict[str, Any] | None:
    """The event of one line; None for a torn line or an event of another form."""
    try:
        event = json.loads(line, parse_constant=lambda _: None)
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            return None
        msgspec.convert(event, _FORMS.get(event["event"], msgspec.Struct))
    except (ValueError, RecursionError):  # msgspec's is a ValueError
        return None
    return event


def number(value: object) -> float | None:
    """A finite number; None for anything else.

    >>> number(2), number(True), number(float("nan")), number("2")
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    found = float(value) if abs(value) < 1e300 else math.inf
    return found if math.isfinite(found) else None


def _extremes(points: Iterable[Point]) -> list[Point]:
    """The lowest, the highest and the first missing point of some neighbours, in their order."""
    found = list(points)
    known = [(y, at) for at, (_, y) in enumerate(found) if y is not None]
    # Of equal values the first one stays: the point must not wander while the curve grows.
    kept = {min(known)[1], max(known, key=itemgetter(0))[1]} if known else set()
    kept.update([at for at, (_, y) in enumerate(found) if y is None][:1])
    return [found[at] for at in sorted(kept)]


@final
class Curve:
    """A curve of any length in bounded memory, each point added in constant time.

    Of each block of neighbours the lowest and the highest point are kept, so no spike is lost; when
    there are too many blocks, neighbouring ones are joined. About `most` points are kept.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most_blocks = max(2, most // 2)  # a block draws up to two points
        self._size = 1
        self._blocks: list[list[Point]] = []
        self._in_last = 0
        self.last: Point | None = None
        """Newest point; drawn in any case."""

    def add(self, x: float, y: float | None) -> None:
        """Take a point in; x never falls, None breaks the line."""
        self.last = (x, y)
        if self._blocks and self._in_last < self._size:
            self._blocks[-1] = _extremes([*self._blocks[-1], self.last])
            self._in_last += 1
            return
        self._blocks.append([self.last])
        self._in_last = 1
        if len(self._blocks) > self._most_blocks:
            self._in_last += 0 if len(self._blocks) % 2 else self._size  # its neighbour is full
            self._size *= 2
            self._blocks = [
                _extremes(chain(*self._blocks[at : at + 2]))
                for at in range(0, len(self._blocks), 2)
            ]

    def drop_after(self, x: float) -> None:
        """Forget the points beyond `x`: a continued run computes them again."""
        while self._blocks and self._blocks[-1][0][0] > x:
            self._blocks.pop()
            self._in_last = self._size
        self.last = None
        if self._blocks:
            self._blocks[-1] = [point for point in self._blocks[-1] if point[0] <= x]
            self.last = self._blocks[-1][-1]

    def points(self) -> Points:
        """The points to draw, in their order."""
        found = [point for block in self._blocks for point in block]
        if self.last is not None and (not found or found[-1][0] < self.last[0]):
            found.append(self.last)
        return [x for x, _ in found], [y for _, y in found]

    def values(self) -> list[float]:
        """The y of each point to draw that has one."""
        return [y for y in self.points()[1] if y is not None]


@dataclass(frozen=True)
class RunningMean:
    """Exponential mean over the newest twenty-fifth of all values so far.

    At the start that is one value: a loss falls fastest there, and a mean would lie far above it.
    """

    value: float = 0.0
    n: int = 0

    def after(self, value: float) -> RunningMean:
        """The mean once a value has been added.

        >>> RunningMean().after(5.0).after(5.0)
        RunningMean(value=5.0, n=2)
        """
        n = self.n + 1
        return RunningMean(self.value + (value - self.value) / max(1.0, _SMOOTHED_OVER * n), n)


class Curves(dict[str, Curve]):
    """Curves by name, made when they are first added to; not endlessly many."""

    def __missing__(self, name: str) -> Curve:
        made = Curve()
        if len(self) < _MOST_CURVES:
            self[name] = made
        return made

    def points_of(self, name: str) -> Points:
        """The points of a curve; none where there is no such curve."""
        return self[name].points() if name in self else ([], [])


@dataclass
class RunSession:
    """A stretch of training from a start event to its end event."""

    from_step: int
    to_step: int | None = None  # None while it continues, or where it was killed
    seconds: float = 0.0
    reason: str = ""


@final
@dataclass
class RunHistory:
    """State of a run after the events so far: curves, sums and the newest event of each kind."""

    start: Mapping[str, Any] = field(default_factory=dict)  # newest start event, as it was recorded
    end: Mapping[str, Any] | None = None  # of the newest session; None before it, or if killed
    step: StepRow | None = None  # newest row of an update that counts
    system: SystemRow | None = None
    saved: int | None = None  # step of the newest checkpoint
    best: tuple[float, int] | None = None  # lowest held-out loss, and its step
    evaluations: deque[EvaluationRow] = field(
        default_factory=lambda: deque(maxlen=MOST_EVALUATIONS)
    )
    n_evaluations: int = 0
    evaluation_seconds: float = 0.0
    sessions: deque[RunSession] = field(default_factory=lambda: deque(maxlen=_MOST_SESSIONS))
    warnings: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=MOST_WARNINGS))
    """Step and message of the newest warnings."""
    n_warnings: int = 0
    progress: Progress = Progress()  # updates, epochs, tokens and seconds that are done
    gpu_joules: float | None = None  # energy while power was measured; None where it never was
    curves: Curves = field(default_factory=Curves)
    """Curves of the fields of step events, `loss smoothed`, `data_wait`, `held-out METRIC`,
    `group WHAT GROUP`, and SYSTEM with a field of system events or `gpu INDEX FIELD`."""
    _counted: Progress = Progress()  # `progress`, its seconds as train.stop_after counts them
    _began_at: Progress = Progress()  # `_counted` at the begin of this session
    _spent: float = 0.0  # seconds of this session: updates, evaluations and saves
    _smoothed: RunningMean = field(default_factory=RunningMean)
    _at_saves: dict[int, tuple[Progress, RunningMean]] = field(default_factory=dict)
    """Sums at each checkpoint, to which a session that continues from it returns."""
    _at_rows: dict[int, tuple[Progress, RunningMean]] = field(default_factory=dict)
    """Sums at the newest rows: a checkpoint is told of when it is written, some updates later, or
    never where the process was killed meanwhile."""

    @property
    def stop_after(self) -> Duration | None:
        """Length of the whole run; None where its start does not say."""
        try:
            return Duration.parse(str(self.start.get("stop_after", "")))
        except ConfigError:
            return None

    @property
    def done(self) -> float | None:
        """Share of the run that is done."""
        whole = self.stop_after
        if self.end is not None and self.end.get("reason") == FINISHED:
            return 1.0  # a limit on the time ends a run before its length
        if whole is None or whole.unit in ("%", "examples"):
            return None  # examples are not in the events
        return whole.fraction(self._counted)

    @property
    def turned(self) -> str:
        """A sentence where the held-out loss has clearly risen since its lowest; "" where not."""
        last = self.evaluations[-1] if self.evaluations else None
        loss = None if last is None else number(last.metrics.get("loss"))
        if last is None or loss is None or self.best is None or loss < _TURNED * self.best[0]:
            return ""
        lowest, step = self.best
        return (
            f"The held-out loss was lowest at step {step:,} of {last.step:,}, {lowest:.4f}, and is "
            f"{loss:.4f} now: since then the model has learnt its examples by heart. More data "
            "helps most, then a pretrained model (model.start_from) or a smaller one; a shorter "
            "run (train.stop_after, train.early_stopping) loses nothing."
        )

    @property
    def seconds_left(self) -> float | None:
        """Seconds until training ends, at the pace of this session; None before there is one."""
        whole, done = self.stop_after, self.done
        if whole is None or done is None:
            return None
        gained = done - whole.fraction(self._began_at)
        return self._spent * (1.0 - done) / gained if gained > 0 else None

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in an event that `event_in` found well-formed."""
        kind = event["event"]
        if kind == "start":
            self._start(event)
        elif kind == "end":
            self.end = event
            if self.sessions:
                session = self.sessions[-1]
                session.to_step, session.reason = int(event["step"]), str(event.get("reason"))
                session.seconds = number(event.get("seconds")) or 0.0
        elif kind == "warning":
            self.n_warnings += 1
            self.warnings.append((int(number(event.get("step")) or 0), str(event.get("message"))))
        elif kind in _FORMS:
            getattr(self, f"_{kind}")(msgspec.convert(event, _FORMS[kind]))

    def _start(self, event: Mapping[str, Any]) -> None:
        """Begin a session; what an earlier one did beyond its step is undone."""
        at = int(event["step"])
        for name, curve in self.curves.items():
            if not name.startswith(SYSTEM):  # the machine's time did pass
                curve.drop_after(at)
        known = self._at_saves.get(at) or self._at(at)
        self.progress, self._smoothed = known if at else (Progress(), RunningMean())
        self._at_saves = {step: kept for step, kept in self._at_saves.items() if step < at}
        self._at_saves[at] = self.progress, self._smoothed
        self._at_rows.clear()
        while self.evaluations and self.evaluations[-1].step > at:
            self.evaluations.pop()
            self.n_evaluations -= 1
        if self.best is not None and self.best[1] > at:
            held_out = [(loss, e.step) for e in self.evaluations
                        if (loss := e.metrics.get("loss")) is not None]  # fmt: skip
            self.best = min(held_out, default=None)
        epoch = max(0.0, number(event.get("epoch")) or 0.0)
        self.progress = replace(self.progress, step=at, epoch=epoch)
        if self.step is not None and self.step.step > at:
            self.step = None
        self.start, self.end, self.saved = event, None, at or None
        self._count(number(event.get("run_seconds")))
        self._began_at, self._spent = self._counted, 0.0
        self.sessions.append(RunSession(at))

    def _step(self, row: StepRow) -> None:
        x, seconds = float(row.step), row.seconds or 0.0
        for name in ("loss", "lr", "grad_norm", "tokens_per_second", "pad_fraction", "mfu"):
            self.curves[name].add(x, getattr(row, name))
        if seconds and row.data_wait_seconds is not None:
            self.curves["data_wait"].add(x, row.data_wait_seconds / seconds)
        if row.loss is not None:
            self._smoothed = self._smoothed.after(row.loss)
            self.curves["loss smoothed"].add(x, self._smoothed.value)
        done = self.progress
        self.progress = replace(
            done,
            step=row.step,
            epoch=row.epoch,
            tokens=done.tokens + (row.tokens or 0),
            target_tokens=done.target_tokens + (row.target_tokens or 0),
            seconds=done.seconds + seconds,
        )
        self._count(row.run_seconds)
        self._spent += seconds
        self.step = row
        self._at_rows[row.step] = (self.progress, self._smoothed)
        if len(self._at_rows) > _MOST_ROWS:
            del self._at_rows[next(iter(self._at_rows))]

    def _count(self, run_seconds: float | None) -> None:
        seconds = self.progress.seconds if run_seconds is None else run_seconds
        self._counted = replace(self.progress, seconds=seconds)

    def _at(self, step: int) -> tuple[Progress, RunningMean]:
        """Sums at a step; where it has no row, those so far come nearest."""
        return self._at_rows.get(step, (self.progress, self._smoothed))

    def _evaluation(self, row: EvaluationRow) -> None:
        for name, value in row.metrics.items():
            self.curves[f"held-out {name}"].add(float(row.step), value)
        loss = row.metrics.get("loss")
        if loss is not None and (self.best is None or loss < self.best[0]):
            self.best = (loss, row.step)
        self.evaluations.append(row)
        self.n_evaluations += 1
        self.evaluation_seconds += row.seconds or 0.0
        self._spent += row.seconds or 0.0

    def _save(self, row: SaveRow) -> None:
        self.saved = row.step
        self._at_saves[row.step] = self._at(row.step)
        self._spent += row.blocked_seconds or 0.0

    def _gradients(self, row: GradientsRow) -> None:
        for group, values in row.groups.items():
            if "grad_norm" in values:
                self.curves[f"group grad_norm {group}"].add(float(row.step), values["grad_norm"])

    def _system(self, row: SystemRow) -> None:
        self.system = row
        seconds = row.seconds or 0.0
        watts = [gpu.power_watts for gpu in row.gpus if gpu.power_watts is not None]
        if watts:
            self.gpu_joules = (self.gpu_joules or 0.0) + sum(watts) * seconds
        before = self.curves[f"{SYSTEM}cpu_percent"].last
        x = (before[0] if before else 0.0) + seconds / 60  # minutes that were measured
        for name, value in _drawn(row):
            self.curves[SYSTEM + name].add(x, value)
        for gpu in row.gpus[:_MOST_GPUS]:
            for name, value in _drawn(gpu):
                if value is not None:
                    self.curves[f"{SYSTEM}gpu {gpu.index} {name}"].add(x, value)


def _drawn(row: SystemRow | GpuRow) -> Iterator[tuple[str, float | None]]:
    """Fields that a unit ends, bytes in GB and MB a second."""
    for name in row.__struct_fields__:
        unit = next((size for end, size in _UNITS.items() if name.endswith(end)), None)
        if unit is not None:
            value = getattr(row, name)
            yield name, None if value is None else value / unit


_UNITS: Final = {
    "_percent": 1.0,
    "_bytes": 1e9,
    "_bytes_per_second": 1e6,
    "_watts": 1.0,
    "_celsius": 1.0,
}
