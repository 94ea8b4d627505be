"""System sampler: a thread that writes a `system` event every few seconds of a run.

The thread reads only the step of the run, so it cannot change results. With several ranks, rank 0
samples its entire machine. An event's `host` contains the delays that the kernel counts, as far as
this kernel supports them:

* Waiting for a core: seconds that a ready thread waited because another thread had its core
  (`/proc/self/task/*/schedstat`), for the thread that waited longest.
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
from typing import Any, Final, NamedTuple, Self

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
"""Units per second in the throttling counters of cgroups v2 and v1."""
_PATIENCE_SECONDS: Final = 5.0
"""Maximum wait for the last reading, which hangs if a driver is broken."""
_MIN_SECONDS: Final = 0.2
"""Minimum time between the last two readings. Rates over a shorter time mean little."""
_THROTTLE_REASONS: Final = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""Names of NVML's bits nvmlClocksEventReason* for reduced clocks, except for idling."""
_NVML_TEMPERATURE_GPU: Final = 0

_Schedule = tuple[float, float]
"""Seconds for which a thread ran, and for which it waited for a core."""
_NEW_THREAD: Final = (0.0, 0.0)


class _Counters(NamedTuple):
    """Counters of the machine and this process at one time."""

    use: ProcessorUse
    schedules: dict[str, _Schedule]
    """Schedules by thread id."""
    totals: dict[str, float]
    """Totals since the system started, by the names of rates and of fields in `host`."""

    @classmethod
    def now(cls) -> Self:
        """Read the counters."""
        return cls(ProcessorUse.now(), _read_schedules(), _read_totals())


