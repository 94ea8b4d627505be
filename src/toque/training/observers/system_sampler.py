"""System sampler: a thread that writes a `system` event every few seconds of a run.

The thread reads only the step of the run, so it cannot change results. With several ranks, rank 0
samples its entire machine. `host` in an event contains the kernel's counts of delays, if the kernel
has them:

* Waiting for a core: seconds that a ready thread waited because another thread had its core
  (`/proc/self/task/*/schedstat`). The value is of the thread that waited longest.
* Asleep: seconds in which the main thread was not ready to run, because it waited or was stopped.
* Memory: seconds in which a process waited for pages (`/proc/pressure/memory`), and the number of
  pages that were read from disk again.
* Throttling: seconds in which a container's limit on processor time stopped its processes.
"""

from __future__ import annotations

import importlib
import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import psutil
import torch

from toque.hardware.processor import ProcessorUse, is_contended, usable_cores
from toque.hardware.thread_waits import chosen_by_user, waits_in
from toque.training.callbacks import Callback, RunEnd, RunStart, StepInfo
from toque.units import Duration, Progress

_RATES: Final = (
    "disk_read_bytes_per_second",
    "disk_write_bytes_per_second",
    "network_received_bytes_per_second",
    "network_sent_bytes_per_second",
)
_THROTTLED_UNITS: Final = {"throttled_usec": 1e6, "throttled_time": 1e9}
"""Units per second of the counters of cgroups v2 and v1."""
# Wait for the last reading; it hangs if a driver is broken.
_PATIENCE_SECONDS: Final = 5.0
_MIN_SECONDS: Final = 0.2
"""Shortest time between the last two readings. Rates over a shorter time mean little."""
_THROTTLE_REASONS: Final = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""Names of NVML's bits nvmlClocksEventReason* for reduced clocks, except for idling."""
_NVML_TEMPERATURE_GPU: Final = 0


