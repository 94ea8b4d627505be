"""Shares of a run's wall time by what it went into, and the facts they are made of.

All comes from `metrics.jsonl`. Every number in it may be absent or of another type: what cannot be
read counts as not measured. The loop's clock gives the parts. Computing is divided further by what
else was measured: waits for a core, memory and a container's limit by the kernel's counts, products
by the model's arithmetic at the rate measured on this machine, padding by its share of the tokens
where it is computed. What these do not reach is one share, said to be not told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from toque.hardware.processor import WORTH_WHILE
from toque.runs.history import number

Event = Mapping[str, Any]

DATA: Final = "waiting for data"
PRODUCTS: Final = "products"
PADDING: Final = "padding"
COMPUTING: Final = "computing, not told apart"
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

_MUCH_SLEEP: Final = 0.25
"""Share of computing from which a sleeping main thread is a process that stands still."""
_MOST_LOST: Final = 0.95
"""Share of computing that waits can be: they are counted by thread, and threads wait at once."""


@dataclass(frozen=True)
class HostUse:
    """Causes that kept threads from computing, as seconds and cores over all that was sampled."""

    seconds: float
    """Seconds of wall time that were looked at."""
    others_cores: float
    """Cores that other programs kept busy, on average."""
    waiting_beside_others: float
    """Seconds a thread was ready and had no core, while other programs kept cores busy."""
    waiting_alone: float
    """The same while no other program did: the run's own threads were in each other's way."""
    memory_stall: float
    throttled: float
    asleep: float
    """Seconds in which the main thread neither ran nor wanted to."""
    major_faults: float


@dataclass(frozen=True)
class Facts:
    """Facts of a run, from its files."""

    parts: Mapping[str, float]
    """Wall seconds by part (`phases.Part`), and `finishing` and `uploads` after the loop."""
    late: float
    """Seconds of the parts in the later half of the step events."""
    compiling_late: float
    """Seconds of `late` that went into compiling."""
    n_updates: int
    tokens: float
    update_seconds: float
    """Seconds of the updates alone, waiting for data included."""
    pad_fraction: float
    utilisation: float | None
    """Model FLOP/s over the machine's rate, averaged over the updates' time."""
    n_evaluations: int
    n_saves: int
    skipped_saves: int
    host: HostUse | None
    start: Event
    """Newest start event."""
    gpu_busy: float | None
    """Mean utilisation of the GPUs in [0, 1], from system events."""
    gpu_throttled: Mapping[str, float]
    """Reason -> share of the system events that gave it."""
    losses: Sequence[float]
    held_out: Sequence[float]
    grad_norm: float | None
    """Gradient norm of the newest step event."""
    warnings: Sequence[str] = ()
    end: Event = field(default_factory=dict)
    """Newest end event; empty while the run continues, or after a kill."""

    @property
    def wall(self) -> float:
        """Seconds in all."""
        return sum(self.parts.values())

    @property
    def device(self) -> str:
        """Kind of device that computed: cpu or cuda."""
        name = str(mapping(self.start.get("hardware")).get("device", ""))
        return "cuda" if "NVIDIA" in name or "Tesla" in name else "cpu"

    @property
    def computes_padding(self) -> bool:
        """True with masks; where each example is computed alone, padding is left out."""
        return mapping(self.start.get("arithmetic")).get("attention_kind") == "masked"

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


@dataclass(frozen=True)
class Share:
    """One of the things that wall time went into."""

    name: str
    seconds: float
    share: float
    """Share of the wall time, in [0, 1]."""


def mapping(value: object) -> Mapping[str, Any]:
    """A mapping, or an empty one."""
    return value if isinstance(value, dict) else {}


def facts_of(events: Sequence[Event]) -> Facts | None:
    """The facts of a run's events, undone ones left out; None before its first update."""
    kinds: dict[str, list[Event]] = {}
    for event in events:
        kinds.setdefault(str(event.get("event")), []).append(event)
    steps, starts, ends = (kinds.get(kind, []) for kind in ("step", "start", "end"))
    parts = _parts(event for event in events if event.get("event") in ("step", "end", "after"))
    if not steps or sum(parts.values()) <= 0.0:
        return None
    last = next((e for e in reversed(events) if e.get("event") in ("start", "end")), {})
    late = [mapping(e.get("parts")) for e in steps[len(steps) // 2 :]] if len(steps) > 1 else []
    counted = [(number(e.get("pad_fraction")), number(e.get("tokens")) or 0.0) for e in steps]
    weighed = [(pad, n) for pad, n in counted if pad is not None and 0.0 <= pad < 1.0]
    computed = sum(n / (1.0 - pad) for pad, n in weighed)
    begun = min((int(number(e.get("step")) or 0) for e in starts), default=0)
    scored = kinds.get("evaluation", [])
    held_out = [number(mapping(e.get("metrics")).get("loss")) for e in scored]
    gpus = [mapping(gpu) for e in kinds.get("system", []) for gpu in _list(e.get("gpus"))]
    return Facts(
        parts=parts,
        late=sum(_parts({"parts": part} for part in late).values()),
        compiling_late=_sum(late, "compiling"),
        n_updates=max(1, int(number(steps[-1].get("step")) or 0) - begun),
        tokens=_sum(steps, "tokens"),
        update_seconds=_sum(steps, "seconds"),
        pad_fraction=1.0 - sum(n for _, n in weighed) / computed if computed else 0.0,
        utilisation=_utilisation(steps),
        n_evaluations=len(scored),
        n_saves=len(kinds.get("save", [])),
        skipped_saves=int(_sum([mapping(e.get("saves")) for e in ends], "skipped")),
        host=_host([mapping(e.get("host")) for e in kinds.get("system", [])]),
        start=starts[-1] if starts else {},
        gpu_busy=_gpu_busy(gpus),
        gpu_throttled=_gpu_throttled(gpus),
        losses=[loss for e in steps if (loss := number(e.get("loss"))) is not None],
        held_out=[loss for loss in held_out if loss is not None],
        grad_norm=number(steps[-1].get("grad_norm")),
        warnings=[str(e.get("message")) for e in kinds.get("warning", [])],
        end=ends[-1] if ends and last.get("event") == "end" else {},
    )


def _parts(events: Iterable[Event]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for event in events:
        for name, value in mapping(event.get("parts")).items():
            seconds = number(value)
            if isinstance(name, str) and seconds is not None and seconds >= 0.0:
                parts[name] = parts.get(name, 0.0) + seconds
    return parts


def _sum(events: Iterable[Event], name: str) -> float:
    return sum(max(0.0, number(e.get(name)) or 0.0) for e in events)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _utilisation(steps: Sequence[Event]) -> float | None:
    known = [(number(e.get("mfu")), number(e.get("seconds")) or 0.0) for e in steps]
    used = [(mfu, seconds) for mfu, seconds in known if mfu is not None and 0.0 <= mfu <= 1.0]
    total = sum(seconds for _, seconds in used)
    return sum(mfu * seconds for mfu, seconds in used) / total if total > 0 else None


def _host(looks: Sequence[Event]) -> HostUse | None:
    seconds = _sum(looks, "seconds")
    if seconds <= 0.0:
        return None
    weighed = (
        (number(h.get("others_cores")) or 0.0) * (number(h.get("seconds")) or 0.0) for h in looks
    )
    beside = [h for h in looks if (number(h.get("others_cores")) or 0.0) > WORTH_WHILE]
    waited_beside = _sum(beside, "waiting_for_core_seconds")
    return HostUse(
        seconds=seconds,
        others_cores=sum(weighed) / seconds,
        waiting_beside_others=waited_beside,
        waiting_alone=_sum(looks, "waiting_for_core_seconds") - waited_beside,
        memory_stall=_sum(looks, "memory_stall_seconds"),
        throttled=_sum(looks, "throttled_seconds"),
        asleep=_sum(looks, "asleep_seconds"),
        major_faults=_sum(looks, "major_faults"),
    )


def _gpu_busy(gpus: Sequence[Event]) -> float | None:
    percents = [number(gpu.get("utilisation_percent")) for gpu in gpus]
    known = [value / 100 for value in percents if value is not None]
    return sum(known) / len(known) if known else None


def _gpu_throttled(gpus: Sequence[Event]) -> dict[str, float]:
    reasons: dict[str, float] = {}
    for gpu in gpus:
        for reason in _list(gpu.get("throttled")):
            reasons[str(reason)] = reasons.get(str(reason), 0.0) + 1 / len(gpus)
    return reasons


def shares_of(facts: Facts) -> tuple[Share, ...]:
    """The shares of the wall time, the largest first; they add up to all of it."""
    seconds = _seconds(facts)
    wall = sum(seconds.values())
    if wall <= 0.0:
        return ()
    found = [Share(name, value, value / wall) for name, value in seconds.items() if value > 0.0]
    return tuple(sorted(found, key=lambda share: -share.seconds))


def share_named(shares: Iterable[Share], *names: str) -> float:
    """The share of these together."""
    return sum(share.share for share in shares if share.name in names)


def _seconds(facts: Facts) -> dict[str, float]:
    computing = facts.part("forward_backward")
    optimizer, host = facts.part("clip", "optimizer"), facts.part("observers")
    if facts.device == "cuda":
        # The host runs ahead of the device: where it waits says nothing of a part.
        computing, optimizer, host = computing + optimizer + host, 0.0, 0.0
    lost = _lost(facts, busy=computing + optimizer)
    kept = 1.0 - sum(lost.values()) / max(computing + optimizer, 1e-9)
    return {
        DATA: facts.part("data_wait"),
        OPTIMIZER: optimizer * kept,
        RANKS: facts.part("ranks"),
        HOST: host,
        STARTING: facts.part("starting"),
        COMPILING: facts.part("compiling"),
        PROFILING: facts.part("profiling"),
        EVALUATION: facts.part("evaluation", "texts"),
        SAVING: facts.part("saving"),
        UPLOADS: facts.part("uploads"),
        FINISHING: facts.part("finishing"),
        **lost,
        **_computing(facts, computing * kept),
    }


def _lost(facts: Facts, *, busy: float) -> dict[str, float]:
    """Seconds of computing in which threads could not run, of at most `busy`."""
    host = facts.host
    if host is None:
        return {}
    lost = {
        OTHERS: host.waiting_beside_others,
        CROWDED: host.waiting_alone,
        PAGING: host.memory_stall,
        THROTTLED: host.throttled,
    }
    scale = (facts.wall - facts.part("uploads", "finishing")) / host.seconds
    if facts.device == "cpu":
        # The loop sleeps while it waits for a batch, a save or the compiler's processes; threads
        # may, while they wait for each other. What goes far beyond is a process that was stopped,
        # or waits for a disk.
        known = facts.part("data_wait", "saving", "starting", "compiling")
        asleep = host.asleep - known / max(scale, 1e-9)
        lost[STILL] = asleep if asleep * scale > _MUCH_SLEEP * busy else 0.0
    total = scale * sum(lost.values())
    scale *= min(1.0, _MOST_LOST * busy / total) if total > 0.0 else 0.0
    return {name: value * scale for name, value in lost.items()}


def _computing(facts: Facts, computing: float) -> dict[str, float]:
    padding = computing * facts.pad_fraction if facts.computes_padding else 0.0
    products = 0.0
    if facts.utilisation is not None:
        weights = facts.start_number("arithmetic", "products")
        attention = facts.start_number("arithmetic", "attention")
        of_products = 1.0
        if weights is not None and attention is not None and weights > 0.0 <= attention:
            of_products = weights / (weights + attention)
        # The rate is that of updates which no profiler slowed: so are the seconds it is taken over.
        apart = ("starting", "evaluation", "texts", "saving", "profiling", "uploads", "finishing")
        unslowed = min(facts.update_seconds, facts.wall - facts.part(*apart))
        products = min(facts.utilisation * unslowed * of_products, computing - padding)
    return {
        PADDING: padding,
        PRODUCTS: products,
        COMPUTING: max(0.0, computing - padding - products),
    }
