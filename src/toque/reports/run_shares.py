"""Shares of a run's wall time by cause, computed from its events.

The run's clock measures the seconds of each part. The computing time is divided further: waits for
cores and memory come from the kernel's counters, matmuls from their FLOPs and the machine's
measured speed, and padding from its share of the tokens. The rest is "other computing". An
unreadable value in `metrics.jsonl` counts as missing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from toque.hardware.processor import WORTH_WHILE
from toque.runs.history import number
from toque.runs.metric_names import REWARD

Event = Mapping[str, Any]

DATA: Final = "waiting for data"
MATMULS: Final = "matmuls"
PADDING: Final = "padding"
COMPUTING: Final = "other computing"
OPTIMIZER: Final = "optimizer"
ROLLOUTS: Final = "generating texts to learn from"
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
    ROLLOUTS: ("rollouts",),
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
"""Shares of the time outside the training loop."""
_NOT_UPDATING: Final = (
    "starting",
    "evaluation",
    "texts",
    "saving",
    "profiling",
    "uploads",
    "finishing",
)
"""Parts of the clock outside of updates."""
_TIMED_EVENTS: Final = ("step", "end", "after")
"""Events that contain the seconds of the parts."""
_MUCH_SLEEP: Final = 0.25
"""Fraction of the computing time above which the main thread's sleep counts as `STILL`."""
_MAX_LOST: Final = 0.95
"""Maximum fraction of the computing time that counts as waiting. Several threads may wait in the
same second, so the sum of their waits may exceed it.
"""


@dataclass(frozen=True)
class Share:
    """Part of the wall time."""

    name: str
    seconds: float
    share: float
    """Fraction of the wall time."""


@dataclass(frozen=True)
class Facts:
    """Measurements of a run, read from its events."""

    parts: Mapping[str, float]
    """Wall seconds by `phases.Part`, `finishing` and `uploads`."""
    late_compiling: float
    """Fraction of the time of the second half of the updates that was spent on compiling."""
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
    """Sums over all samples of the machine. Empty without samples.

    `waiting_beside_others` and `waiting_alone` are the seconds for which a thread waited for a
    core, with and without other programs on the cores. `others_cores` is a mean.
    """
    start: Event
    """The newest start event."""
    gpu_busy: float | None
    """Mean utilisation of the GPUs, from 0 to 1."""
    gpu_throttled: Mapping[str, float]
    """Fraction of the GPU samples with a throttled clock, by reason."""
    losses: Sequence[float]
    """Training loss of each step event."""
    rewards: Sequence[float]
    """Mean reward of each step event. Empty without rewards."""
    held_out: Sequence[float]
    """Held-out loss of each evaluation."""
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
        divided = _divide_time(self)
        seconds = {name: value for name, value in divided.items() if value > 0.0}
        wall = sum(seconds.values())
        shares = [Share(name, value, value / wall) for name, value in seconds.items()]
        return tuple(sorted(shares, key=lambda share: -share.seconds))

    def wall_share(self, *names: str) -> float:
        """Sum these shares of the wall time."""
        return sum(share.share for share in self.shares if share.name in names)

    def share(self, *names: str) -> float:
        """Sum these shares of the training loop, without one-time work before and after it."""
        loop = max(1e-9, 1.0 - self.wall_share(*_OUTSIDE_LOOP))
        return self.wall_share(*names) / loop

    @property
    def computing(self) -> float:
        """Fraction of the forward and backward passes in the training loop."""
        return self.share(COMPUTING, MATMULS, PADDING)

    @property
    def device(self) -> str:
        """Kind of the device: cpu or cuda."""
        name = str(dict_or_empty(self.start.get("hardware")).get("device", ""))
        return "cuda" if "NVIDIA" in name or "Tesla" in name else "cpu"

    @property
    def computes_padding(self) -> bool:
        """True if attention is masked, so that padding is computed and not skipped."""
        arithmetic = dict_or_empty(self.start.get("arithmetic"))
        return arithmetic.get("attention_kind") == "masked"

    def part(self, *names: str) -> float:
        """Sum the seconds of some parts."""
        return sum(self.parts.get(name, 0.0) for name in names)

    def setting(self, name: str) -> Any:
        """Return a setting of the section `train`, or None if it is missing."""
        return dict_or_empty(self.start.get("train")).get(name)

    def start_number(self, *path: str) -> float | None:
        """Return a number in the start event by its nested keys, or None if it is missing."""
        return nested_number(self.start, *path)


