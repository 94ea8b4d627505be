"""Time left in a run, including its updates, evaluations and final scoring."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from toque.reporter import clock_text
from toque.units import Duration, Progress

_MIN_SECONDS: Final = 2.0
"""Shortest time left to report, in seconds."""
_CORRECTED_AFTER: Final = 10
"""Number of updates in a session after which a wrong forecast is corrected."""
_ROUNDING: Final = 1e-12
"""Largest fraction of a run that counts as a rounding error, not as an update."""


def count_events(
    length: Duration, expected: Mapping[str, float], every: Duration
) -> int:
    """Count the events of a run at a fixed interval, including the event at its end.

    Args:
        length: Length of the run.
        expected: Known totals of the run, by unit. The unit of time is minutes.
        every: Interval between two events.
    """
    length = length.in_minutes()
    every = every.in_minutes()
    if every.amount <= 0:
        return 1
    if every.unit == "%":
        total = 100.0
    elif every.unit == length.unit:
        total = length.amount
    else:
        total = expected.get(every.unit, 0.0)
    # A rounding error must not add an event.
    return max(1, math.ceil(total / every.amount - 1e-9))


@dataclass
class TimeLeft:
    """Forecast of the seconds until a training command ends, corrected by measurements.

    The run ends with an evaluation and with `n_texts` generated texts.
    """

    stop_after: Duration
    evaluate_every: Duration | None = None
    expected: Mapping[str, float] = field(default_factory=dict)
    """Known totals of the run, by unit."""
    training_seconds: float = 0.0
    """Forecast for all updates of the run, in seconds. 0 if it is unknown."""
    evaluation_seconds: float = 0.0
    """Forecast for one evaluation in seconds, including its texts."""
    final_seconds: float = 0.0
    """Forecast for scoring, generating and saving at the end, in seconds."""
    n_texts: int = 0
    counts_evaluations: bool = False
    """True if `stop_after` includes the evaluations between updates."""
    _began: Progress = Progress()
    _evaluations: list[float] = field(default_factory=list)
    """Measured seconds of each evaluation."""
    _slowed_seconds: float = 0.0
    """Seconds spent on this session's slowed updates."""
    _slowed_share: float = 0.0
    """Fraction of the run that consists of this session's slowed updates."""

    def start(self, at: Progress) -> None:
        """Start a session. Its updates are measured from here."""
        self._began = at
        self._slowed_seconds = 0.0
        self._slowed_share = 0.0

    def record_update(
        self, before: Progress, after: Progress, *, slowed: bool = False
    ) -> str:
        """Record an update. Return a message if the first ten updates contradict the forecast.

        An update is `slowed` if an observer delayed it.
        """
        done = after.step - self._began.step
        if slowed or done == 1:  # the first update loads kernels
            self._slowed_seconds += after.seconds - before.seconds
            self._slowed_share += self._share_between(before, after)
        left = self.seconds(after)
        is_accurate = 0.8 < self._pace(after) < 1.25
        if done != _CORRECTED_AFTER or is_accurate or left < _MIN_SECONDS:
            return ""
        return f"corrected by the first {done} updates: about {clock_text(left)} left"

    def record_evaluation(self, seconds: float) -> None:
        """Record the seconds of an evaluation, including its texts."""
        self._evaluations.append(seconds)

    def seconds(self, at: Progress) -> float:
        """Estimate the seconds until the command ends."""
        pace = self._pace(at)
        per_evaluation = pace * self.evaluation_seconds
        if self._evaluations:
            per_evaluation = sum(self._evaluations) / len(self._evaluations)
        n = 1 if self.counts_evaluations else self.count_evaluations(at)
        training = self._seconds_of_updates(at)
        return training + n * per_evaluation + pace * self.final_seconds

    def count_evaluations(self, at: Progress) -> int:
        """Count the remaining evaluations. The final evaluation always remains."""
        every = self.evaluate_every
        if every is None or every.amount <= 0:
            return 1
        done = math.floor(every.measure(at, self.stop_after) / every.amount + 1e-9)
        return max(1, count_events(self.stop_after, self.expected, every) - done)

    def describe(self, at: Progress) -> str:
        """Describe the forecast at the start of a session, or return "" if little time is left."""
        total = self.seconds(at)
        if self.stop_after.reached(at) or total < _MIN_SECONDS:
            return ""
        n = self.count_evaluations(at)
        training = self._seconds_of_updates(at)
        if self.counts_evaluations:
            training = max(0.0, training - (n - 1) * self.evaluation_seconds)

        evaluations = f"{n:,} evaluation{'s' if n > 1 else ''}"
        scoring = "score the model"
        if self.n_texts:
            noun = "text" if self.n_texts == 1 else "texts"
            scoring += f" and generate {self.n_texts:,} {noun}"
        return (
            f"about {clock_text(total)} in all: {clock_text(training)} of training, "
            f"{clock_text(n * self.evaluation_seconds)} for {evaluations}, and "
            f"up to {clock_text(self.final_seconds)} to {scoring} at the end"
        )

    def _seconds_of_updates(self, at: Progress) -> float:
        """Estimate the seconds of the remaining updates."""
        measured = self._measured_seconds(at)
        seconds = self.training_seconds if measured is None else measured
        return seconds * (1.0 - self.stop_after.fraction(at))

    def _pace(self, at: Progress) -> float:
        """Return the ratio of measured to forecast seconds, which also applies to evaluations."""
        measured = self._measured_seconds(at)
        if measured is None or not self.training_seconds:
            return 1.0
        return measured / self.training_seconds

    def _measured_seconds(self, at: Progress) -> float | None:
        """Extrapolate this session's pace to all updates. Return None if the pace is unknown."""
        share = self._share_between(self._began, at)
        seconds = at.seconds - self._began.seconds
        usual_share = share - self._slowed_share
        if usual_share > _ROUNDING:
            usual_seconds = seconds - self._slowed_seconds
            return max(0.0, usual_seconds) / usual_share
        # All updates were slowed. They count only if a forecast is missing.
        if self.training_seconds or share <= _ROUNDING:
            return None
        return max(0.0, seconds) / share

    def _share_between(self, start: Progress, end: Progress) -> float:
        return self.stop_after.fraction(end) - self.stop_after.fraction(start)
