"""Host use: what kept a run's threads from computing while they wanted to, as the kernel counts.

* waiting for a core: seconds in which a thread was ready to run and another had its core
  (`/proc/self/task/*/schedstat`), of the thread that waited longest;
* asleep: seconds in which the main thread neither ran nor wanted to, as while it waits for a batch,
  for a disk, or is stopped;
* memory: seconds in which something waited for pages (`/proc/pressure/memory`), and pages that had
  to be read from disk again;
* throttling: seconds in which a container's limit on processor time held everything back.

What a kernel does not count is left out. A look takes about a tenth of a millisecond.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from toque.training.processor_use import ProcessorUse, usable_cores

_TASKS: Final = "/proc/self/task"
_MEMORY: Final = "/proc/pressure/memory"
_LIMIT: Final = ("/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat")
_SECONDS: Final = 1.0
"""Between two looks, so that the shortest updates do not pay for them."""


@dataclass(frozen=True)
class HostCounts:
    """Counts until now; None where the kernel has none."""

    use: ProcessorUse
    waited: dict[str, float] | None
    """Seconds each thread waited for a core, by its number."""
    ran: float | None
    """Seconds the main thread had one."""
    memory_stall: float | None
    throttled: float | None
    major_faults: int

    @classmethod
    def now(cls) -> HostCounts:
        """Read the counters."""
        return cls(
            use=ProcessorUse.now(),
            waited=_waited(),
            ran=_schedule(Path(_TASKS, str(os.getpid())), 0),
            memory_stall=_memory_stall(),
            throttled=_throttled(),
            major_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        )

    def since(self, before: HostCounts) -> dict[str, Any]:
        """What happened between two readings, as the field `host` of a step event has it."""
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


@dataclass
class HostWatch:
    """Host use since the last look.

    Args:
        read: the counters.
        seconds: at least between two looks.
    """

    read: Callable[[], HostCounts] = HostCounts.now
    seconds: float = _SECONDS
    now: Callable[[], float] = time.monotonic
    _before: HostCounts | None = field(default=None, init=False)

    def begin(self) -> None:
        """Count from now on."""
        self._before = self.read()

    def look(self) -> dict[str, Any] | None:
        """What happened since the last look; None where that was a moment ago."""
        before = self._before
        if before is None or self.now() - before.use.at < self.seconds:
            return None
        self._before = found = self.read()
        return found.since(before)


def cores_and_threads(threads: int) -> dict[str, int]:
    """Fields for the start event: cores this process may use, and threads that compute."""
    return {"threads": threads, "cores": len(usable_cores())}


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
