"""Processor: the cores that this process may use, and how busy other programs keep them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from typing import Final

import psutil

WORTH_WHILE: Final = 0.25
"""Cores wanted beyond those there are from which a machine counts as busy. A guess above what an
idle desktop takes."""
_IDLE: Final = ("idle", "iowait", "guest", "guest_nice")
"""Times without work; the time of guests is in `user`, too."""
_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True)
class ProcessorUse:
    """Seconds of processor time until now, over the cores this process may use."""

    at: float
    busy: float  # of all programs, and of other machines on the same hardware
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


@cache
def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may run on, asked once."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def contended(*, threads: int, others: float, cores: int) -> bool:
    """True if threads that spin would hold up each other.

    >>> contended(threads=2, others=1.0, cores=2), contended(threads=2, others=0.1, cores=2)
    (True, False)
    """
    return threads > 1 and threads + others > cores + WORTH_WHILE


def others_now() -> float:
    """Cores that others keep busy, over a tenth of a second."""
    before = ProcessorUse.now()
    time.sleep(_LOOK_SECONDS)
    # A reading counts hundredths of a second, and ten of them may come out as eleven.
    return min(ProcessorUse.now().others_since(before), float(len(usable_cores())))
