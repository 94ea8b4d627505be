"""Time left of a run: its updates, its evaluations and its final scoring."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from toque.reporter import clock_text
from toque.units import Duration, Progress

_MIN_SECONDS: Final = 2.0
"""Shortest time left that is reported, in seconds."""
_CORRECTED_AFTER: Final = 10
"""Number of updates in a session after which a wrong forecast is corrected."""
_ROUNDING: Final = 1e-12
"""Share of the run that is a rounding error, not an update."""


def times_in(length: Duration, expected: Mapping[str, float], every: Duration) -> int:
    """Count the events of a run that happen once `every`, including the event at its end.

    Args:
        length: Length of the run.
        expected: Known totals of the run by unit. The unit of time is minutes.
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
    return max(1, math.ceil(total / every.amount - 1e-9))


@dataclass
class TimeLeft:
    """Forecast of the seconds until a training command ends, corrected by measurements.

    `expected` has the known totals of the run by unit. The run ends with an evaluation and with
    `n_texts` generated texts.
    """

    stop_after: Duration
    evaluate_every: Duration | None = None
    expected: Mapping[str, float] = field(default_factory=dict)
    training_seconds: float = 0.0
    """Forecast for all updates of the run. 0 means that a forecast is missing."""
    evaluation_seconds: float = 0.0
    """Forecast for one evaluation with its texts."""
    final_seconds: float = 0.0
    """Forecast for scoring, generating and saving at the end."""
    n_texts: int = 0
    counts_evaluations: bool = False
    """True if `stop_after` includes the evaluations between updates."""
    _began: Progress = Progress()
    _evaluations: list[float] = field(default_factory=list)
    _slowed_seconds: float = 0.0
    _slowed_share: float = 0.0

    def start(self, at: Progress) -> None:
        """Start a session and measure its updates."""
        self._began = at
        self._slowed_seconds = 0.0
        self._slowed_share = 0.0

    def updated(
        self, before: Progress, after: Progress, *, slowed: bool = False
    ) -> str:
        """Record an update and return a message if the first ten updates contradict the forecast.

        An update is `slowed` if an observer delayed it.
        """
        done = after.step - self._began.step
        if slowed or done == 1:  # the first update loads kernels
            self._slowed_seconds += after.seconds - before.seconds
            self._slowed_share += self.stop_after.fraction(
                after
            ) - self.stop_after.fraction(before)
        left = self.seconds(after)
        is_right = 0.8 < self._pace(after) < 1.25
        if done != _CORRECTED_AFTER or is_right or left < _MIN_SECONDS:
            return ""
        return f"corrected by the first {done} updates: about {clock_text(left)} left"

    def evaluated(self, seconds: float) -> None:
        """Record the seconds of an evaluation with its texts."""
        self._evaluations.append(seconds)

    def seconds(self, at: Progress) -> float:
        """Estimate the seconds until the command ends."""
        pace = self._pace(at)
        per_evaluation = pace * self.evaluation_seconds
        if self._evaluations:
            per_evaluation = sum(self._evaluations) / len(self._evaluations)
        n = 1 if self.counts_evaluations else self.evaluations(at)
        return self._training(at) + n * per_evaluation + pace * self.final_seconds

    def evaluations(self, at: Progress) -> int:
        """Count the remaining evaluations. The final evaluation always remains."""
        every = self.evaluate_every
        if every is None or every.amount <= 0:
            return 1
        done = math.floor(every.measure(at, self.stop_after) / every.amount + 1e-9)
        return max(1, times_in(self.stop_after, self.expected, every) - done)

    def in_words(self, at: Progress) -> str:
        """Describe the forecast at the start of a session, or return "" if it ends in a moment."""
        training, total = self._training(at), self.seconds(at)
        if self.stop_after.reached(at) or total < _MIN_SECONDS:
            return ""
        n = self.evaluations(at)
        if self.counts_evaluations:
            training = max(0.0, training - (n - 1) * self.evaluation_seconds)
        evaluations = f"{n:,} evaluation{'s' if n > 1 else ''}"
        scoring = "score the model"
        if self.n_texts:
            scoring += (
                f" and write {self.n_texts:,} text{'s' if self.n_texts > 1 else ''}"
            )
        return (
            f"about {clock_text(total)} in all: {clock_text(training)} of training, "
            f"{clock_text(n * self.evaluation_seconds)} for {evaluations}, and "
            f"up to {clock_text(self.final_seconds)} to {scoring} at the end"
        )

    def _training(self, at: Progress) -> float:
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
        """Extrapolate the session's pace to all updates, or return None before it has a pace."""
        share = self.stop_after.fraction(at) - self.stop_after.fraction(self._began)
        seconds = at.seconds - self._began.seconds
        if share - self._slowed_share > _ROUNDING:
            share -= self._slowed_share
            seconds -= self._slowed_seconds
        elif self.training_seconds or share <= _ROUNDING:
            return None
        return max(0.0, seconds) / share
