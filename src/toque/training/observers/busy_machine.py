"""Busy machine: beside other programs torch's threads sleep while they wait, and only then."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from toque.training.callbacks import Callback
from toque.training.events import RunEnd, RunStart, StepInfo
from toque.training.processor_use import (
    WAIT_VARIABLES,
    ProcessorUse,
    contended,
    others_now,
)
from toque.training.short_waits import ShortWaits
from toque.units import Progress

_SECONDS: Final = 2.0
"""Judged together: a program that runs for a moment is no verdict."""


@dataclass(eq=False)
class BusyMachine(Callback):
    """Looks at the cores all along a run, and says what it changed the first time.

    Args:
        say: takes a sentence.
        waits: switched on while others keep busy what torch's threads need.
        read: the processor's counters.
        look: cores that others keep busy now, where there is no reading before.
        environment: where the way of waiting was set, if it was; then it stays.
    """

    say: Callable[[Progress, str], None]
    waits: ShortWaits
    read: Callable[[], ProcessorUse] = ProcessorUse.now
    look: Callable[[], float] = others_now
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    _before: ProcessorUse | None = None
    _said: bool = False

    def on_fit_start(self, start: RunStart) -> None:
        """Look, and begin to count; nothing to do for one thread, or where somebody has chosen."""
        chosen = any(name in self.environment for name in WAIT_VARIABLES)
        if self.waits.threads < 2 or chosen:
            return
        self._suit(self.look(), start.progress)
        self._before = self.read()

    def on_step(self, info: StepInfo) -> None:
        """Judge a stretch of updates."""
        if self._before is None:
            return
        now = self.read()
        if now.at - self._before.at < _SECONDS:
            return
        others, self._before = now.others_since(self._before), now
        self._suit(others, info.progress)

    def on_fit_end(self, end: RunEnd) -> None:
        """Leave the threads as they were."""
        self._before = None
        self.waits.off()

    def _suit(self, others: float, at: Progress) -> None:
        threads, cores = self.waits.threads, self.waits.cores
        if not contended(threads=threads, others=others, cores=cores):
            self.waits.off()
            return
        self.waits.on()
        if not self._said:
            self._said = True
            self.say(
                at,
                f"other programs keep {others:.1f} of {cores} cores busy: while they do, torch's "
                f"{threads} threads wait for each other without spinning, which keeps more of the "
                "speed; the numbers stay the same",
            )
