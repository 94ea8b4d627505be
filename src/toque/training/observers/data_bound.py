"""Data-bound warning, when updates wait for their batches despite the prefetch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from toque.training.bottlenecks import DATA_ADVICE, DATA_SHARE
from toque.training.callbacks import Callback
from toque.training.events import RunStart, StepInfo
from toque.training.observers.step_window import Window
from toque.units import Progress

_UPDATES: Final = 50
"""Judged together, so that a single cold read of the disk is no verdict."""


@dataclass(eq=False)
class DataBound(Callback):
    """Warns when the loop waits for data longer than `share` of the time.

    Batches are prefetched by a thread, so a loop waits only if they take longer to make than to
    train on. It warns once, and again only after things were better for a while.

    Args:
        warn: takes the warning.
        share: of the wall time of the updates.
        updates: judged together; the first of a session is left out, as nothing was prefetched.
    """

    warn: Callable[[Progress, str], None]
    share: float = DATA_SHARE
    updates: int = _UPDATES
    _window: Window | None = None
    _warned: bool = False

    def on_fit_start(self, start: RunStart) -> None:
        """Start a new window."""
        self._window = None

    def on_step(self, info: StepInfo) -> None:
        """Add up, and judge once the window is full."""
        if self._window is None:
            self._window = Window()
            return
        if info.slowed:
            return
        window = self._window
        window.add(info)
        if window.n_steps < self.updates:
            return
        self._window = Window()
        waited = window.data_wait_seconds / window.seconds if window.seconds > 0 else 0.0
        if waited > self.share and not self._warned:
            self.warn(
                info.progress,
                f"data-bound {waited:.0%}: of the time of the last {window.n_steps} updates so "
                f"much went into waiting for batches. {DATA_ADVICE}",
            )
        self._warned = waited > self.share