class Host:
    """Readings of the machine and this process. psutil measures since the thread's last reading."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        psutil.cpu_percent(percpu=True)  # the first call starts psutil's measurement
        self._process.cpu_percent()
        self._use = ProcessorUse.now()
        self._schedules = _read_schedules()
        self._totals = _read_totals()

    def read(self) -> dict[str, Any]:
        """Return the readings since the last call, with None for unknown readings.

        Raises:
            psutil.Error, OSError: The system refuses a reading.
        """
        use_before, schedules_before = self._use, self._schedules
        totals_before = self._totals
        self._use = ProcessorUse.now()
        self._schedules = _read_schedules()
        self._totals = _read_totals()

        seconds = self._use.at - use_before.at
        growth = {
            name: total - totals_before[name]
            for name, total in self._totals.items()
            if name in totals_before
        }
        rates: dict[str, float | None] = dict.fromkeys(_RATES)
        for name in rates.keys() & growth.keys():
            # The total is smaller after a disk was removed.
            rates[name] = round(max(0, growth.pop(name)) / max(seconds, 1e-3), 1)
        host = {
            "seconds": seconds,
            "own_cores": (self._use.own - use_before.own) / seconds
            if seconds > 0
            else 0.0,
            "others_cores": self._use.others_since(use_before),
            **growth,
        }
        if self._schedules and schedules_before:
            before = dict.fromkeys(self._schedules, (0.0, 0.0)) | schedules_before
            waits = (
                waited - before[tid][1] for tid, (_, waited) in self._schedules.items()
            )
            host["waiting_for_core_seconds"] = max(waits)
            main_thread = str(os.getpid())
            if main_thread in self._schedules:
                awake = sum(self._schedules[main_thread]) - sum(before[main_thread])
                host["asleep_seconds"] = max(0.0, seconds - awake)

        all_cores = psutil.cpu_percent(percpu=True)
        memory = psutil.virtual_memory()
        cores = [all_cores[i] for i in usable_cores() if i < len(all_cores)]
        return {
            "cpu_percent": round(sum(cores) / len(cores), 1) if cores else None,
            "cpu_percent_by_core": cores,
            "process_cpu_percent": self._process.cpu_percent(),
            "memory_used_bytes": memory.total - memory.available,
            "memory_total_bytes": memory.total,
            "process_resident_bytes": self._process.memory_info().rss,
            **rates,
            "host": host,
        }


def _read_schedules() -> dict[str, tuple[float, float]]:
    """Return the seconds that each thread ran and waited for a core, except low-priority threads.

    Toque's background work lowers the priority of its threads.
    """
    schedules: dict[str, tuple[float, float]] = {}
    with suppress(OSError):
        process_niceness = os.getpriority(os.PRIO_PROCESS, os.getpid())
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError, IndexError, ValueError):  # the thread may have ended
                if (
                    os.getpriority(os.PRIO_PROCESS, int(thread.name))
                    <= process_niceness
                ):
                    ran, waited = (
                        (thread / "schedstat").read_text(encoding="ascii").split()[:2]
                    )
                    schedules[thread.name] = int(ran) / 1e9, int(waited) / 1e9
    return schedules


def _read_totals() -> dict[str, float]:
    """Return the counts since the system started, by the names of rates and of `host`."""
    totals: dict[str, float] = {
        "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    }
    # psutil returns None if the system does not count, e.g. in a container without disks.
    disk = psutil.disk_io_counters()
    if disk is not None:
        totals["disk_read_bytes_per_second"] = disk.read_bytes
        totals["disk_write_bytes_per_second"] = disk.write_bytes
    interfaces = psutil.net_io_counters(pernic=True) or {}
    interfaces.pop("lo", None)
    if interfaces:
        counters = interfaces.values()
        totals["network_received_bytes_per_second"] = sum(
            c.bytes_recv for c in counters
        )
        totals["network_sent_bytes_per_second"] = sum(c.bytes_sent for c in counters)
    with suppress(OSError, ValueError, IndexError):
        first_line = (
            Path("/proc/pressure/memory").read_text(encoding="ascii").splitlines()[0]
        )
        totals["memory_stall_seconds"] = int(first_line.rpartition("total=")[2]) / 1e6
    for path in ("/sys/fs/cgroup/cpu/cpu.stat", "/sys/fs/cgroup/cpu.stat"):
        with suppress(OSError, ValueError):
            counts = dict(
                line.split() for line in Path(path).read_text("ascii").splitlines()
            )
            for name in _THROTTLED_UNITS.keys() & counts.keys():
                totals["throttled_seconds"] = int(counts[name]) / _THROTTLED_UNITS[name]
    return totals


Record = Callable[..., None]
"""`MetricsLog.record(event, **fields)`: any thread may call it. Outside a run it does nothing."""


class Gpus:
    """Readings of all GPUs of the machine by `pynvml`, which raises if the driver is missing."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._handles = [
            nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())
        ]

    def read(self) -> list[dict[str, Any]]:
        """Return the readings of each GPU, with None for unsupported readings."""
        nvml, query = self._nvml, self._query
        readings = []
        for index, handle in enumerate(self._handles):
            memory = query(nvml.nvmlDeviceGetMemoryInfo, handle)
            use = query(nvml.nvmlDeviceGetUtilizationRates, handle)
            milliwatts = query(nvml.nvmlDeviceGetPowerUsage, handle)
            reason_bits = (
                query(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
            )
            reading = {
                "index": index,
                "name": query(nvml.nvmlDeviceGetName, handle),
                "utilisation_percent": None if use is None else use.gpu,
                "memory_used_bytes": None if memory is None else int(memory.used),
                "memory_total_bytes": None if memory is None else int(memory.total),
                "power_watts": None if milliwatts is None else milliwatts / 1000,
                "temperature_celsius": query(
                    nvml.nvmlDeviceGetTemperature, handle, _NVML_TEMPERATURE_GPU
                ),
                "throttled": [
                    name for bit, name in _THROTTLE_REASONS.items() if reason_bits & bit
                ],
            }
            readings.append(reading)
        return readings

    def close(self) -> None:
        """Shut NVML down."""
        self._query(self._nvml.nvmlShutdown)

    def _query(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._nvml.NVMLError:  # MIG, old GPUs and missing permissions
            return None


def find_gpus() -> tuple[Gpus | None, str]:
    """Return the GPUs of this machine, or None and a warning if they cannot be read."""
    try:
        return Gpus(importlib.import_module("pynvml")), ""
    except ImportError:
        return None, (
            "the package nvidia-ml-py is not installed, so the GPU's use, memory and temperature "
            "are not recorded. Install it with pip install 'toque[gpu]'. The run continues"
        )
    except Exception as error:  # noqa: BLE001 - a broken driver library may raise anything
        return None, (
            f"the GPU cannot be read ({type(error).__name__}: {error}), so its use is not "
            "recorded. In a container, check that the driver's library libnvidia-ml.so.1 exists "
            "and that you may read it. The run continues"
        )


@dataclass(eq=False)
class SystemSampler(Callback):
    """Callback that records the machine at intervals and at the end of a session."""

    record: Record
    every_seconds: float
    warn: Callable[[Progress, str], None]
    on_gpu: bool = False  # whether to read the machine's GPUs
    make_host: Callable[[], Host] = Host
    spinning: int = 0  # torch's threads that spin while they wait
    _at: Progress = field(default_factory=Progress)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _warnings: list[str] = field(default_factory=list)
    _warned_of_busy_machine: bool = False

    @classmethod
    def from_settings(
        cls,
        every: Duration,
        record: Record,
        warn: Callable[[Progress, str], None],
        device: torch.device,
    ) -> Self:
        """Build the sampler of a run on `device`. `every` is the setting observe.system."""
        on_gpu = device.type == "cuda"
        spinning = (
            0 if on_gpu or chosen_by_user(waits_in()) else torch.get_num_threads()
        )
        return cls(record, every.seconds or 0.0, warn, on_gpu, spinning=spinning)

    def on_fit_start(self, start: RunStart) -> None:
        """Start the thread."""
        self._at = start.progress
        # A thread that hangs must not keep the process alive, so it is a daemon. It must not write
        # into the next session either, so every session has its own event.
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._work, args=(self._over,), name="system sampler", daemon=True
        )
        self._thread.start()

    def on_step(self, info: StepInfo) -> None:
        """Note the step, and show the thread's warnings."""
        self._at = info.progress
        self._show_warnings()

    def on_fit_end(self, end: RunEnd) -> None:
        """Wait for the last reading."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)
        self._show_warnings()

    def _show_warnings(self) -> None:
        # Only the loop's thread warns, because other callbacks are not thread-safe.
        while self._warnings:
            self.warn(self._at, self._warnings.pop(0))

    def _work(self, over: threading.Event) -> None:
        gpus: Gpus | None = None
        if self.on_gpu:
            # Drivers are slow, so this is not in the loop's thread.
            gpus, problem = find_gpus()
            if problem:
                self._warnings.append(problem)

        try:
            host = self.make_host()
            read_at = time.monotonic()
            has_read = is_last = False
            while not is_last:
                is_last = over.wait(self.every_seconds)
                seconds = time.monotonic() - read_at
                if is_last and has_read and seconds < _MIN_SECONDS:
                    return
                has_read = True
                read_at += seconds
                reading = host.read()
                reading["gpus"] = [] if gpus is None else gpus.read()
                self._warn_of_busy_machine(reading["host"]["others_cores"])
                self.record(
                    "system", step=self._at.step, seconds=round(seconds, 3), **reading
                )
        except (psutil.Error, OSError, RuntimeError, ValueError) as error:
            self._warnings.append(
                f"the system cannot be read ({type(error).__name__}: {error}), so its use is no "
                "longer recorded. The run continues. Set observe.system=null to turn this off"
            )
        finally:
            if gpus is not None:
                gpus.close()

    def _warn_of_busy_machine(self, others: float) -> None:
        cores = len(usable_cores())
        if self._warned_of_busy_machine or not is_contended(
            threads=self.spinning, others=others, cores=cores
        ):
            return
        self._warned_of_busy_machine = True
        self._warnings.append(
            f"other programs keep {others:.1f} of {cores} cores busy, which slows down all of "
            f"torch's {self.spinning} threads, because they wait for each other. End the other "
            "programs, or start the run with OMP_WAIT_POLICY=PASSIVE in the environment. The "
            "results stay the same"
        )
