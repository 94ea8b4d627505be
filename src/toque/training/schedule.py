"""Schedule of a run: when to stop, evaluate, save, and wait for the device."""

from __future__ import annotations

from dataclasses import dataclass

from toque.units import Duration, Progress


@dataclass(frozen=True)
class Schedule:
    """Durations; "%" is a share of `stop_after`; None means never, except for a save at the end."""

    stop_after: Duration
    evaluate_every: Duration | None = None
    save_every: Duration | None = None
    check_every: Duration = Duration(10, "steps")
    """Time between waits for CUDA to see whether losses are finite; on a CPU it is every step."""

    def check_due(self, before: Progress, after: Progress) -> bool:
        """True if the updates are to be checked at `after`."""
        return self._crossed(self.check_every, before, after)

    def evaluation_due(self, before: Progress, after: Progress) -> bool:
        """True if `after` is to be evaluated; the end always is."""
        return self._crossed(self.evaluate_every, before, after) or self.stop_after.reached(after)

    def save_due(self, before: Progress, after: Progress) -> bool:
        """True if a checkpoint is to be saved at `after`."""
        return self._crossed(self.save_every, before, after)

    def _crossed(self, every: Duration | None, before: Progress, after: Progress) -> bool:
        return every is not None and every.crossed(before, after, self.stop_after)
