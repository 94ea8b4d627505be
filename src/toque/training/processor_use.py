"""Processor use of other programs, and the way in which OpenMP's threads wait for each other.

Torch's threads (libgomp) wait by spinning, milliseconds long. On a quiet machine that is fastest.
Where another program holds a core, one thread of the team stands in the queue for it while the
others spin away the time it would need: measured on two cores beside one busy program, training
fell to a tenth. Threads that sleep at once keep most of the speed, and how they wait changes no
number. A run switches between the two (`observers.busy_machine`); a command that begins beside busy
programs and is soon done takes OMP_WAIT_POLICY=PASSIVE for all of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import psutil

WAIT_VARIABLES: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Any of which says how threads wait; OpenMP reads them once, when torch is loaded."""
PLACE_VARIABLES: Final = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Any of which says on which cores threads run."""
PASSIVE: Final = "OMP_WAIT_POLICY=PASSIVE"
WORTH_WHILE: Final = 0.25
"""Cores that must be wanted beyond those there are. A guess above what an idle desktop takes."""
_IDLE: Final = ("idle", "iowait", "guest", "guest_nice")
"""No work; the time of guests is in `user`, too."""
_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True)
class ProcessorUse:
    """Seconds of processor time until now, over the cores this process may use."""

    at: float
    busy: float
    """Of all programs, and of other machines on the same hardware."""
    own: float

    @classmethod
    def now(cls) -> ProcessorUse:
        """Read the counters."""
        cores = psutil.cpu_times(percpu=True)
        mine = [cores[i] for i in usable_cores() if i < len(cores)]
        busy = sum(
            value for core in mine for name, value in core._asdict().items() if name not in _IDLE
        )
        own = os.times()
        return cls(time.monotonic(), busy, own.user + own.system)

    def others_since(self, before: ProcessorUse) -> float:
        """Cores that others kept busy between two readings.

        >>> ProcessorUse(10.0, 120.0, 9.0).others_since(ProcessorUse(0.0, 100.0, 0.0))
        1.1
        """
        seconds = self.at - before.at
        theirs = (self.busy - before.busy) - (self.own - before.own)
        return max(0.0, theirs / seconds) if seconds > 0 else 0.0

    def busy_since(self, before: ProcessorUse) -> float:
        """Cores that anybody kept busy between two readings.

        >>> ProcessorUse(10.0, 120.0, 9.0).busy_since(ProcessorUse(0.0, 100.0, 0.0))
        2.0
        """
        seconds = self.at - before.at
        return (self.busy - before.busy) / seconds if seconds > 0 else 0.0


@cache
def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may run on.

    Asked once: a run beside others keeps to fewer of them for a while (`short_waits.FewerCores`).
    """
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def contended(*, threads: int, others: float, cores: int) -> bool:
    """Whether threads that spin would hold up each other.

    >>> contended(threads=2, others=1.0, cores=2), contended(threads=2, others=0.1, cores=2)
    (True, False)
    """
    return threads > 1 and threads + others > cores + WORTH_WHILE


def wait_without_spinning(
    environment: MutableMapping[str, str], *, look: Callable[[], float] | None = None
) -> float | None:
    """Where others keep cores busy now, have torch's threads sleep while they wait.

    Call it before torch is loaded. What the user has set stays.

    Args:
        environment: `os.environ`.
        look: cores that others keep busy; measured for a tenth of a second unless given.

    Returns:
        Those cores where the policy was set; None where everything stays as it is.
    """
    cores = len(usable_cores())
    asked = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    threads = int(asked) if asked.isdecimal() else cores
    if threads < 2 or any(name in environment for name in WAIT_VARIABLES):
        return None
    others = (look or others_now)()
    if not contended(threads=threads, others=others, cores=cores):
        return None
    name, _, value = PASSIVE.partition("=")
    environment[name] = value
    return others


def others_now() -> float:
    """Cores that others keep busy, over a tenth of a second."""
    before = ProcessorUse.now()
    time.sleep(_LOOK_SECONDS)
    # A reading counts hundredths of a second, and ten of them may come out as eleven.
    return min(ProcessorUse.now().others_since(before), float(len(usable_cores())))