def dict_or_empty(value: object) -> Mapping[str, Any]:
    """Return the value if it is a dict, otherwise an empty dict."""
    return value if isinstance(value, dict) else {}


def nested_number(value: object, *path: str) -> float | None:
    """Return the number at nested keys of a dict, or None if it is missing."""
    for name in path:
        value = dict_or_empty(value).get(name)
    return number(value)


def collect_facts(events: Sequence[Event]) -> Facts | None:
    """Collect the facts of a run. Return None before the first update.

    Args:
        events: The run's events, without the events of undone updates.
    """
    by_kind = defaultdict[str, list[Event]](list)
    for event in events:
        by_kind[str(event.get("event"))].append(event)
    steps = by_kind["step"]
    timed = [event for event in events if event.get("event") in _TIMED_EVENTS]
    parts = _sum_parts(timed)
    if not steps or sum(parts.values()) <= 0.0:
        return None

    starts = by_kind["start"]
    first_step = min((event["step"] for event in starts), default=0)
    saves = [dict_or_empty(event.get("saves")) for event in by_kind["end"]]
    hosts = [dict_or_empty(event.get("host")) for event in by_kind["system"]]
    gpus: list[Event] = [gpu for e in by_kind["system"] for gpu in e.get("gpus", ())]
    held_out = [
        nested_number(event, "metrics", "loss") for event in by_kind["evaluation"]
    ]
    losses = [number(step.get("loss")) for step in steps]
    rewards = [number(step.get(REWARD)) for step in steps]
    return Facts(
        parts=parts,
        late_compiling=_late_compiling(steps),
        n_updates=max(1, steps[-1]["step"] - first_step),
        tokens=_sum_field(steps, "tokens"),
        update_seconds=_sum_field(steps, "seconds"),
        pad_fraction=_pad_fraction(steps),
        utilisation=_mean_utilisation(steps),
        n_evaluations=len(by_kind["evaluation"]),
        n_saves=len(by_kind["save"]),
        skipped_saves=int(_sum_field(saves, "skipped")),
        host=_sum_samples(hosts),
        start=starts[-1] if starts else {},
        gpu_busy=_mean_gpu_busy(gpus),
        gpu_throttled=_throttled_shares(gpus),
        losses=[loss for loss in losses if loss is not None],
        rewards=[reward for reward in rewards if reward is not None],
        held_out=[loss for loss in held_out if loss is not None],
        grad_norm=number(steps[-1].get("grad_norm")),
        warnings=[str(event.get("message")) for event in by_kind["warning"]],
        end=_end_of_last_session(events),
    )


def _end_of_last_session(events: Sequence[Event]) -> Event:
    """Return the newest end event, or an empty event if a session started after it."""
    sessions = [event for event in events if event.get("event") in ("start", "end")]
    if sessions and sessions[-1].get("event") == "end":
        return sessions[-1]
    return {}


def _sum_parts(events: Iterable[Event]) -> dict[str, float]:
    """Sum the seconds of each part over some events."""
    parts: dict[str, float] = {}
    for event in events:
        for name, value in dict_or_empty(event.get("parts")).items():
            seconds = number(value)
            if isinstance(name, str) and seconds is not None and seconds >= 0.0:
                parts[name] = parts.get(name, 0.0) + seconds
    return parts


