"""Shares of a run's wall time by what it went into, and the facts they are made of.

What cannot be read in `metrics.jsonl` counts as not measured. The loop's clock gives the parts.
Computing is divided further: waits for a core, memory and a container's limit by the kernel's
counts, products by the model's arithmetic at this machine's rate, padding by its share of the
tokens where it is computed. What these do not reach is one share, said to be not told apart.
"""

from __future__ import annotations

from collections import Counter
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

_ONCE: Final = (STARTING, COMPILING, PROFILING, FINISHING, UPLOADS)
_MUCH_SLEEP: Final = 0.25  # share of computing from which a sleeping main thread stands still
_MOST_LOST: Final = 0.95  # share of computing that waits can be: several threads wait at once


@dataclass(frozen=True)
class Share:
    """One of the things that wall time went into."""

    name: str
    seconds: float
    share: float  # share of the wall time, in [0, 1]


@dataclass(frozen=True)
class Facts:
    """Facts of a run, from its files."""

    parts: Mapping[str, float]  # wall seconds by `phases.Part`, `finishing`, `uploads`
    late: float  # seconds of the parts in the later half of the step events
    compiling_late: float  # seconds of `late` that went into compiling
    n_updates: int
    tokens: float
    update_seconds: float  # seconds of the updates alone, waiting for data included
    pad_fraction: float
    utilisation: float | None  # model FLOP/s over the machine's rate while updating
    n_evaluations: int
    n_saves: int
    skipped_saves: int
    host: Mapping[str, float]
    """Sums over all looks at the machine by their names in `host` of a system event, with
    `others_cores` on average and `waiting_beside_others` and `waiting_alone`, the seconds a thread
    had no core while other programs kept cores busy and while none did; empty without a look."""
    start: Event  # newest start event
    gpu_busy: float | None  # mean utilisation of the GPUs in [0, 1], from system events
    gpu_throttled: Mapping[str, float]  # reason -> share of the system events that gave it
    losses: Sequence[float]
    held_out: Sequence[float]
    grad_norm: float | None  # gradient norm of the newest step event
    warnings: Sequence[str] = ()
    end: Event = field(default_factory=dict)  # newest end event, if no session came after

    @property
    def wall(self) -> float:
        """Seconds in all."""
        return sum(self.parts.values())

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """Shares of the wall time, the largest first; they add up to all of it."""
        seconds = _seconds(self)
        wall = sum(seconds.values())
        found = [Share(name, value, value / wall) for name, value in seconds.items() if value > 0.0]
        return tuple(sorted(found, key=lambda share: -share.seconds))

    def share(self, *names: str, of_all: bool = False) -> float:
        """Share of the loop's time, or `of_all`: with what is done once, before or after it."""
        once = 0.0 if of_all else self.share(*_ONCE, of_all=True)
        return sum(s.share for s in self.shares if s.name in names) / max(1e-9, 1.0 - once)

    @property
    def computing(self) -> float:
        """Share of forward and backward."""
        return self.share(COMPUTING, PRODUCTS, PADDING)

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
    begun = min((e["step"] for e in starts), default=0)
    scored = kinds.get("evaluation", [])
    held_out = [number(e.get("metrics", {}).get("loss")) for e in scored]
    gpus: list[Event] = [gpu for e in kinds.get("system", []) for gpu in e.get("gpus", ())]
    busy = [number(gpu.get("utilisation_percent")) for gpu in gpus]
    held_down = Counter(reason for gpu in gpus for reason in gpu.get("throttled", ()))
    used = [(number(e.get("mfu")), _value(e, "seconds")) for e in steps]
    return Facts(
        parts=parts,
        late=sum(_parts({"parts": part} for part in late).values()),
        compiling_late=_sum(late, "compiling"),
        n_updates=max(1, steps[-1]["step"] - begun),
        tokens=_sum(steps, "tokens"),
        update_seconds=_sum(steps, "seconds"),
        pad_fraction=1.0 - sum(n for _, n in weighed) / computed if computed else 0.0,
        utilisation=_mean((m, s) for m, s in used if m is not None and 0.0 <= m <= 1.0),
        n_evaluations=len(scored),
        n_saves=len(kinds.get("save", [])),
        skipped_saves=int(_sum([mapping(e.get("saves")) for e in ends], "skipped")),
        host=_host([mapping(e.get("host")) for e in kinds.get("system", [])]),
        start=starts[-1] if starts else {},
        gpu_busy=_mean((None if percent is None else percent / 100, 1.0) for percent in busy),
        gpu_throttled={reason: n / len(gpus) for reason, n in held_down.items()},
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


def _value(event: Event, name: str) -> float:
    return number(event.get(name)) or 0.0


def _sum(events: Iterable[Event], name: str) -> float:
    return sum(max(0.0, _value(e, name)) for e in events)


def _mean(pairs: Iterable[tuple[float | None, float]]) -> float | None:
    """Mean of known values by their weights; None where no weight is known."""
    known = [(value, weight) for value, weight in pairs if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total > 0.0 else None


def _host(looks: Sequence[Event]) -> dict[str, float]:
    seconds = _sum(looks, "seconds")
    if seconds <= 0.0:
        return {}
    names = ("memory_stall_seconds", "throttled_seconds", "asleep_seconds", "major_faults")
    found = {"seconds": seconds} | {name: _sum(looks, name) for name in names}
    beside = [look for look in looks if _value(look, "others_cores") > WORTH_WHILE]
    found["waiting_beside_others"] = waited = _sum(beside, "waiting_for_core_seconds")
    found["waiting_alone"] = _sum(looks, "waiting_for_core_seconds") - waited
    others = sum(_value(look, "others_cores") * _value(look, "seconds") for look in looks)
    return found | {"others_cores": others / seconds}


def _seconds(facts: Facts) -> dict[str, float]:
    computing = facts.part("forward_backward")
    optimizer, host = facts.part("clip", "optimizer"), facts.part("observers")
    if facts.device == "cuda":
        # The host runs ahead of the device: where it waits says nothing of a part.
        computing, optimizer, host = computing + optimizer + host, 0.0, 0.0
    lost = _lost(facts, busy=computing + optimizer)
    kept = 1.0 - sum(lost.values()) / max(computing + optimizer, 1e-9)
    computing *= kept
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
        PADDING: padding,
        PRODUCTS: products,
        COMPUTING: max(0.0, computing - padding - products),
    }


def _lost(facts: Facts, *, busy: float) -> dict[str, float]:
    """Seconds of computing in which threads could not run, of at most `busy`."""
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
        # The loop sleeps while it waits for a batch, a save or the compiler's processes; threads
        # may, while they wait for each other. What goes far beyond is a process that was stopped,
        # or waits for a disk.
        known = facts.part("data_wait", "saving", "starting", "compiling")
        asleep = host["asleep_seconds"] - known / max(scale, 1e-9)
        lost[STILL] = asleep if asleep * scale > _MUCH_SLEEP * busy else 0.0
    total = scale * sum(lost.values())
    scale *= min(1.0, _MOST_LOST * busy / total) if total > 0.0 else 0.0
    return {name: value * scale for name, value in lost.items()}
