"""Time limit of a whole command: training ends early enough for what comes after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from toque.training.callbacks import Callback, Requests, RunStart, Saved, State, StepInfo
from toque.units import Duration, Progress


@dataclass(frozen=True)
class CommandClock:
    """Seconds since a command began."""

    now: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Since it began."""
        return self.now() - self.began


@dataclass(eq=False)
class TimeLimit(Callback):
    """Ends training so that evaluating and writing fit into the limit.

    `Progress.seconds` then counts evaluating and saving as well, from the first update on: what
    went into reading and measuring is taken off the limit at the beginning.

    Args:
        seconds: of the whole command.
        clock: of the command.
        evaluating: seconds of one evaluation, as measured before the first update.
        ending: seconds of writing texts, the last checkpoint and the finished model.
    """

    seconds: float
    clock: CommandClock
    evaluating: float
    ending: float

    def __post_init__(self) -> None:
        self.stop_after = Duration(round(self._left() / 60, 4), "minutes")
        """Seconds left for updates, and the evaluations and saves between them."""
        self._counted_until = self._evaluating_since = self.clock.seconds()
        self._saving_since = self._saving = self._reached = 0.0

    def count_seconds(self, _of_the_update: float) -> float:
        """Seconds since the update before, for `Progress`; whatever they went into."""
        before, self._counted_until = self._counted_until, self.clock.seconds()
        return self._counted_until - before

    def on_fit_start(self, start: RunStart) -> Requests | None:
        """Stop at once where an earlier session came to the end of the same limit."""
        self._counted_until = self.clock.seconds()
        return self._stop() if self._reached >= self.seconds else None

    def on_step(self, info: StepInfo) -> Requests | None:
        """Stop while there is time for what comes after; another update would take as long."""
        next_update = info.seconds + self._saving
        over = self.stop_after.reached(info.progress) or self._left() < next_update
        return self._stop() if over else None

    def on_before_evaluate(self, at: Progress) -> None:
        """Take the time."""
        self._evaluating_since = self.clock.seconds()

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Expect the last ones to take as long as the longest so far."""
        self.evaluating = max(self.evaluating, self.clock.seconds() - self._evaluating_since)

    def on_before_save(self, at: Progress) -> None:
        """Take the time."""
        self._saving_since = self.clock.seconds()

    def on_save(self, at: Progress, saved: Saved) -> None:
        """Expect a save after the next update to hold it up as long as the longest so far."""
        waited = saved.blocked_seconds  # None: for all of it
        took = self.clock.seconds() - self._saving_since if waited is None else waited
        self._saving = max(self._saving, took)

    def state_dict(self) -> State:
        """The limit that was reached."""
        return {"reached": self._reached} if self._reached else {}

    def load_state_dict(self, state: State) -> None:
        """Restore it."""
        self._reached = float(state["reached"])

    def _left(self) -> float:
        # Two evaluations: where training ends, and of the best weights.
        return self.seconds - self.clock.seconds() - 2 * self.evaluating - self.ending

    def _stop(self) -> Requests:
        self._reached = max(self._reached, self.seconds)
        return Requests(stop=True, reason="finished")
