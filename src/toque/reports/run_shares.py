"""Shares of a run's wall time by cause, computed from its events.

The run's clock gives the seconds of each part. The seconds of computing are divided further: waits
for cores and memory come from the kernel's counters, matmuls from their FLOPs and the machine's
measured speed, and padding from its share of the tokens. The rest is "other
computing". An unreadable value of `metrics.jsonl` counts as missing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from toque.hardware.processor import WORTH_WHILE
from toque.runs.history import number

Event = Mapping[str, Any]

DATA: Final = "waiting for data"
PRODUCTS: Final = "products"
PADDING: Final = "padding"
COMPUTING: Final = "other computing"
OPTIMIZER: Final = "optimizer"
RANKS: Final = "summing over processes"
HOST: Final = "records and callbacks"
STARTING: Final = "starting a session"
COMPILING: Final = "compiling"
PROFILING: Final = "profiling"
EVALUATION: Final = "evaluation"
SAVING: Final = "saving"
UPLOADS: Final = "uploads"
FINISHING: Final = "final scores and model"
OTHERS: Final = "other programs on the cores"
CROWDED: Final = "more threads than cores"
PAGING: Final = "waiting for memory"
THROTTLED: Final = "throttled by a limit on processor time"
STILL: Final = "standing still"

_PARTS_OF_SHARE: Final[Mapping[str, Sequence[str]]] = {
    DATA: ("data_wait",),
    RANKS: ("ranks",),
    STARTING: ("starting",),
    COMPILING: ("compiling",),
    PROFILING: ("profiling",),
    EVALUATION: ("evaluation", "texts"),
    SAVING: ("saving",),
    UPLOADS: ("uploads",),
    FINISHING: ("finishing",),
}
"""Shares that the run's clock measures directly."""
_OUTSIDE_LOOP: Final = (STARTING, COMPILING, PROFILING, FINISHING, UPLOADS)
_NOT_UPDATING: Final = (
    *("starting", "evaluation", "texts", "saving", "profiling", "uploads", "finishing"),
)
_MUCH_SLEEP: Final = 0.25
"""Share of computing. A main thread that sleeps longer was stopped or waits."""
_MAX_LOST: Final = 0.95
"""Largest share of computing that waits may take: several threads may wait in the same second."""


@dataclass(frozen=True)
class Share:
    """Part of the wall time."""

    name: str
    seconds: float
    share: float
    """Share of the wall time, from 0 to 1."""


@dataclass(frozen=True)
class Facts:
    """Measurements of a run, read from its events."""

    parts: Mapping[str, float]
    """Wall seconds by `phases.Part`, `finishing` and `uploads`."""
    late_compiling: float
    """Share of compiling in the seconds of the last half of the updates."""
    n_updates: int
    tokens: float
    update_seconds: float
    """Seconds of all updates, including waits for data."""
    pad_fraction: float
    utilisation: float | None
    """Model FLOP/s divided by the measured speed of the machine, during updates."""
    n_evaluations: int
    n_saves: int
    skipped_saves: int
    host: Mapping[str, float]
    """Sums over all samples of the machine, empty without samples.

    `waiting_beside_others` and `waiting_alone` are the seconds of threads that waited for a core,
    with and without other programs on the cores. `others_cores` is a mean.
    """
    start: Event
    """The newest start event."""
    gpu_busy: float | None
    """Mean utilisation of the GPUs, from 0 to 1."""
    gpu_throttled: Mapping[str, float]
    """Share of the samples of GPUs with a throttled clock, by reason."""
    losses: Sequence[float]
    held_out: Sequence[float]
    grad_norm: float | None
    """Gradient norm of the newest step event."""
    warnings: Sequence[str] = ()
    end: Event = field(default_factory=dict)
    """The end event of the newest session, if it has ended."""

    @property
    def wall(self) -> float:
        """Wall seconds of the run."""
        return sum(self.parts.values())

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """Shares of the wall time, the largest first. Their sum is 1."""
        seconds = {
            name: value for name, value in _divide_time(self).items() if value > 0.0
        }
        wall = sum(seconds.values())
        shares = [Share(name, value, value / wall) for name, value in seconds.items()]
        return tuple(sorted(shares, key=lambda share: -share.seconds))

    def wall_share(self, *names: str) -> float:
        """Sum these shares of the wall time."""
        return sum(share.share for share in self.shares if share.name in names)

    def share(self, *names: str) -> float:
        """Sum these shares of the training loop, without one-time work before and after it."""
        return self.wall_share(*names) / max(
            1e-9, 1.0 - self.wall_share(*_OUTSIDE_LOOP)
        )

    @property
    def computing(self) -> float:
        """Share of the forward and backward passes in the training loop."""
        return self.share(COMPUTING, PRODUCTS, PADDING)

    @property
    def device(self) -> str:
        """Kind of the device: cpu or cuda."""
        name = str(mapping(self.start.get("hardware")).get("device", ""))
        return "cuda" if "NVIDIA" in name or "Tesla" in name else "cpu"

    @property
    def computes_padding(self) -> bool:
        """True if attention is masked. Otherwise padding is left out."""
        return mapping(self.start.get("arithmetic")).get("attention_kind") == "masked"

    def part(self, *names: str) -> float:
        """Sum the seconds of some parts."""
        return sum(self.parts.get(name, 0.0) for name in names)

    def setting(self, name: str) -> Any:
        """Return a setting of the section `train`, or None if it is missing."""
        return mapping(self.start.get("train")).get(name)

    def start_number(self, *path: str) -> float | None:
        """Return a number of the start event by its path, or None if it is missing."""
        value: Any = self.start
        for name in path:
            value = mapping(value).get(name)
        return number(value)


