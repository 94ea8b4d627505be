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
    """Counters until now; None where the system keeps none."""

    use: ProcessorUse
    waited: dict[str, float] | None
    """Seconds each thread waited for a core, by its number."""
    ran: float | None
    """Seconds the main thread had a core."""
    memory_stall: float | None
    throttled: float | None
    major_faults: int
    devices: dict[str, list[Any]]
    """psutil's counters of disks and network cards."""

    @classmethod
    def now(cls) -> _Counts:
        # psutil answers None where the system counts none: a container without disks of its own.
        cards = psutil.net_io_counters(pernic=True) or {}
        outside = [counters for name, counters in cards.items() if name != _LOOPBACK]
        return cls(
            use=ProcessorUse.now(),
            waited=_waited(),
            ran=_schedule(Path(_TASKS, str(os.getpid())), 0),
            memory_stall=_memory_stall(),
            throttled=_throttled(),
            major_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
            devices={"disk": [psutil.disk_io_counters()], "network": outside},
        )

    def held_up_since(self, before: _Counts) -> dict[str, Any]:
        seconds = self.use.at - before.use.at
        found: dict[str, Any] = {
            "seconds": seconds,
            "own_cores": (self.use.own - before.use.own) / seconds if seconds > 0 else 0.0,
            "others_cores": self.use.others_since(before.use),
            "major_faults": self.major_faults - before.major_faults,
        }
        if self.waited is not None and before.waited is not None:
            waits = (now - before.waited.get(tid, 0.0) for tid, now in self.waited.items())
            found["waiting_for_core_seconds"] = max(waits, default=0.0)
        if self.ran is not None and before.ran is not None:
            main = str(os.getpid())
            waited = [(each.waited or {}).get(main, 0.0) for each in (self, before)]
            running = self.ran - before.ran + waited[0] - waited[1]
            found["asleep_seconds"] = max(0.0, seconds - running)
        if self.memory_stall is not None and before.memory_stall is not None:
            found["memory_stall_seconds"] = self.memory_stall - before.memory_stall
        if self.throttled is not None and before.throttled is not None:
            found["throttled_seconds"] = self.throttled - before.throttled
        return found

    def rates_since(self, before: _Counts) -> dict[str, float | None]:
        seconds = max(self.use.at - before.use.at, 1e-3)
        found: dict[str, float | None] = {}
        for name, (kind, counter) in _RATES.items():
            then, now = (_sum(each.devices[kind], counter) for each in (before, self))
            known = then is not None and now is not None
            # A disk taken away leaves a smaller sum.
            found[name] = round(max(0, (now or 0) - (then or 0)) / seconds, 1) if known else None
        return found


class Host:
    """The machine and this process since the last look; used in one thread.

    Processor figures are of the cores this process may use. psutil keeps the last look for each
    thread by itself, so nobody else who asks it shortens ours.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._cores = usable_cores()
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
        mine = [cores[i] for i in self._cores if i < len(cores)]
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


def _sum(devices: list[Any], counter: str) -> int | None:
    known = [int(getattr(device, counter)) for device in devices if device is not None]
    return sum(known) if known else None


def _waited() -> dict[str, float] | None:
    """Seconds each thread waited for a core; without those that asked for a low priority."""
    found: dict[str, float] = {}
    try:
        own = os.getpriority(os.PRIO_PROCESS, os.getpid())
        for thread in Path(_TASKS).iterdir():
            with suppress(OSError):  # a thread may end meanwhile
                if os.getpriority(os.PRIO_PROCESS, int(thread.name)) <= own:
                    waited = _schedule(thread, 1)
                    if waited is not None:
                        found[thread.name] = waited
    except OSError:
        return None
    return found or None


def _schedule(thread: Path, field: int) -> float | None:
    """Seconds a thread had a core (field 0), or was ready and had none (field 1)."""
    with suppress(OSError, IndexError, ValueError):
        return int((thread / "schedstat").read_text(encoding="ascii").split()[field]) / 1e9
    return None


def _memory_stall() -> float | None:
    with suppress(OSError, ValueError, IndexError):
        some = Path(_MEMORY).read_text(encoding="ascii").splitlines()[0]
        return int(some.rpartition("total=")[2]) / 1e6
    return None


def _throttled() -> float | None:
    for path in _LIMIT:
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in Path(path).read_text("ascii").splitlines())
            if "throttled_usec" in counts:
                return int(counts["throttled_usec"]) / 1e6
            if "throttled_time" in counts:
                return int(counts["throttled_time"]) / 1e9
    return None
