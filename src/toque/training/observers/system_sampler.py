"""System sampler: a thread that writes a `system` event every few seconds of a run.

It reads nothing of the run but its step, so it can change no number. On several ranks the first one
has it and looks at its whole machine. What held the run up is counted by the kernel (`host` of an
event); what it does not count is left out:

* waiting for a core: seconds in which a thread was ready to run and another had its core
  (`/proc/self/task/*/schedstat`), of the thread that waited longest;
* asleep: seconds in which the main thread neither ran nor wanted to: it waits, or is stopped;
* memory: seconds in which something waited for pages (`/proc/pressure/memory`), and pages that had
  to be read from disk again;
* throttling: seconds in which a container's limit on processor time held everything back.
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

from toque.hardware.processor import ProcessorUse, contended, usable_cores
from toque.hardware.thread_waits import chosen_by_user, waits_in
from toque.training.callbacks import Callback, RunEnd, RunStart, StepInfo
from toque.units import Duration, Progress

_RATES: Final = (
    "disk_read_bytes_per_second",
    "disk_write_bytes_per_second",
    "network_received_bytes_per_second",
    "network_sent_bytes_per_second",
)
_THROTTLED: Final = {"throttled_usec": 1e6, "throttled_time": 1e9}  # cgroups v2, v1: units a second
_PATIENCE_SECONDS: Final = 5.0  # longest wait for a reading that hangs, as of a broken driver
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
_CORE: Final = 0  # NVML_TEMPERATURE_GPU


class Host:
    """The machine and this process since the last look, which psutil keeps for each thread."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        psutil.cpu_percent(percpu=True)  # what follows is measured from here
        self._process.cpu_percent()
        self._use, self._schedules, self._totals = ProcessorUse.now(), _schedules(), _totals()

    def look(self) -> dict[str, Any]:
        """Readings since the look before, None if unknown; psutil.Error or OSError if it fails."""
        used, schedules, totals = self._use, self._schedules, self._totals
        self._use, self._schedules, self._totals = ProcessorUse.now(), _schedules(), _totals()
        seconds = self._use.at - used.at
        grown = {name: n - totals[name] for name, n in self._totals.items() if name in totals}
        # A disk taken away leaves a smaller sum.
        rates = {
            name: round(max(0, grown.pop(name)) / max(seconds, 1e-3), 1) if name in grown else None
            for name in _RATES
        }
        host = {
            "seconds": seconds,
            "own_cores": (self._use.own - used.own) / seconds if seconds > 0 else 0.0,
            "others_cores": self._use.others_since(used),
            **grown,
        }
        if self._schedules and schedules:
            begun = dict.fromkeys(self._schedules, (0.0, 0.0)) | schedules
            waits = (waited - begun[tid][1] for tid, (_, waited) in self._schedules.items())
            host["waiting_for_core_seconds"] = max(waits)
            if (main := str(os.getpid())) in self._schedules:
                running = sum(self._schedules[main]) - sum(begun[main])
                host["asleep_seconds"] = max(0.0, seconds - running)
        cores, memory = psutil.cpu_percent(percpu=True), psutil.virtual_memory()
        mine = [cores[i] for i in usable_cores() if i < len(cores)]
        return {
            "cpu_percent": round(sum(mine) / len(mine), 1) if mine else None,
            "cpu_percent_by_core": mine,
            "process_cpu_percent": self._process.cpu_percent(),
            "memory_used_bytes": memory.total - memory.available,
            "memory_total_bytes": memory.total,
            "process_resident_bytes": self._process.memory_info().rss,
            **rates,
            "host": host,
        }


def _schedules() -> dict[str, tuple[float, float]]:
    """Seconds on a core, and ready without one, of each thread that asked for no low priority."""
    found: dict[str, tuple[float, float]] = {}
    with suppress(OSError):
        own = os.getpriority(os.PRIO_PROCESS, os.getpid())
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError, IndexError, ValueError):  # a thread may end meanwhile
                if os.getpriority(os.PRIO_PROCESS, int(thread.name)) <= own:
                    ran, waited = (thread / "schedstat").read_text(encoding="ascii").split()[:2]
                    found[thread.name] = int(ran) / 1e9, int(waited) / 1e9
    return found


