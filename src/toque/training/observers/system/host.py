"""Host figures between two looks: processor, memory, disk and network, through psutil."""

from __future__ import annotations

import time
from typing import Any, Final

import psutil

from toque.training.processor_use import usable_cores

_RATES: Final = {
    "disk_read_bytes_per_second": ("disk", "read_bytes"),
    "disk_write_bytes_per_second": ("disk", "write_bytes"),
    "network_received_bytes_per_second": ("network", "bytes_recv"),
    "network_sent_bytes_per_second": ("network", "bytes_sent"),
}
"""Figure -> whose counter it is the growth of. Disks and network are those of the machine, without
what it sends to itself."""
_LOOPBACK: Final = "lo"


class Host:
    """The machine and this process since the last look; used in one thread.

    Processor figures are of the cores this process may use. psutil keeps the last look for each
    thread by itself, so nobody else who asks it shortens ours.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._cores = usable_cores()
        self.look()  # what follows is measured from here

    def look(self) -> dict[str, Any]:
        """Figures since the look before; a percent of None or a rate of None is not known here.

        Raises:
            psutil.Error, OSError: the system does not let itself be looked at.
        """
        before = getattr(self, "_counters", None)
        self._counters = (time.monotonic(), _counters())
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
            **_rates(before, self._counters),
        }


_Look = tuple[float, dict[str, list[Any]]]


def _counters() -> dict[str, list[Any]]:
    # Either is None where the system counts none: a container without disks of its own.
    cards = psutil.net_io_counters(pernic=True) or {}
    outside = [counters for name, counters in cards.items() if name != _LOOPBACK]
    return {"disk": [psutil.disk_io_counters()], "network": outside}


def _rates(before: _Look | None, now: _Look) -> dict[str, float | None]:
    if before is None:
        return dict.fromkeys(_RATES)
    seconds = max(now[0] - before[0], 1e-3)
    return {
        name: _growth(before[1][kind], now[1][kind], counter, seconds)
        for name, (kind, counter) in _RATES.items()
    }


def _growth(before: list[Any], now: list[Any], counter: str, seconds: float) -> float | None:
    then, later = _sum(before, counter), _sum(now, counter)
    if then is None or later is None:
        return None
    return round(max(0, later - then) / seconds, 1)  # a disk taken away leaves a smaller sum


def _sum(devices: list[Any], counter: str) -> int | None:
    known = [int(getattr(device, counter)) for device in devices if device is not None]
    return sum(known) if known else None
