"""Facts of a run that its bottleneck is told from: seconds by part, what the machine did, settings.

All come from `metrics.jsonl`. Every number in it may be absent, of another type, or another
version's: what cannot be read counts as not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toque.hardware.processor import WORTH_WHILE

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Host:
    """What kept threads from computing, as seconds and cores over all that was looked at."""

    seconds: float = 0.0
    """Of wall time that was looked at."""
    own_cores: float = 0.0
    others_cores: float = 0.0
    waiting_beside_others: float = 0.0
    """Seconds a thread was ready and had no core, while other programs kept cores busy."""
    waiting_alone: float = 0.0
    """The same while no other program did: the run's own threads were in each other's way."""
    memory_stall: float = 0.0
    throttled: float = 0.0
    asleep: float = 0.0
    """Seconds in which the main thread neither ran nor wanted to."""
    major_faults: float = 0.0


@dataclass(frozen=True)
class Facts:
    """What the files of a run say."""

    parts: Mapping[str, float]
    """Wall seconds by part (`part_clock.PARTS`), and `finishing` and `uploads` after the loop."""
    told_apart: bool
    """Whether the parts were measured one by one; earlier releases wrote some of them."""
    late: float
    """Seconds of the parts in the later half of the step events, and of them:"""
    compiling_late: float
    n_updates: int
    tokens: float
    update_seconds: float
    """Of the updates alone, waiting for data included."""
    pad_fraction: float
    utilisation: float | None
    """Model FLOP/s over the machine's rate, averaged over the updates' time."""
    n_evaluations: int
    n_saves: int
    skipped_saves: int
    host: Host | None
    start: Event
    """The newest start event."""
    gpu_busy: float | None
    """Mean utilisation of the GPUs in [0, 1], from system events."""
    gpu_throttled: Mapping[str, float]
    """Reason -> share of the system events that told it."""
    losses: Sequence[tuple[int, float]]
    held_out: Sequence[tuple[int, float]]
    grad_norm: float | None
    """Of the newest step event."""
    warnings: Sequence[str] = ()
    end: Event = field(default_factory=dict)
    """The newest end event; empty while the run goes on, or after a kill."""

    @property
    def wall(self) -> float:
        """Seconds in all."""
        return sum(self.parts.values())

    @property
    def device(self) -> str:
        """The kind of device that computed: cpu or cuda."""
        name = str(mapping(self.start.get("hardware")).get("device", ""))
        return "cuda" if "NVIDIA" in name or "Tesla" in name else "cpu"

    def part(self, *names: str) -> float:
        """Seconds of these parts."""
        return sum(self.parts.get(name, 0.0) for name in names)

    def setting(self, name: str) -> Any:
        """A setting of the section `train`; None where the files do not say."""
        return mapping(self.start.get("train")).get(name)

    def start_number(self, *path: str) -> float | None:
        """A number of the start event, by its place."""
        found: Any = self.start
        for name in path:
            found = mapping(found).get(name)
        return number(found)


def facts_of(events: Sequence[Event]) -> Facts | None:
    """The facts of a run's events, undone ones left out; None before its first update."""
    steps = [e for e in events if e.get("event") == "step"]
    if not steps:
        return None
    ends = [e for e in events if e.get("event") == "end"]
    starts = [e for e in events if e.get("event") == "start"]
    last = next((e for e in reversed(events) if e.get("event") in ("start", "end")), {})
    saves = [e for e in events if e.get("event") == "save"]
    scored = [e for e in events if e.get("event") == "evaluation"]
    parts, told_apart = _parts(events, steps, ends, saves, scored)
    if sum(parts.values()) <= 0.0:
        return None
    tokens = _sum(steps, "tokens")
    late = [mapping(e.get("parts")) for e in steps[len(steps) // 2 :]] if len(steps) > 1 else []
    counted = [(number(e.get("pad_fraction")), number(e.get("tokens")) or 0.0) for e in steps]
    weighed = [(pad, n) for pad, n in counted if pad is not None and 0.0 <= pad < 1.0]
    computed = sum(n / (1.0 - pad) for pad, n in weighed)
    return Facts(
        parts=parts,
        told_apart=told_apart,
        late=sum(_sum([part], name) for part in late for name in part),
        compiling_late=_sum(late, "compiling"),
        n_updates=_n_updates(steps, starts),
        tokens=tokens,
        update_seconds=_sum(steps, "seconds"),
        pad_fraction=1.0 - sum(n for _, n in weighed) / computed if computed else 0.0,
        utilisation=_utilisation(steps),
        n_evaluations=len(scored),
        n_saves=len(saves),
        skipped_saves=int(sum(number(mapping(e.get("saves")).get("skipped")) or 0 for e in ends)),
        host=_host(events),
        start=starts[-1] if starts else {},
        gpu_busy=_gpu_busy(events),
        gpu_throttled=_gpu_throttled(events),
        losses=[(e["step"], loss) for e in steps if (loss := number(e.get("loss"))) is not None],
        held_out=[
            (e["step"], loss)
            for e in scored
            if (loss := number(mapping(e.get("metrics")).get("loss"))) is not None
        ],
        grad_norm=number(steps[-1].get("grad_norm")),
        warnings=[str(e.get("message")) for e in events if e.get("event") == "warning"],
        end=last if last.get("event") == "end" else {},
    )


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    found = float(value) if abs(value) < 1e300 else math.inf
    return found if math.isfinite(found) else None


def mapping(value: object) -> Mapping[str, Any]:
    """A mapping, or an empty one."""
    return value if isinstance(value, dict) else {}


def _n_updates(steps: Sequence[Event], starts: Sequence[Event]) -> int:
    begun = min((int(number(e.get("step")) or 0) for e in starts), default=0)
    return max(1, int(number(steps[-1].get("step")) or 0) - begun)


def _parts(
    events: Sequence[Event],
    steps: Sequence[Event],
    ends: Sequence[Event],
    saves: Sequence[Event],
    scored: Sequence[Event],
) -> tuple[dict[str, float], bool]:
    told = [e for e in events if e.get("event") in ("step", "end", "after")]
    parts: dict[str, float] = {}
    for event in told:
        for name, value in mapping(event.get("parts")).items():
            seconds = number(value)
            if isinstance(name, str) and seconds is not None and seconds >= 0.0:
                parts[name] = parts.get(name, 0.0) + seconds
    if any(mapping(e.get("parts")) for e in steps):
        return parts, True
    waited = _sum(steps, "data_wait_seconds")
    found = {
        "data_wait": waited,
        "update": max(0.0, _sum(steps, "seconds") - waited),
        "evaluation": _sum(scored, "seconds"),
        "saving": _sum(saves, "blocked_seconds"),
    }
    rest = max(0.0, _sum(ends, "seconds") - sum(found.values()))
    after = {name: value for name, value in parts.items() if name in ("uploads", "finishing")}
    return {**found, "between": rest, **after}, False


def _sum(events: Iterable[Event], name: str) -> float:
    return sum(max(0.0, number(e.get(name)) or 0.0) for e in events)


def _utilisation(steps: Sequence[Event]) -> float | None:
    known = [(number(e.get("mfu")), number(e.get("seconds")) or 0.0) for e in steps]
    used = [(mfu, seconds) for mfu, seconds in known if mfu is not None and 0.0 <= mfu <= 1.0]
    total = sum(seconds for _, seconds in used)
    return sum(mfu * seconds for mfu, seconds in used) / total if total > 0 else None


def _host(events: Sequence[Event]) -> Host | None:
    looks = [mapping(e.get("host")) for e in events if e.get("event") == "system"]
    seconds = _sum(looks, "seconds")
    if seconds <= 0.0:
        return None

    def mean(name: str) -> float:
        return sum((number(h.get(name)) or 0.0) * (number(h.get("seconds")) or 0.0)
                   for h in looks) / seconds  # fmt: skip

    beside = [h for h in looks if (number(h.get("others_cores")) or 0.0) > WORTH_WHILE]
    waited = _sum(looks, "waiting_for_core_seconds")
    waited_beside = _sum(beside, "waiting_for_core_seconds")
    return Host(
        seconds=seconds,
        own_cores=mean("own_cores"),
        others_cores=mean("others_cores"),
        waiting_beside_others=waited_beside,
        waiting_alone=waited - waited_beside,
        memory_stall=_sum(looks, "memory_stall_seconds"),
        throttled=_sum(looks, "throttled_seconds"),
        asleep=_sum(looks, "asleep_seconds"),
        major_faults=_sum(looks, "major_faults"),
    )


def _gpus(events: Sequence[Event]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for event in events:
        gpus = event.get("gpus")
        if event.get("event") == "system" and isinstance(gpus, list):
            found += [mapping(gpu) for gpu in gpus if mapping(gpu)]
    return found


def _gpu_busy(events: Sequence[Event]) -> float | None:
    told = [number(gpu.get("utilisation_percent")) for gpu in _gpus(events)]
    known = [value / 100 for value in told if value is not None]
    return sum(known) / len(known) if known else None


def _gpu_throttled(events: Sequence[Event]) -> dict[str, float]:
    gpus = _gpus(events)
    reasons: dict[str, float] = {}
    for gpu in gpus:
        throttled = gpu.get("throttled")
        for reason in throttled if isinstance(throttled, list) else []:
            reasons[str(reason)] = reasons.get(str(reason), 0.0) + 1 / len(gpus)
    return reasons