def _totals() -> dict[str, float]:
    """Counts since the machine began: bytes by the name of their rate, the others as in `host`."""
    found: dict[str, float] = {"major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt}
    # psutil answers None where the system counts none: a container without disks of its own.
    if (disk := psutil.disk_io_counters()) is not None:
        found |= zip(_RATES[:2], (disk.read_bytes, disk.write_bytes), strict=True)
    cards = psutil.net_io_counters(pernic=True) or {}
    if others := [card for name, card in cards.items() if name != "lo"]:
        received, sent = (sum(getattr(c, n) for c in others) for n in ("bytes_recv", "bytes_sent"))
        found |= zip(_RATES[2:], (received, sent), strict=True)
    with suppress(OSError, ValueError, IndexError):
        some = Path("/proc/pressure/memory").read_text(encoding="ascii").splitlines()[0]
        found["memory_stall_seconds"] = int(some.rpartition("total=")[2]) / 1e6
    for path in ("/sys/fs/cgroup/cpu/cpu.stat", "/sys/fs/cgroup/cpu.stat"):
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in Path(path).read_text("ascii").splitlines())
            for name in _THROTTLED.keys() & counts.keys():
                found["throttled_seconds"] = int(counts[name]) / _THROTTLED[name]
    return found


Record = Callable[..., None]
"""`MetricsLog.record(event, **fields)`, from any thread; nothing before or after the run."""


class Gpus:
    """GPUs of the whole machine by `pynvml`, which raises if driver or rights are missing."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._handles = [
            nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())
        ]

    def look(self) -> list[dict[str, Any]]:
        """Readings of each GPU now; None for what a card or the rights of this process refuse."""
        nvml, ask = self._nvml, self._ask
        found = []
        for index, handle in enumerate(self._handles):
            memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
            use = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
            milliwatts = ask(nvml.nvmlDeviceGetPowerUsage, handle)
            held_down = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
            reading = {
                "index": index,
                "name": ask(nvml.nvmlDeviceGetName, handle),
                "utilisation_percent": None if use is None else use.gpu,
                "memory_used_bytes": None if memory is None else int(memory.used),
                "memory_total_bytes": None if memory is None else int(memory.total),
                "power_watts": None if milliwatts is None else milliwatts / 1000,
                "temperature_celsius": ask(nvml.nvmlDeviceGetTemperature, handle, _CORE),
                "throttled": [words for bit, words in _REASONS.items() if held_down & bit],
            }
            found.append(reading)
        return found

    def close(self) -> None:
        """Let NVML go."""
        self._ask(self._nvml.nvmlShutdown)

    def _ask(self, question: Callable[..., Any], *about: Any) -> Any:
        try:
            return question(*about)
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
    """Looks at the machine at intervals, and once more at the end, as long as a session lasts."""

    record: Record
    every_seconds: float
    warn: Callable[[Progress, str], None]  # told once that the system or its GPUs hide
    on_gpu: bool = False  # only then the machine's GPUs are looked at
    make_host: Callable[[], Host] = Host
    spinning: int = 0  # torch's threads that wait so; a machine too busy for them is named once
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
        spinning = 0 if on_gpu or chosen_by_user(waits_in()) else torch.get_num_threads()
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

    def _work(self, over: threading.Event) -> None:
        gpus, why = gpus_here() if self.on_gpu else (None, "")  # in the thread: drivers are slow
        self._unsaid += [why] if why else []
        try:
            host, looked = self.make_host(), time.monotonic()
            looks, last = 0, False
            while not last:
                last = over.wait(self.every_seconds)
                seconds = time.monotonic() - looked
                if last and looks and seconds < _LEAST_SECONDS:
                    return
                looks, looked = looks + 1, looked + seconds
                read = host.look() | {"gpus": [] if gpus is None else gpus.look()}
                self._name_busy_machine(read["host"]["others_cores"])
                self.record("system", step=self._at.step, seconds=round(seconds, 3), **read)
        except (psutil.Error, OSError, RuntimeError, ValueError) as error:
            self._unsaid.append(
                f"the system's figures cannot be read ({type(error).__name__}: {error}), so they "
                "are not recorded from here on; observe.system=null does without. The run continues"
            )
        finally:
            if gpus is not None:
                gpus.close()

    def _name_busy_machine(self, others: float) -> None:
        cores = len(usable_cores())
        if self._named or not contended(threads=self.spinning, others=others, cores=cores):
            return
        self._named = True
        self._unsaid.append(
            f"other programs keep {others:.1f} of {cores} cores busy, which slows down all of "
            f"torch's {self.spinning} threads: they wait for each other. End the other programs, "
            "or start the run with OMP_WAIT_POLICY=PASSIVE in the environment; the numbers stay "
            "the same"
        )
