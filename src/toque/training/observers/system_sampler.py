"""System sampler: a thread that writes a `system` event every few seconds of a run.

It reads counters of the system and nothing of the run but its step, so it can change no number. On
several ranks the first one has it: the figures are of its machine, all GPUs there included.

Host readings between two looks: processor, memory, disk, network, and what held the run up.

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

import importlib
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self

import psutil
import torch

from toque.hardware.processor import WAIT_VARIABLES, ProcessorUse, contended, usable_cores
from toque.training.callbacks import Callback, RunEnd, RunStart, StepInfo
from toque.units import Duration, Progress

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


_PATIENCE_SECONDS: Final = 5.0
"""Longest wait for a reading that hangs, as those of a broken driver do."""
_LEAST_SECONDS: Final = 0.2
"""Rates over less say little: no last look after so short a time, unless it is the only one."""
_REASONS: Final = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's nvmlClocksEventReason* for clocks lower than they could be; idling is none."""
_CORE: Final = 0
"""NVML_TEMPERATURE_GPU"""


class Record(Protocol):
    """`MetricsLog.record`: writes an event, from any thread; nothing before or after the run."""

    def __call__(self, event: str, **fields: Any) -> None:
        """Write an event with these fields."""


class Gpus:
    """GPUs of the whole machine by NVML, whichever of them this process computes on.

    Args:
        nvml: the module `pynvml` of nvidia-ml-py, or one with its functions.

    Raises:
        Exception: what `nvml.nvmlInit` raises where the driver or the rights are missing.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._handles = [
            nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())
        ]

    def look(self) -> list[dict[str, Any]]:
        """Figures of each GPU now; None for what a card or the rights of this process refuse."""
        return [self._figures(index, handle) for index, handle in enumerate(self._handles)]

    def close(self) -> None:
        """Let NVML go."""
        self._ask(self._nvml.nvmlShutdown)

    def _figures(self, index: int, handle: Any) -> dict[str, Any]:
        nvml, ask = self._nvml, self._ask
        memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        held_down = ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)) or 0
        return {
            "index": index,
            "name": ask(lambda: nvml.nvmlDeviceGetName(handle)),
            "utilisation_percent": ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "memory_used_bytes": None if memory is None else int(memory.used),
            "memory_total_bytes": None if memory is None else int(memory.total),
            "power_watts": ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            "temperature_celsius": ask(lambda: nvml.nvmlDeviceGetTemperature(handle, _CORE)),
            "throttled": [words for bit, words in _REASONS.items() if held_down & bit],
        }

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self._nvml.NVMLError:  # MIG, old cards and missing rights refuse some of them
            return None


def gpus_here() -> tuple[Gpus | None, str]:
    """The GPUs of this machine, and a sentence for the user where they cannot be looked at."""
    try:
        return Gpus(importlib.import_module("pynvml")), ""
    except ImportError:
        return None, (
            "the package nvidia-ml-py is not installed, so use, memory and heat of the GPU are not "
            "recorded: pip install 'toque[gpu]'. The run continues"
        )
    except Exception as error:  # noqa: BLE001 - NVMLError, and what a broken driver library raises
        return None, (
            f"the GPU's figures cannot be read ({type(error).__name__}: {error}), so they are not "
            "recorded. In a container the driver's library libnvidia-ml.so.1 and the right to "
            "read it may be missing. The run continues"
        )


@dataclass(eq=False)
class SystemSampler(Callback):
    """Looks at the machine at intervals, and once more at the end, as long as a session lasts.

    Args:
        record: writes the event.
        every_seconds: between two looks.
        warn: takes a sentence where the system, or its GPUs, cannot be looked at; once.
        on_gpu: True if the run computes on a GPU; only then the machine's GPUs are looked at.
        make_host: the rest of the machine.
        spinning: torch's threads, where they wait for each other by spinning; a machine too busy
            for them is named once.
    """

    record: Record
    every_seconds: float
    warn: Callable[[Progress, str], None]
    on_gpu: bool = False
    make_host: Callable[[], Host] = Host
    spinning: int = 0
    _at: Progress = field(default_factory=Progress)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _unsaid: list[str] = field(default_factory=list)
    _named: bool = False

    @classmethod
    def from_settings(
        cls,
        every: Duration,
        record: Record,
        warn: Callable[[Progress, str], None],
        device: torch.device,
    ) -> Self:
        """The sampler of a run on `device`, for `observe.system`."""
        on_gpu = device.type == "cuda"
        passive = any(name in os.environ for name in WAIT_VARIABLES)
        spinning = 0 if on_gpu or passive else torch.get_num_threads()
        return cls(record, every.seconds or 0.0, warn, on_gpu, spinning=spinning)

    def on_fit_start(self, start: RunStart) -> None:
        """Start the thread."""
        self._at, self._over = start.progress, threading.Event()
        # A daemon, with an event of its own: one that hangs must neither keep the process alive
        # nor write into the session after this one.
        self._thread = threading.Thread(
            target=self._work, args=(self._over,), name="system sampler", daemon=True
        )
        self._thread.start()

    def on_step(self, info: StepInfo) -> None:
        """Remember where the run is, and say what the thread has to say."""
        self._at = info.progress
        self._speak()

    def on_fit_end(self, end: RunEnd) -> None:
        """Have the last look, and stop."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)
        self._speak()

    def _speak(self) -> None:
        # Only the loop's thread warns: what listens to warnings is not made for several.
        while self._unsaid:
            self.warn(self._at, self._unsaid.pop(0))

    def _name_busy_machine(self, others: float) -> None:
        cores = len(usable_cores())
        if self._named or not contended(threads=self.spinning, others=others, cores=cores):
            return
        self._named = True
        self._unsaid.append(
            f"other programs keep {others:.1f} of {cores} cores busy, and torch's {self.spinning} "
            "threads wait for each other by spinning, which may slow training down to a tenth: end "
            "the other programs, or start it with OMP_WAIT_POLICY=PASSIVE in the environment; the "
            "numbers stay the same"
        )

    def _work(self, over: threading.Event) -> None:
        gpus, why = gpus_here() if self.on_gpu else (None, "")  # in the thread: drivers are slow
        self._unsaid += [why] if why else []
        try:
            self._look_until(over, gpus)
        except (psutil.Error, OSError, RuntimeError, ValueError) as error:
            self._unsaid.append(
                f"the system's figures cannot be read ({type(error).__name__}: {error}), so they "
                "are not recorded from here on; observe.system=null does without. The run continues"
            )
        finally:
            if gpus is not None:
                gpus.close()

    def _look_until(self, over: threading.Event, gpus: Gpus | None) -> None:
        host, looked = self.make_host(), time.monotonic()
        looks, last = 0, False
        while not last:
            last = over.wait(self.every_seconds)
            seconds = time.monotonic() - looked
            if last and looks and seconds < _LEAST_SECONDS:
                return
            looks, looked = looks + 1, looked + seconds
            figures = host.look() | {"gpus": [] if gpus is None else gpus.look()}
            self._name_busy_machine(figures["host"]["others_cores"])
            self.record("system", step=self._at.step, seconds=round(seconds, 3), **figures)
