"""Time left of a run: its updates, the evaluations between them, and what follows the last one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from toque.reporter import clock_text
from toque.units import Duration, Progress

_WORTH_SAYING_SECONDS: Final = 2.0
_CORRECTED_AFTER: Final = 10
"""Updates of a session: then a time that was foreseen wrongly is told again."""
_ROUNDING: Final = 1e-12  # a share of the run that is no update's


def times_in(whole: Duration, expected: Mapping[str, float], every: Duration) -> int:
    """Number of times that something happens once `every` in a run, the end among them.

    The run is `whole` long, and has the `expected` totals by unit, as far as they are known; those
    of the clock in minutes.
    """
    whole, every = whole.in_minutes(), every.in_minutes()
    total = whole.amount if every.unit == whole.unit else expected.get(every.unit, 0.0)
    total = 100.0 if every.unit == "%" else total
    return max(1, math.ceil(total / every.amount - 1e-9)) if every.amount > 0 else 1


@dataclass
class TimeLeft:
    """Seconds until a training command ends, foreseen and then corrected by what is measured.

    `expected` holds the run's totals by unit, as far as they are known, and `n_texts` are written
    at its end. The end always has an evaluation.
    """

    stop_after: Duration
    evaluate_every: Duration | None = None
    expected: Mapping[str, float] = field(default_factory=dict)
    training_seconds: float = 0.0  # of all updates of the run; 0 where nothing is foreseen
    evaluation_seconds: float = 0.0  # of one, with the texts it writes
    final_seconds: float = 0.0  # scoring, writing and saving the finished model
    n_texts: int = 0
    counts_evaluations: bool = False  # `stop_after` includes the evaluations between updates

    def __post_init__(self) -> None:
        self._began = Progress()
        self._evaluations: list[float] = []
        self._slowed_seconds = self._slowed_share = 0.0

    def start(self, at: Progress) -> None:
        """A session begins; updates are measured from here."""
        self._began = at
        self._slowed_seconds = self._slowed_share = 0.0

    def updated(self, before: Progress, after: Progress, *, slowed: bool = False) -> str:
        """An update is done; a sentence where ten of them say another time than was foreseen."""
        done = after.step - self._began.step
        if slowed or done == 1:  # by an observer, or by loading kernels: no other takes so long
            self._slowed_seconds += after.seconds - before.seconds
            self._slowed_share += self.stop_after.fraction(after) - self.stop_after.fraction(before)
        left = self.seconds(after)
        right = 0.8 < self._pace(after) < 1.25
        if done != _CORRECTED_AFTER or right or left < _WORTH_SAYING_SECONDS:
            return ""
        return f"corrected by the first {done} updates: about {clock_text(left)} left"

    def evaluated(self, seconds: float) -> None:
        """An evaluation took so long, texts included."""
        self._evaluations.append(seconds)

    def seconds(self, at: Progress) -> float:
        """Until the command ends."""
        pace = self._pace(at)
        of_one = pace * self.evaluation_seconds
        if self._evaluations:
            of_one = sum(self._evaluations) / len(self._evaluations)
        after = 1 if self.counts_evaluations else self.evaluations(at)
        return self._training(at) + after * of_one + pace * self.final_seconds

    def evaluations(self, at: Progress) -> int:
        """Number of evaluations still to come, at least the one at the end."""
        every, whole = self.evaluate_every, self.stop_after
        if every is None or every.amount <= 0:
            return 1
        done = math.floor(every.measure(at, whole) / every.amount + 1e-9)
        return max(1, times_in(whole, self.expected, every) - done)

    def in_words(self, at: Progress) -> str:
        """A sentence for the begin of a session; "" when it is over in a moment."""
        training, total = self._training(at), self.seconds(at)
        if self.stop_after.reached(at) or total < _WORTH_SAYING_SECONDS:
            return ""
        n = self.evaluations(at)
        if self.counts_evaluations:
            training = max(0.0, training - (n - 1) * self.evaluation_seconds)
        scoring = "score the model"
        if self.n_texts:
            scoring += f" and write {self.n_texts:,} text{'s' * (self.n_texts > 1)}"
        return (
            f"about {clock_text(total)} in all: {clock_text(training)} of training, "
            f"{clock_text(n * self.evaluation_seconds)} for {n:,} evaluation{'s' * (n > 1)}, and "
            f"up to {clock_text(self.final_seconds)} to {scoring} at the end"
        )

    def _training(self, at: Progress) -> float:
        own = self._own(at)
        whole = self.training_seconds if own is None else own
        return whole * (1.0 - self.stop_after.fraction(at))

    def _pace(self, at: Progress) -> float:
        """Seconds of the updates over those foreseen; what slows them slows the rest."""
        own = self._own(at)
        return 1.0 if own is None or not self.training_seconds else own / self.training_seconds

    def _own(self, at: Progress) -> float | None:
        """Seconds of all updates of the run at this session's pace; None before it is known."""
        gained = self.stop_after.fraction(at) - self.stop_after.fraction(self._began)
        took = at.seconds - self._began.seconds
        if gained - self._slowed_share > _ROUNDING:
            gained, took = gained - self._slowed_share, took - self._slowed_seconds
        elif self.training_seconds or gained <= _ROUNDING:
            return None
        return max(0.0, took) / gained
