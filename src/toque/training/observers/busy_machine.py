"""Busy machine: beside other programs torch's threads sleep while they wait and share cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from toque.training.callbacks import Callback
from toque.training.events import RunEnd, RunStart, StepInfo
from toque.training.processor_use import (
    PLACE_VARIABLES,
    WAIT_VARIABLES,
    WORTH_WHILE,
    ProcessorUse,
    contended,
    others_now,
)
from toque.training.short_waits import FewerCores, ShortWaits
from toque.units import Progress

_SECONDS: Final = 2.0
"""Judged together: a program that runs for a moment is no verdict."""


@dataclass(eq=False)
class BusyMachine(Callback):
    """Looks at the cores all along a run, and says what it changed the first time.

    Args:
        say: takes a sentence.
        waits: switched on while others keep busy what torch's threads need.
        fewer: switched on while others, besides, fill the cores that it leaves them.
        read: the processor's counters.
        look: cores that others keep busy now, where there is no reading before.
        environment: where the way of waiting, or where to run, was set, if it was; then it stays.
    """

    say: Callable[[Progress, str], None]
    waits: ShortWaits
    fewer: FewerCores
    read: Callable[[], ProcessorUse] = ProcessorUse.now
    look: Callable[[], float] = others_now
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    _before: ProcessorUse | None = None
    _said: bool = False

    def on_fit_start(self, start: RunStart) -> None:
        """Look, and begin to count; nothing to do for one thread, or where somebody has chosen."""
        if self.waits.threads < 2 or self._is_set(WAIT_VARIABLES):
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
        others, busy = now.others_since(self._before), now.busy_since(self._before)
        self._before = now
        if self._suit(others, info.progress) and not self._is_set(PLACE_VARIABLES):
            self._spread_or_gather(others, idle=self.waits.cores - busy)

    def on_fit_end(self, end: RunEnd) -> None:
        """Leave the threads as they were."""
        self._before = None
        self.waits.off()
        self.fewer.off()

    def _is_set(self, names: Iterable[str]) -> bool:
        return any(name in self.environment for name in names)

    def _suit(self, others: float, at: Progress) -> bool:
        """Switch to others' use of the cores; whether there is too much of it."""
        threads, cores = self.waits.threads, self.waits.cores
        if not contended(threads=threads, others=others, cores=cores):
            self.waits.off()
            self.fewer.off()
            return False
        self.waits.on()
        if not self._said:
            self._said = True
            self.say(
                at,
                f"other programs keep {others:.1f} of {cores} cores busy: while they do, torch's "
                f"{threads} threads wait for each other without spinning, two to a core where "
                "others fill the rest, which keeps more of the speed; the numbers stay the same",
            )
        return True

    def _spread_or_gather(self, others: float, *, idle: float) -> None:
        """Keep to fewer cores while others fill those that are left to them."""
        left = self.fewer.n_left
        if self.fewer.kept is not None and idle > WORTH_WHILE:
            self.fewer.off()  # they are on ours, or were done for a moment
        elif left and others > left - WORTH_WHILE:
            self.fewer.on()