def _late_compiling(steps: Sequence[Event]) -> float:
    """Return the fraction of the time spent compiling in the second half of the updates."""
    if len(steps) < 2:
        return 0.0
    parts = _sum_parts(steps[len(steps) // 2 :])
    return parts.get("compiling", 0.0) / max(1e-9, sum(parts.values()))


def _pad_fraction(steps: Sequence[Event]) -> float:
    """Compute the fraction of all computed tokens that is padding."""
    tokens = computed = 0.0
    for step in steps:
        pad = number(step.get("pad_fraction"))
        if pad is not None and 0.0 <= pad < 1.0:
            step_tokens = number(step.get("tokens")) or 0.0
            tokens += step_tokens
            computed += step_tokens / (1.0 - pad)
    return 1.0 - tokens / computed if computed else 0.0


def _mean_utilisation(steps: Sequence[Event]) -> float | None:
    """Return the mean utilisation, weighted by time, or None if it was not measured."""
    measured = seconds = 0.0
    for step in steps:
        mfu = number(step.get("mfu"))
        if mfu is not None and 0.0 <= mfu <= 1.0:
            step_seconds = _non_negative(step, "seconds")
            measured += mfu * step_seconds
            seconds += step_seconds
    return measured / seconds if seconds > 0.0 else None


def _throttled_shares(gpus: Sequence[Event]) -> dict[str, float]:
    """Return the share of a GPU's samples with each reason for throttling."""
    reasons = Counter(reason for gpu in gpus for reason in gpu.get("throttled", ()))
    return {reason: n / len(gpus) for reason, n in reasons.items()}


def _mean_gpu_busy(gpus: Sequence[Event]) -> float | None:
    percents = [number(gpu.get("utilisation_percent")) for gpu in gpus]
    shares = [percent / 100 for percent in percents if percent is not None]
    return sum(shares) / len(shares) if shares else None


def _non_negative(event: Event, name: str) -> float:
    return max(0.0, number(event.get(name)) or 0.0)


def _sum_field(events: Iterable[Event], name: str) -> float:
    return sum(_non_negative(event, name) for event in events)


def _sum_samples(samples: Sequence[Event]) -> dict[str, float]:
    """Sum the samples of the machine for `Facts.host`."""
    seconds = _sum_field(samples, "seconds")
    if seconds <= 0.0:
        return {}
    beside_others = [
        sample
        for sample in samples
        if _non_negative(sample, "others_cores") > WORTH_WHILE
    ]
    waiting = _sum_field(samples, "waiting_for_core_seconds")
    waiting_beside_others = _sum_field(beside_others, "waiting_for_core_seconds")
    others_core_seconds = sum(
        _non_negative(sample, "others_cores") * _non_negative(sample, "seconds")
        for sample in samples
    )
    return {
        "seconds": seconds,
        "memory_stall_seconds": _sum_field(samples, "memory_stall_seconds"),
        "throttled_seconds": _sum_field(samples, "throttled_seconds"),
        "asleep_seconds": _sum_field(samples, "asleep_seconds"),
        "waiting_beside_others": waiting_beside_others,
        "waiting_alone": waiting - waiting_beside_others,
        "others_cores": others_core_seconds / seconds,
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

    # Lost seconds are taken from computing and the optimizer in proportion.
    busy = computing + optimizer
    lost = _lost_seconds(facts, busy=busy)
    remaining = 1.0 - sum(lost.values()) / max(busy, 1e-9)
    passes = computing * remaining

    padding = passes * facts.pad_fraction if facts.computes_padding else 0.0
    matmuls = min(_matmul_seconds(facts), passes - padding)
    measured = {name: facts.part(*parts) for name, parts in _PARTS_OF_SHARE.items()}
    return {
        **measured,
        **lost,
        HOST: host,
        OPTIMIZER: optimizer * remaining,
        PADDING: padding,
        MATMULS: matmuls,
        COMPUTING: max(0.0, passes - padding - matmuls),
    }


def _matmul_seconds(facts: Facts) -> float:
    """Estimate the seconds of matmuls with weights, from the machine's utilisation."""
    if facts.utilisation is None:
        return 0.0
    matmuls = facts.start_number("arithmetic", "products")
    attention = facts.start_number("arithmetic", "attention")
    share = 1.0
    if matmuls is not None and attention is not None and matmuls > 0.0 <= attention:
        share = matmuls / (matmuls + attention)
    # Neither the utilisation nor these seconds include updates that a profiler slowed.
    seconds = min(facts.update_seconds, facts.wall - facts.part(*_NOT_UPDATING))
    return facts.utilisation * seconds * share


def _lost_seconds(facts: Facts, *, busy: float) -> dict[str, float]:
    """Estimate the seconds during which threads could not compute. Their sum is below `busy`."""
    host = facts.host
    if not host:
        return {}
    lost = {
        OTHERS: host["waiting_beside_others"],
        CROWDED: host["waiting_alone"],
        PAGING: host["memory_stall_seconds"],
        THROTTLED: host["throttled_seconds"],
    }
    # The samples may not cover the entire run.
    scale = (facts.wall - facts.part("uploads", "finishing")) / host["seconds"]
    if facts.device == "cpu":
        # The main thread sleeps while it waits for batches, saves, the compiler and other threads.
        # Much more sleep means that the process was stopped, or waited for a disk.
        expected = facts.part("data_wait", "saving", "starting", "compiling")
        asleep = host["asleep_seconds"] - expected / max(scale, 1e-9)
        lost[STILL] = asleep if asleep * scale > _MUCH_SLEEP * busy else 0.0

    total = scale * sum(lost.values())
    limited_scale = scale
    if total > 0.0:
        limited_scale = scale * min(1.0, _MAX_LOST * busy / total)
    return {name: value * limited_scale for name, value in lost.items()}