def mapping(value: object) -> Mapping[str, Any]:
    """Return the value if it is a dict. Otherwise an empty dict."""
    return value if isinstance(value, dict) else {}


def facts_of(events: Sequence[Event]) -> Facts | None:
    """Collect the facts of a run. Return None before the first update.

    Events of undone updates are already removed.
    """
    by_kind = defaultdict[str, list[Event]](list)
    for event in events:
        by_kind[str(event.get("event"))].append(event)
    steps = by_kind["step"]
    parts = _sum_parts(
        event for event in events if event.get("event") in ("step", "end", "after")
    )
    if not steps or sum(parts.values()) <= 0.0:
        return None

    first_step = min((event["step"] for event in by_kind["start"]), default=0)
    sessions = [event for event in events if event.get("event") in ("start", "end")]
    has_ended = bool(sessions) and sessions[-1].get("event") == "end"
    late_parts = _sum_parts(steps[len(steps) // 2 :]) if len(steps) > 1 else {}
    late_seconds = sum(late_parts.values())
    utilisations = [
        (number(step.get("mfu")), _positive(step, "seconds")) for step in steps
    ]
    held_out = [
        number(mapping(e.get("metrics")).get("loss")) for e in by_kind["evaluation"]
    ]
    gpus: list[Event] = [gpu for e in by_kind["system"] for gpu in e.get("gpus", ())]
    gpu_percents = [number(gpu.get("utilisation_percent")) for gpu in gpus]
    throttled = Counter(reason for gpu in gpus for reason in gpu.get("throttled", ()))
    return Facts(
        parts=parts,
        late_compiling=late_parts.get("compiling", 0.0) / max(1e-9, late_seconds),
        n_updates=max(1, steps[-1]["step"] - first_step),
        tokens=_sum(steps, "tokens"),
        update_seconds=_sum(steps, "seconds"),
        pad_fraction=_pad_fraction(steps),
        utilisation=_mean(
            (m, s) for m, s in utilisations if m is not None and 0.0 <= m <= 1.0
        ),
        n_evaluations=len(by_kind["evaluation"]),
        n_saves=len(by_kind["save"]),
        skipped_saves=int(
            _sum([mapping(e.get("saves")) for e in by_kind["end"]], "skipped")
        ),
        host=_sum_samples([mapping(e.get("host")) for e in by_kind["system"]]),
        start=by_kind["start"][-1] if by_kind["start"] else {},
        gpu_busy=_mean(
            (percent / 100, 1.0) for percent in gpu_percents if percent is not None
        ),
        gpu_throttled={reason: n / len(gpus) for reason, n in throttled.items()},
        losses=[
            loss for step in steps if (loss := number(step.get("loss"))) is not None
        ],
        held_out=[loss for loss in held_out if loss is not None],
        grad_norm=number(steps[-1].get("grad_norm")),
        warnings=[str(event.get("message")) for event in by_kind["warning"]],
        end=sessions[-1] if has_ended else {},
    )


def _sum_parts(events: Iterable[Event]) -> dict[str, float]:
    """Sum the seconds of each part over some events."""
    parts: dict[str, float] = {}
    for event in events:
        for name, value in mapping(event.get("parts")).items():
            seconds = number(value)
            if isinstance(name, str) and seconds is not None and seconds >= 0.0:
                parts[name] = parts.get(name, 0.0) + seconds
    return parts


def _pad_fraction(steps: Sequence[Event]) -> float:
    """Compute the share of padding in all computed tokens."""
    tokens = computed = 0.0
    for step in steps:
        pad = number(step.get("pad_fraction"))
        if pad is not None and 0.0 <= pad < 1.0:
            n = number(step.get("tokens")) or 0.0
            tokens += n
            computed += n / (1.0 - pad)
    return 1.0 - tokens / computed if computed else 0.0


def _positive(event: Event, name: str) -> float:
    return max(0.0, number(event.get(name)) or 0.0)


def _sum(events: Iterable[Event], name: str) -> float:
    return sum(_positive(event, name) for event in events)


def _mean(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Compute the mean of values with weights, or None without weights."""
    weighted = list(pairs)
    total = sum(weight for _, weight in weighted)
    return (
        sum(value * weight for value, weight in weighted) / total
        if total > 0.0
        else None
    )


def _sum_samples(samples: Sequence[Event]) -> dict[str, float]:
    seconds = _sum(samples, "seconds")
    if seconds <= 0.0:
        return {}
    with_others = [s for s in samples if _positive(s, "others_cores") > WORTH_WHILE]
    waiting_beside_others = _sum(with_others, "waiting_for_core_seconds")
    others_seconds = sum(
        _positive(s, "others_cores") * _positive(s, "seconds") for s in samples
    )
    return {
        "seconds": seconds,
        "memory_stall_seconds": _sum(samples, "memory_stall_seconds"),
        "throttled_seconds": _sum(samples, "throttled_seconds"),
        "asleep_seconds": _sum(samples, "asleep_seconds"),
        "waiting_beside_others": waiting_beside_others,
        "waiting_alone": _sum(samples, "waiting_for_core_seconds")
        - waiting_beside_others,
        "others_cores": others_seconds / seconds,
    }


def _divide_time(facts: Facts) -> dict[str, float]:
    """Divide the wall seconds of a run among the shares."""
    computing = facts.part("forward_backward")
    optimizer = facts.part("clip", "optimizer")
    host = facts.part("observers")
    if facts.device == "cuda":
        # The host queues work ahead of the GPU, so its waits do not belong to a part.
        computing += optimizer + host
        optimizer = host = 0.0

    lost = _lost_seconds(facts, busy=computing + optimizer)
    remaining = 1.0 - sum(lost.values()) / max(computing + optimizer, 1e-9)
    computing *= remaining
    padding = computing * facts.pad_fraction if facts.computes_padding else 0.0
    products = min(_product_seconds(facts), computing - padding)
    measured = {name: facts.part(*parts) for name, parts in _PARTS_OF_SHARE.items()}
    return {
        **measured,
        **lost,
        HOST: host,
        OPTIMIZER: optimizer * remaining,
        PADDING: padding,
        PRODUCTS: products,
        COMPUTING: max(0.0, computing - padding - products),
    }


def _product_seconds(facts: Facts) -> float:
    """Estimate the seconds of matmuls with weights, from the machine's utilisation."""
    if facts.utilisation is None:
        return 0.0
    products = facts.start_number("arithmetic", "products")
    attention = facts.start_number("arithmetic", "attention")
    share = 1.0
    if products is not None and attention is not None and products > 0.0 <= attention:
        share = products / (products + attention)
    # The utilisation excludes updates that were slowed by a profiler, so do these seconds.
    seconds = min(facts.update_seconds, facts.wall - facts.part(*_NOT_UPDATING))
    return facts.utilisation * seconds * share


def _lost_seconds(facts: Facts, *, busy: float) -> dict[str, float]:
    """Estimate the seconds in which threads could not compute. Their sum is at most `busy`."""
    host = facts.host
    if not host:
        return {}
    lost = {
        OTHERS: host["waiting_beside_others"],
        CROWDED: host["waiting_alone"],
        PAGING: host["memory_stall_seconds"],
        THROTTLED: host["throttled_seconds"],
    }
    scale = (facts.wall - facts.part("uploads", "finishing")) / host["seconds"]
    if facts.device == "cpu":
        # The main thread sleeps while it waits for batches, saves, the compiler and other threads.
        # Much more sleep means that the process was stopped, or waited for a disk.
        expected = facts.part("data_wait", "saving", "starting", "compiling")
        asleep = host["asleep_seconds"] - expected / max(scale, 1e-9)
        lost[STILL] = asleep if asleep * scale > _MUCH_SLEEP * busy else 0.0
    total = scale * sum(lost.values())
    if total > 0.0:
        scale *= min(1.0, _MAX_LOST * busy / total)
    return {name: value * scale for name, value in lost.items()}
