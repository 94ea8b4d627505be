"""Busy machine warning, when other programs want the cores that torch's threads spin on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from toque.training.callbacks import Callback
from toque.training.events import RunStart, StepInfo
from toque.training.processor_use import (
    PASSIVE,
    WAIT_VARIABLES,
    ProcessorUse,
    contended,
    usable_cores,
)
from toque.units import Progress

_SECONDS: Final = 10.0
"""Judged together: a compiler that runs for a moment is no verdict."""


@dataclass(eq=False)
class BusyMachine(Callback):
    """Warns, once, when others keep busy what torch's threads need, and says what to type.

    Args:
        warn: takes the warning.
        threads: of torch in this process.
        read: the processor's counters.
        environment: where the way of waiting was set, if it was.
    """

    warn: Callable[[Progress, str], None]
    threads: int
    read: Callable[[], ProcessorUse] = ProcessorUse.now
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    _before: ProcessorUse | None = None
    _done: bool = False

    def on_fit_start(self, start: RunStart) -> None:
        """Begin to count; nothing to do for one thread, or where somebody has chosen."""
        set_already = any(name in self.environment for name in WAIT_VARIABLES)
        self._done = self.threads < 2 or set_already
        self._before = None if self._done else self.read()

    def on_step(self, info: StepInfo) -> None:
        """Judge a stretch of updates."""
        if self._done or self._before is None:
            return
        now, cores = self.read(), len(usable_cores())
        if now.at - self._before.at < _SECONDS:
            return
        others, self._before = now.others_since(self._before), now
        if contended(threads=self.threads, others=others, cores=cores):
            self._done = True
            self.warn(
                info.progress,
                f"other programs keep {others:.1f} of {cores} cores busy while torch's "
                f"{self.threads} threads wait for each other by spinning, which can cost most of "
                f"the speed. Stop with Ctrl-C, which saves, and continue with {PASSIVE} in front: "
                f"`{PASSIVE} toque train ...` (from Python: set it before torch is imported); the "
                "numbers stay the same",
            )
