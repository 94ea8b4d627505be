"""Processor: the cores of this process, and their use by other programs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from typing import Final

import psutil

WORTH_WHILE: Final = 0.25
"""A machine is busy if programs want this many cores more than it has. An idle desktop wants less.
"""
_IDLE: Final = ("idle", "iowait", "guest", "guest_nice")
"""Counters without work. `user` already includes the time of guests."""
_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True)
class ProcessorUse:
    """Processor time until now, in seconds, over the cores of this process."""

    at: float
    """Time of the reading."""
    busy: float
    """Seconds of all programs, and of other virtual machines on the same hardware."""
    own: float
    """Seconds of this process."""

    @classmethod
    def now(cls) -> ProcessorUse:
        """Read the counters."""
        cores = psutil.cpu_times(percpu=True)
        mine = [cores[i] for i in usable_cores() if i < len(cores)]
        busy = sum(
            value
            for core in mine
            for name, value in core._asdict().items()
            if name not in _IDLE
        )
        process_times = os.times()
        return cls(time.monotonic(), busy, process_times.user + process_times.system)

    def others_since(self, before: ProcessorUse) -> float:
        """Number of cores that other programs used between two readings.

        >>> ProcessorUse(10.0, 120.0, 9.0).others_since(ProcessorUse(0.0, 100.0, 0.0))
        1.1
        """
        seconds = self.at - before.at
        theirs = (self.busy - before.busy) - (self.own - before.own)
        return max(0.0, theirs / seconds) if seconds > 0 else 0.0


@cache
def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may run on. They are read once."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def contended(*, threads: int, others: float, cores: int) -> bool:
    """Check whether spinning threads would delay each other.

    >>> contended(threads=2, others=1.0, cores=2), contended(threads=2, others=0.1, cores=2)
    (True, False)
    """
    return threads > 1 and threads + others > cores + WORTH_WHILE


def others_now() -> float:
    """Measure the number of cores that other programs use, in a tenth of a second."""
    before = ProcessorUse.now()
    time.sleep(_LOOK_SECONDS)
    # Readings have a resolution of 0.01 seconds, so ten hundredths may be read as eleven.
    return min(ProcessorUse.now().others_since(before), float(len(usable_cores())))
