"""Peak CUDA memory by phase: forward, backward, update and evaluation, for step events.

Asking the allocator costs up to a tenth of a millisecond, so of the updates between two step events
only the first is asked about; an update with longer rows may have needed more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch

from toque.training.callbacks import Callback
from toque.training.events import RunEnd, RunStart
from toque.training.phases import UNWATCHED, Phase, Phases
from toque.units import Progress


@final
class CudaAllocator:
    """torch's own count of a device's bytes; it waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        """Count the peak from here."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Bytes at most since `begin`, what was there before included."""
        return torch.cuda.max_memory_allocated(self._device)


@dataclass(eq=False)
class PhaseMemory(Callback):
    """Peaks by phase since they were last taken.

    Args:
        phases: of the loop.
        begin: counts the peak from here.
        peak: bytes since `begin`.
    """

    phases: Phases
    begin: Callable[[], None]
    peak: Callable[[], int]
    _peaks: dict[str, int] = field(default_factory=dict)
    _asking: bool = False
    _asked: bool = False

    def on_fit_start(self, start: RunStart) -> None:
        """Watch the loop's phases."""
        self._peaks, self._asking, self._asked = {}, False, False
        self.phases.watchers.append(self._watch)

    def on_before_step(self, at: Progress) -> None:
        """Ask about the first update since the peaks were taken."""
        self._asking, self._asked = not self._asked, True

    def on_before_evaluate(self, at: Progress) -> None:
        """An evaluation begins."""
        self._asking = False
        self.begin()

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Keep what it needed."""
        self._keep("evaluation")

    def on_fit_end(self, end: RunEnd) -> None:
        """Watch no more."""
        if self._watch in self.phases.watchers:
            self.phases.watchers.remove(self._watch)

    def take(self) -> dict[str, Any]:
        """The field of a step event; empty without an update since the last."""
        found, self._peaks, self._asked = self._peaks, {}, False
        return {"peak_memory_bytes": found} if found else {}

    def _watch(self, phase: Phase) -> AbstractContextManager[Any]:
        return self._around(phase) if self._asking and phase != "clip" else UNWATCHED

    @contextmanager
    def _around(self, phase: Phase) -> Iterator[None]:
        self.begin()
        yield
        self._keep(phase)

    def _keep(self, phase: str) -> None:
        self._peaks[phase] = max(self._peaks.get(phase, 0), self.peak())
