"""System sampler: a thread that writes a `system` event every few seconds of a run.

It reads counters of the system and nothing of the run but its step, so it can change no number. On
several ranks the first one has it: the figures are of its machine, all GPUs there included.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import psutil

from toque.hardware.processor import contended, usable_cores
from toque.training.callbacks import Callback, RunEnd, RunStart, StepInfo
from toque.training.observers.gpu_readings import Gpus, no_gpus
from toque.training.observers.host_readings import Host
from toque.units import Progress

_PATIENCE_SECONDS = 5.0
"""Longest wait for a reading that hangs, as those of a broken driver do."""
_LEAST_SECONDS = 0.2
"""Rates over less say little: no last look after so short a time, unless it is the only one."""


class Record(Protocol):
    """`MetricsLog.record`: writes an event, from any thread; nothing before or after the run."""

    def __call__(self, event: str, **fields: Any) -> None:
        """Write an event with these fields."""


@dataclass(eq=False)
class SystemSampler(Callback):
    """Looks at the machine at intervals, and once more at the end, as long as a session lasts.

    Args:
        record: writes the event.
        every_seconds: between two looks.
        warn: takes a sentence where the system, or its GPUs, cannot be looked at; once.
        find_gpus: the GPUs and why there are none; called in the thread, as drivers are slow.
        make_host: the rest of the machine.
        spinning: torch's threads, where they wait for each other by spinning; a machine too busy
            for them is named once.
    """

    record: Record
    every_seconds: float
    warn: Callable[[Progress, str], None]
    find_gpus: Callable[[], tuple[Gpus | None, str | None]] = no_gpus
    make_host: Callable[[], Host] = Host
    spinning: int = 0
    _at: Progress = field(default_factory=Progress)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _unsaid: list[str] = field(default_factory=list)
    _named: bool = False

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
        gpus, why = self.find_gpus()
        if why is not None:
            self._unsaid.append(why)
        try:
            self._look_until(over, gpus)
        except (psutil.Error, OSError, RuntimeError, ValueError) as error:
            self._unsaid.append(
                f"the system's figures cannot be read ({type(error).__name__}: {error}), so they "
                "are not recorded from here on; observe.system=null does without. The run goes on"
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