class Host:
    """Reader of the machine and this process. One thread must make all readings."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        # psutil measures the use of cores since the previous call, so call it once first.
        psutil.cpu_percent(percpu=True)
        self._process.cpu_percent()
        self._counters = _Counters.now()

    def read(self) -> dict[str, Any]:
        """Return the readings since the last call, with None for unknown readings.

        Raises:
            psutil.Error, OSError: The system refuses a reading.
        """
        before = self._counters
        now = self._counters = _Counters.now()

        seconds = now.use.at - before.use.at
        growth = {
            name: total - before.totals[name]
            for name, total in now.totals.items()
            if name in before.totals
        }
        # `host` has the rest of the growth.
        rates = {name: _rate(growth.pop(name, None), seconds) for name in _RATES}

        own_seconds = now.use.own - before.use.own
        host = {
            "seconds": seconds,
            "own_cores": own_seconds / seconds if seconds > 0 else 0.0,
            "others_cores": now.use.others_since(before.use),
            **growth,
            **_thread_delays(before, now),
        }

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


def _rate(growth: float | None, seconds: float) -> float | None:
    """Return the growth of a total per second, or None if it is unknown."""
    if growth is None:
        return None
    # The total is smaller after a disk was removed.
    return round(max(0, growth) / max(seconds, 1e-3), 1)


def _thread_delays(before: _Counters, now: _Counters) -> dict[str, float]:
    """Return the longest wait for a core, and the time for which the main thread slept."""
    if not before.schedules or not now.schedules:
        return {}
    waits = []
    for thread, (_, waited) in now.schedules.items():
        _, waited_before = before.schedules.get(thread, _NEW_THREAD)
        waits.append(waited - waited_before)
    delays = {"waiting_for_core_seconds": max(waits)}

    main_thread = str(os.getpid())
    if main_thread in now.schedules:
        # A thread that runs or waits for a core is awake.
        awake_before = sum(before.schedules.get(main_thread, _NEW_THREAD))
        awake = sum(now.schedules[main_thread]) - awake_before
        seconds = now.use.at - before.use.at
        delays["asleep_seconds"] = max(0.0, seconds - awake)
    return delays


def _read_schedules() -> dict[str, _Schedule]:
    """Return the schedule of each thread except threads with a low priority.

    Toque's background work lowers the priority of its threads.
    """
    schedules = {}
    with suppress(OSError):
        process_niceness = os.getpriority(os.PRIO_PROCESS, os.getpid())
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError, IndexError, ValueError):  # the thread may have ended
                niceness = os.getpriority(os.PRIO_PROCESS, int(thread.name))
                if niceness > process_niceness:
                    continue
                fields = (thread / "schedstat").read_text(encoding="ascii").split()
                ran, waited = fields[:2]
                schedules[thread.name] = int(ran) / 1e9, int(waited) / 1e9
    return schedules


def _read_totals() -> dict[str, float]:
    """Return the totals since the system started. Totals that are not available are omitted."""
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
        received = sum(counter.bytes_recv for counter in counters)
        totals["network_received_bytes_per_second"] = received
        sent = sum(counter.bytes_sent for counter in counters)
        totals["network_sent_bytes_per_second"] = sent

    with suppress(OSError, ValueError, IndexError):
        pressure = Path("/proc/pressure/memory").read_text(encoding="ascii")
        some_process_waited = pressure.splitlines()[0]
        microseconds = some_process_waited.rpartition("total=")[2]
        totals["memory_stall_seconds"] = int(microseconds) / 1e6

    for path in ("/sys/fs/cgroup/cpu/cpu.stat", "/sys/fs/cgroup/cpu.stat"):
        with suppress(OSError, ValueError):
            lines = Path(path).read_text(encoding="ascii").splitlines()
            counts = dict(line.split() for line in lines)
            for name in _THROTTLED_UNITS.keys() & counts.keys():
                totals["throttled_seconds"] = int(counts[name]) / _THROTTLED_UNITS[name]
    return totals


Record = Callable[..., None]
"""`MetricsLog.record(event, **fields)`: any thread may call it. Outside a run it does nothing."""


class Gpus:
    """Reader of the machine's GPUs through `pynvml`, which raises if the driver is missing."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._handles = [
            nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())
        ]

    def read(self) -> list[dict[str, Any]]:
        """Return the readings of each GPU, with None for unsupported readings."""
        return [
            self._read_gpu(index, handle) for index, handle in enumerate(self._handles)
        ]

    def _read_gpu(self, index: int, handle: Any) -> dict[str, Any]:
        nvml, query = self._nvml, self._query
        memory = query(nvml.nvmlDeviceGetMemoryInfo, handle)
        use = query(nvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = query(nvml.nvmlDeviceGetPowerUsage, handle)
        celsius = query(nvml.nvmlDeviceGetTemperature, handle, _NVML_TEMPERATURE_GPU)
        reasons = query(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
        return {
            "index": index,
            "name": query(nvml.nvmlDeviceGetName, handle),
            "utilisation_percent": getattr(use, "gpu", None),
            "memory_used_bytes": getattr(memory, "used", None),
            "memory_total_bytes": getattr(memory, "total", None),
            "power_watts": None if milliwatts is None else milliwatts / 1000,
            "temperature_celsius": celsius,
            "throttled": [
                name for bit, name in _THROTTLE_REASONS.items() if reasons & bit
            ],
        }

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
            "the package nvidia-ml-py is not installed, so the run does not record the GPU's "
            "utilisation, memory and temperature. Install it with pip install 'toque[gpu]'. The "
            "run continues"
        )
    except Exception as error:  # noqa: BLE001 - a broken driver library may raise anything
        return None, (
            f"the GPU cannot be read ({type(error).__name__}: {error}), so the run does not record "
            "its utilisation. In a container, check that the driver's library libnvidia-ml.so.1 "
            "exists and that you may read it. The run continues"
        )


@dataclass(eq=False)
class SystemSampler(Callback):
    """Callback that records the machine at intervals and at the end of a session."""

    record: Record
    every_seconds: float
    warn: Callable[[Progress, str], None]
    on_gpu: bool = False  # True to read the machine's GPUs
    make_host: Callable[[], Host] = Host
    spinning: int = 0  # number of torch's threads that spin while they wait
    _at: Progress = field(default_factory=Progress)
    _session_over: threading.Event = field(default_factory=threading.Event)
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
        spinning = torch.get_num_threads()
        if on_gpu or chosen_by_user(waits_in()):
            spinning = 0
        return cls(record, every.seconds or 0.0, warn, on_gpu, spinning=spinning)

    def on_fit_start(self, start: RunStart) -> None:
        """Start the thread."""
        self._at = start.progress
        # A thread that hangs must not write into the next session, so every session has its own
        # event. It must not keep the process alive either, so it is a daemon.
        self._session_over = threading.Event()
        self._thread = threading.Thread(
            target=self._sample_session,
            args=(self._session_over,),
            name="system sampler",
            daemon=True,
        )
        self._thread.start()

    def on_step(self, info: StepInfo) -> None:
        """Note the step, and show the thread's warnings."""
        self._at = info.progress
        self._show_warnings()

    def on_fit_end(self, end: RunEnd) -> None:
        """Wait for the last reading."""
        self._session_over.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)
        self._show_warnings()

    def _show_warnings(self) -> None:
        # Only the loop's thread warns, because other callbacks are not thread-safe.
        while self._warnings:
            self.warn(self._at, self._warnings.pop(0))

    def _sample_session(self, session_over: threading.Event) -> None:
        """Record readings until the session is over. An error ends only the recording."""
        gpus: Gpus | None = None
        if self.on_gpu:
            # Drivers are slow, so the loop's thread does not load them.
            gpus, problem = find_gpus()
            if problem:
                self._warnings.append(problem)

        try:
            self._record_readings(gpus, session_over)
        except (psutil.Error, OSError, RuntimeError, ValueError) as error:
            self._warnings.append(
                f"the system cannot be read ({type(error).__name__}: {error}), so the run no "
                "longer records its use. The run continues. Set observe.system=null to turn this "
                "off"
            )
        finally:
            if gpus is not None:
                gpus.close()

    def _record_readings(
        self, gpus: Gpus | None, session_over: threading.Event
    ) -> None:
        host = self.make_host()
        read_at = time.monotonic()
        has_read = False
        while not session_over.wait(self.every_seconds):
            read_at = self._record_reading(host, gpus, read_at)
            has_read = True
        # A short session also has a reading.
        if not has_read or time.monotonic() - read_at >= _MIN_SECONDS:
            self._record_reading(host, gpus, read_at)

    def _record_reading(self, host: Host, gpus: Gpus | None, since: float) -> float:
        """Record a reading of the time since the previous one. Return its own time."""
        now = time.monotonic()
        reading = host.read()
        reading["gpus"] = [] if gpus is None else gpus.read()
        self._warn_of_busy_machine(reading["host"]["others_cores"])
        seconds = round(now - since, 3)
        self.record("system", step=self._at.step, seconds=seconds, **reading)
        return now

    def _warn_of_busy_machine(self, others: float) -> None:
        """Queue a warning, once, if programs on `others` cores delay the spinning threads."""
        cores = len(usable_cores())
        if self._warned_of_busy_machine or not is_contended(
            threads=self.spinning, others=others, cores=cores
        ):
            return
        self._warned_of_busy_machine = True
        self._warnings.append(
            f"other programs keep {others:.1f} of {cores} cores busy. This slows down all "
            f"{self.spinning} threads of torch, because they wait for each other. End the other "
            "programs, or start the run with OMP_WAIT_POLICY=PASSIVE in the environment. The "
            "results stay the same"
        )
