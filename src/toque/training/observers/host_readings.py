"""Host readings between two looks: processor, memory, disk, network, and what held the run up.

What held it up is counted by the kernel (`host` of a reading):

* waiting for a core: seconds in which a thread was ready to run and another had its core
  (`/proc/self/task/*/schedstat`), of the thread that waited longest;
* asleep: seconds in which the main thread neither ran nor wanted to, as while it waits for a batch,
  for a disk, or is stopped;
* memory: seconds in which something waited for pages (`/proc/pressure/memory`), and pages that had
  to be read from disk again;
* throttling: seconds in which a container's limit on processor time held everything back.

A count that a kernel does not keep is left out.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from toque.hardware.processor import ProcessorUse, usable_cores

_TASKS: Final = "/proc/self/task"
_MEMORY: Final = "/proc/pressure/memory"
_LIMIT: Final = ("/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat")
_RATES: Final = {
    "disk_read_bytes_per_second": ("disk", "read_bytes"),
    "disk_write_bytes_per_second": ("disk", "write_bytes"),
    "network_received_bytes_per_second": ("network", "bytes_recv"),
    "network_sent_bytes_per_second": ("network", "bytes_sent"),
}
"""Rate -> the device and counter that it is the growth of, over the whole machine."""
_LOOPBACK: Final = "lo"
"""Network card by which a machine sends to itself."""


@dataclass(frozen=True)
class _Counts:
    """Counters until now; what the system does not count is absent or None."""

    use: ProcessorUse
    schedules: dict[str, tuple[float, float]]
    """Seconds that each thread had a core, and was ready and had none, by its number."""
    stalls: Mapping[str, float]
    """Seconds by their name in `host`."""
    major_faults: int
    bytes: Mapping[str, int | None]
    """Bytes by the name of their rate."""

    @classmethod
    def now(cls) -> _Counts:
        # psutil answers None where the system counts none: a container without disks of its own.
        cards = psutil.net_io_counters(pernic=True) or {}
        disk = psutil.disk_io_counters()
        devices: dict[str, list[Any]] = {
            "disk": [] if disk is None else [disk],
            "network": [counters for name, counters in cards.items() if name != _LOOPBACK],
        }
        return cls(
            use=ProcessorUse.now(),
            schedules=_schedules(),
            stalls=_memory_stall() | _throttled(),
            major_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
            bytes={
                rate: sum(getattr(d, counter) for d in devices[kind]) if devices[kind] else None
                for rate, (kind, counter) in _RATES.items()
            },
        )

    def held_up_since(self, before: _Counts) -> dict[str, Any]:
        seconds, main = self.use.at - before.use.at, str(os.getpid())
        found: dict[str, Any] = {
            "seconds": seconds,
            "own_cores": (self.use.own - before.use.own) / seconds if seconds > 0 else 0.0,
            "others_cores": self.use.others_since(before.use),
            "major_faults": self.major_faults - before.major_faults,
        }
        if self.schedules and before.schedules:
            begun = dict.fromkeys(self.schedules, (0.0, 0.0)) | before.schedules
            waits = (waited - begun[tid][1] for tid, (_, waited) in self.schedules.items())
            found["waiting_for_core_seconds"] = max(waits)
            if main in self.schedules:
                running = sum(self.schedules[main]) - sum(begun[main])
                found["asleep_seconds"] = max(0.0, seconds - running)
        for name in self.stalls.keys() & before.stalls.keys():
            found[name] = self.stalls[name] - before.stalls[name]
        return found

    def rates_since(self, before: _Counts) -> dict[str, float | None]:
        seconds = max(self.use.at - before.use.at, 1e-3)
        pairs = {name: (before.bytes[name], now) for name, now in self.bytes.items()}
        return {
            # A disk taken away leaves a smaller sum.
            name: None if then is None or now is None else round(max(0, now - then) / seconds, 1)
            for name, (then, now) in pairs.items()
        }


class Host:
    """The machine and this process since the last look; used in one thread.

    Processor figures are of the cores this process may use. psutil keeps the last look for each
    thread by itself, so nobody else who asks it shortens ours.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._counts = _Counts.now()
        psutil.cpu_percent(percpu=True)  # what follows is measured from here
        self._process.cpu_percent()

    def look(self) -> dict[str, Any]:
        """Figures since the look before; a percent or a rate of None is not known.

        Raises:
            psutil.Error, OSError: the system does not let itself be looked at.
        """
        before, self._counts = self._counts, _Counts.now()
        cores = psutil.cpu_percent(percpu=True)
        mine = [cores[i] for i in usable_cores() if i < len(cores)]
        memory = psutil.virtual_memory()
        return {
            "cpu_percent": round(sum(mine) / len(mine), 1) if mine else None,
            "cpu_percent_by_core": mine,
            "process_cpu_percent": self._process.cpu_percent(),
            "memory_used_bytes": memory.total - memory.available,
            "memory_total_bytes": memory.total,
            "process_resident_bytes": self._process.memory_info().rss,
            **self._counts.rates_since(before),
            "host": self._counts.held_up_since(before),
        }


def _schedules() -> dict[str, tuple[float, float]]:
    """Seconds on and off a core of each thread, without those that asked for a low priority."""
    found: dict[str, tuple[float, float]] = {}
    with suppress(OSError):
        own = os.getpriority(os.PRIO_PROCESS, os.getpid())
        for thread in Path(_TASKS).iterdir():
            with suppress(OSError, IndexError, ValueError):  # a thread may end meanwhile
                if os.getpriority(os.PRIO_PROCESS, int(thread.name)) <= own:
                    ran, waited = (thread / "schedstat").read_text(encoding="ascii").split()[:2]
                    found[thread.name] = int(ran) / 1e9, int(waited) / 1e9
    return found


def _memory_stall() -> dict[str, float]:
    with suppress(OSError, ValueError, IndexError):
        some = Path(_MEMORY).read_text(encoding="ascii").splitlines()[0]
        return {"memory_stall_seconds": int(some.rpartition("total=")[2]) / 1e6}
    return {}


def _throttled() -> dict[str, float]:
    units = {"throttled_usec": 1e6, "throttled_time": 1e9}
    for path in _LIMIT:
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in Path(path).read_text("ascii").splitlines())
            for name in units.keys() & counts.keys():
                return {"throttled_seconds": int(counts[name]) / units[name]}
    return {}
