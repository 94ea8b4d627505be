"""Shares of a run's wall time by what it went into; they add up to all of it.

The loop's clock gives the parts. Computing is divided further by what else was measured: waits for
a core, memory and a container's limit by the kernel's counts, products by the model's arithmetic at
the rate measured on this machine, padding by its share of the tokens where it is computed. What
these do not reach is one share, said to be not told apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from toque.reports.verdict.facts import Facts

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
BETWEEN: Final = "between updates, not told apart"

_MUCH_SLEEP: Final = 0.25
"""Of computing."""
_MOST_LOST: Final = 0.95
"""Of computing that waits can be: they are counted by thread, and threads wait at once."""


@dataclass(frozen=True)
class Share:
    """One of the things that wall time went into."""

    name: str
    seconds: float
    share: float
    """Of the wall time, in [0, 1]."""


def shares_of(facts: Facts, measured: Mapping[str, float] | None = None) -> tuple[Share, ...]:
    """The shares, the largest first.

    Args:
        facts: of the run.
        measured: shares of computing by name, as a profiler measured them on the run's own data;
            they take the place of what is told from arithmetic.
    """
    seconds = _seconds(facts, measured)
    wall = sum(seconds.values())
    if wall <= 0.0:
        return ()
    found = [Share(name, value, value / wall) for name, value in seconds.items() if value > 0.0]
    return tuple(sorted(found, key=lambda share: -share.seconds))


def share_named(shares: tuple[Share, ...], *names: str) -> float:
    """The share of these together."""
    return sum(share.share for share in shares if share.name in names)


def computes_padding(facts: Facts) -> bool:
    """Whether the model computes padding: with masks; each example alone leaves it out."""
    kind = facts.start.get("arithmetic")
    return isinstance(kind, dict) and kind.get("attention_kind") == "masked"


def _seconds(facts: Facts, measured: Mapping[str, float] | None) -> dict[str, float]:
    ahead = facts.device == "cuda"  # the host runs ahead: where it waits says nothing of a part
    computing = facts.part("forward_backward", "update")
    optimizer = facts.part("clip", "optimizer")
    host = facts.part("observers")
    if ahead:
        computing, optimizer, host = computing + optimizer + host, 0.0, 0.0
    found = {
        DATA: facts.part("data_wait"),
        OPTIMIZER: optimizer,
        RANKS: facts.part("ranks"),
        HOST: host,
        STARTING: facts.part("starting"),
        COMPILING: facts.part("compiling"),
        PROFILING: facts.part("profiling"),
        EVALUATION: facts.part("evaluation", "texts"),
        SAVING: facts.part("saving"),
        UPLOADS: facts.part("uploads"),
        FINISHING: facts.part("finishing"),
        BETWEEN: facts.part("between"),
    }
    lost = _lost(facts, busy=computing + optimizer)
    kept = 1.0 - sum(lost.values()) / max(computing + optimizer, 1e-9)
    found[OPTIMIZER] = optimizer * kept
    return found | lost | _computing(facts, computing * kept, measured)


def _lost(facts: Facts, *, busy: float) -> dict[str, float]:
    """Seconds of computing in which threads could not run, of at most `busy`."""
    if facts.host is None or facts.host.seconds <= 0.0:
        return {}
    host = facts.host
    lost = {
        OTHERS: host.waiting_beside_others,
        CROWDED: host.waiting_alone,
        PAGING: host.memory_stall,
        THROTTLED: host.throttled,
    }
    covered = facts.wall - facts.part("uploads", "finishing")
    scale = covered / host.seconds
    if facts.device == "cpu":
        # The loop sleeps while it waits for a batch, a save or the compiler's processes; threads
        # may, while they wait for each other. What goes far beyond is a process that was stopped,
        # or waits for a disk.
        told = facts.part("data_wait", "saving", "starting", "compiling")
        asleep = host.asleep - told / scale
        lost[STILL] = asleep if asleep * scale > _MUCH_SLEEP * busy else 0.0
    total = scale * sum(lost.values())
    scale *= min(1.0, _MOST_LOST * busy / total) if total > 0.0 else 0.0
    return {name: value * scale for name, value in lost.items()}


def _computing(
    facts: Facts, computing: float, measured: Mapping[str, float] | None
) -> dict[str, float]:
    if measured:
        total = max(1.0, sum(measured.values()))
        split = {name: computing * share / total for name, share in measured.items()}
        return {**split, COMPUTING: max(0.0, computing - sum(split.values()))}
    padding = computing * facts.pad_fraction if computes_padding(facts) else 0.0
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
        at_full_rate = facts.utilisation * unslowed * of_products
        products = min(at_full_rate, computing - padding)
    return {
        PADDING: padding,
        PRODUCTS: products,
        COMPUTING: max(0.0, computing - padding - products),
    }
