"""Processor: the cores of this process, and their use by other programs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from typing import Final

import psutil

WORTH_WHILE: Final = 0.25
"""Shortage of cores from which a machine counts as busy: programs need this many cores more than it
has. The shortage on an idle desktop is smaller.
"""
_IDLE: Final = ("idle", "iowait", "guest", "guest_nice")
"""Counters that are not work, or that `user` already includes (guests)."""
_MEASURED_SECONDS: Final = 0.1


@dataclass(frozen=True)
class ProcessorUse:
    """Reading of the processor time on the cores of this process, in seconds."""

    at: float
    """Time of the reading, in seconds."""
    busy: float
    """Processor seconds of all programs, and of other virtual machines on the same hardware."""
    own: float
    """Processor seconds of this process."""

    @classmethod
    def now(cls) -> ProcessorUse:
        """Read the counters."""
        cores = psutil.cpu_times(percpu=True)
        busy = 0.0
        for number in usable_cores():
            if number >= len(cores):  # a core that is offline
                continue
            times = cores[number]._asdict()
            busy += sum(times[name] for name in times if name not in _IDLE)
        process_times = os.times()
        return cls(time.monotonic(), busy, process_times.user + process_times.system)

    def others_since(self, before: ProcessorUse) -> float:
        """Return the number of cores that other programs used between two readings.

        >>> ProcessorUse(10.0, 120.0, 9.0).others_since(ProcessorUse(0.0, 100.0, 0.0))
        1.1
        """
        seconds = self.at - before.at
        if seconds <= 0:
            return 0.0
        others = (self.busy - before.busy) - (self.own - before.own)
        return max(0.0, others / seconds)


@cache
def usable_cores() -> tuple[int, ...]:
    """Return the indices of the cores on which this process may run. They are read once."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def is_contended(*, threads: int, others: float, cores: int) -> bool:
    """True if spinning threads would delay each other.

    Args:
        threads: Number of computing threads in this process.
        others: Number of cores that other programs use.
        cores: Number of cores of this process.

    >>> is_contended(threads=2, others=1.0, cores=2), is_contended(threads=2, others=0.1, cores=2)
    (True, False)
    """
    return threads > 1 and threads + others > cores + WORTH_WHILE


def measure_other_use() -> float:
    """Measure the number of cores that other programs use, for a tenth of a second."""
    before = ProcessorUse.now()
    time.sleep(_MEASURED_SECONDS)
    others = ProcessorUse.now().others_since(before)
    # Counters have a resolution of 0.01 seconds, so a busy core may be measured as 1.1 cores.
    return min(others, float(len(usable_cores())))
