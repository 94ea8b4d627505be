"""Stopping before the end: a metric that no longer improves, a command's time limit, and signals.

After SIGTERM, SIGHUP or Ctrl-C a run finishes the step, saves and stops. After a second signal it
exits immediately. An evaluation stops between two batches or tokens and is repeated when the run
continues. When a terminal closes, SIGHUP often arrives twice (from the kernel and the shell),
followed by SIGTERM. These signals must not count as a second request. Under nohup SIGHUP remains
ignored.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

from toque.errors import Interrupted
from toque.runs.history import FINISHED
from toque.training.callbacks import (
    Callback,
    Goal,
    Requests,
    RunEnd,
    RunStart,
    Saved,
    State,
    StepInfo,
)
from toque.training.signal_handlers import handling_signals
from toque.training.state_values import count_in, optional_number_in
from toque.units import Duration, Progress

INTERRUPTED: Final = "interrupted"
"""`RunEnd.reason` after a signal; the command line then exits with 75."""
TAKEN_OVER: Final = "taken_over"
"""`RunEnd.reason` when another process has taken over the run's bucket."""
_FORWARDING_SECONDS: Final = 5.0
"""Seconds after a signal during which a launcher may forward the same signal again."""
_HANGUP_SECONDS: Final = 5.0
"""Seconds after SIGHUP during which other signals have the same cause."""
_STANDARD_ERROR: Final = 2
_FINISHING_STEP: Final = "finishing this step"
_MIN_UPDATES_FOR_TEXTS: Final = 10
"""Updates after which generated texts are worth their time, if training began with random weights.
A guess."""


@dataclass(eq=False, kw_only=True)
class Patience(Callback):
    """Early stopping after `patience` evaluations without an improvement of a metric.

    An improvement smaller than `min_delta`, in the metric's unit, does not count. If a setting of
    `evaluation` that affects the metric changes, the count starts again.
    """

    patience: int
    min_delta: float = 0.0
    metric: str = "loss"
    rises: bool = False
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    best: float | None = None
    evaluations_without_improvement: int = 0

    def __post_init__(self) -> None:
        self.goal = Goal(self.metric, self.rises)
        self.measured_by = self.goal.relevant_settings(self.evaluation)

    @property
    def is_over(self) -> bool:
        """True if the metric has not improved for `patience` evaluations."""
        return self.evaluations_without_improvement >= self.patience

    def on_fit_start(self, start: RunStart) -> Requests | None:
        """Ask to stop if the run had already run out of patience."""
        return self._request_stop()

    def on_evaluate(
        self, at: Progress, metrics: Mapping[str, float]
    ) -> Requests | None:
        """Compare the metric with the best value so far."""
        value = metrics[self.metric]
        if self.goal.is_better(value, self.best, by=self.min_delta):
            self.best = value
            self.evaluations_without_improvement = 0
        else:
            self.evaluations_without_improvement += 1
        return self._request_stop()

    def _request_stop(self) -> Requests | None:
        return Requests(stop=True, reason="early_stopping") if self.is_over else None

    def state_dict(self) -> State:
        """Return the metric, the settings that affect it, its best value and the count."""
        names = ("metric", "measured_by", "best", "evaluations_without_improvement")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: State) -> None:
        """Restore the best value and the count, if the metric and its settings are the same."""
        if (state["metric"], state["measured_by"]) != (self.metric, self.measured_by):
            return
        self.best = optional_number_in(state, "best")
        self.evaluations_without_improvement = count_in(
            state, "evaluations_without_improvement"
        )


class Interrupt(Callback):
    """Signal handlers: the first signal asks to stop, the second exits.

    Handlers are set from `on_fit_start` to `on_fit_end`. Python allows them only in the main
    thread. In another thread signals keep their default effect. A `silent` rank prints nothing. If
    a launcher started this process (`launched`), a second signal within a few seconds is ignored:
    torchrun forwards signals that the terminal or scheduler also sends to every process.
    """

    def __init__(self, *, silent: bool = False, launched: bool = False) -> None:
        self._silent = silent
        self._repeat_seconds = _FORWARDING_SECONDS if launched else 0.0
        self._caught_at = 0.0
        self._handlers = contextlib.ExitStack()
        self._caught: signal.Signals | None = None
        self._activity = _FINISHING_STEP

    def has_arrived(self) -> bool:
        """Check whether a signal has arrived."""
        return self._caught is not None

    def on_fit_start(self, start: RunStart) -> None:
        """Set the handlers."""
        self._caught = None
        self._handlers.enter_context(handling_signals(self._handle))

    def on_before_step(self, at: Progress) -> None:
        """Note that an update is running, for the message about a signal."""
        self._activity = _FINISHING_STEP

    def on_before_evaluate(self, at: Progress) -> None:
        """Note that an evaluation is running, for the message about a signal."""
        self._activity = (
            "leaving this evaluation, which is repeated when the run continues"
        )

    def on_step(self, info: StepInfo | None) -> Requests | None:
        """Ask to stop once a signal has arrived."""
        if self._caught is None:
            return None
        return Requests(stop=True, save=True, reason=INTERRUPTED)

    def on_evaluate(
        self, at: Progress, metrics: Mapping[str, float]
    ) -> Requests | None:
        """Ask to stop once a signal has arrived."""
        self._activity = _FINISHING_STEP
        return self.on_step(None)

    def on_fit_end(self, end: RunEnd) -> None:
        """Restore the previous handlers."""
        self._handlers.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal, for the next `on_step`. Exit immediately at a second signal."""
        name = signal.Signals(number).name
        if self._caught is None:
            self._caught = signal.Signals(number)
            self._caught_at = time.monotonic()
            if not self._silent:
                _write_to_stderr(
                    f"\n{name}: {self._activity}, then saving. A second signal exits immediately.\n"
                )
        elif not self._is_repetition(number):
            _write_to_stderr(
                f"\n{name} again: exiting now. The last checkpoint is complete.\n"
            )
            # The shell's exit status for a process that a signal killed.
            os._exit(128 + number)

    def _is_repetition(self, number: int) -> bool:
        """Check whether a later signal has the same cause as the first signal."""
        if number == signal.SIGHUP:
            return True
        repeat_seconds = self._repeat_seconds
        if self._caught is signal.SIGHUP:
            repeat_seconds = max(repeat_seconds, _HANGUP_SECONDS)
        return time.monotonic() - self._caught_at < repeat_seconds


@contextlib.contextmanager
def leaving_on_signal() -> Iterator[None]:
    """Raise `Interrupted` on a signal that asks to stop, until the context ends.

    Use it only in a single process, for work that the command can repeat from the beginning. With
    several ranks, all remaining ranks would wait for the rank that left.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        raise Interrupted(f"{name} arrived before the result was written.")

    with handling_signals(leave):
        yield


def _write_to_stderr(text: str) -> None:
    # Python's streams are not re-entrant, and a handler may interrupt a print.
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(_STANDARD_ERROR, text.encode())


@dataclass(frozen=True)
class CommandClock:
    """Clock of a command, in seconds."""

    now: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Return the seconds since the command began."""
        return self.now() - self.began


def _ignore_warning(_at: Progress, _message: str) -> None:
    pass


@dataclass(eq=False)
class TimeLimit(Callback):
    """Time limit of a command, including the evaluations and files after training.

    Without `length` the limit also defines the length of the run. `Progress.seconds` then counts
    evaluations and saves as well, from the first update on, and the limit is reduced by the time
    before the first update. Generated texts get the time that the evaluations and files after
    training do not need.
    """

    seconds: float
    clock: CommandClock
    # Seconds for one held-out loss. The first value is measured before the first update.
    evaluating: float
    # Seconds for the last scores, the last checkpoint and the final model.
    ending: float
    texts: float = 0.0  # seconds for the texts of one evaluation
    final_texts: float = 0.0  # seconds for the texts after training
    each_text: float = 0.0  # seconds for one text; 0.0 if no texts are generated
    from_scratch: bool = False  # True if training began with random weights
    length: Duration | None = None  # length of the run; None if the limit defines it
    warn: Callable[[Progress, str], None] = _ignore_warning

    def __post_init__(self) -> None:
        self._generating = 0.0  # seconds for the texts of the current evaluation
        self._step = 0
        minutes_left = self._seconds_left() / 60
        self.stop_after = Duration(round(minutes_left, 4), "minutes")
        """Time left for updates, and for the evaluations and saves between them."""
        self._counted_until = self._evaluating_since = self.clock.seconds()
        self._saving_since = self._saving = 0.0
        self._reached = 0.0

    @property
    def is_over(self) -> bool:
        """True if a session has reached this limit or a longer one."""
        return self._reached >= self.seconds

    def count_seconds(self, update_seconds: float) -> float:
        """Return the seconds that `Progress` counts for an update.

        If the limit defines the length of the run, they include all time since the previous update.
        """
        if self.length is not None:
            return update_seconds
        previous = self._counted_until
        self._counted_until = self.clock.seconds()
        return self._counted_until - previous

    def on_fit_start(self, start: RunStart) -> Requests | None:
        """Ask to stop if an earlier session reached the same limit."""
        self._counted_until = self.clock.seconds()
        self._step = start.progress.step
        return self._stop() if self.is_over else None

    def on_step(self, info: StepInfo) -> Requests | None:
        """Ask to stop if another update of the same duration would exceed the limit."""
        self._step = info.progress.step
        next_update = info.seconds + self._saving
        has_time = self._seconds_left() >= next_update
        if self.length is None:
            is_over = self.stop_after.reached(info.progress) or not has_time
            return self._stop() if is_over else None
        if has_time or self.length.reached(info.progress):
            return None

        self.warn(
            info.progress,
            f"train.time_limit, {self.seconds:,.0f} seconds, ended training after "
            f"{self.length.fraction(info.progress):.0%} of train.stop_after, {self.length}, before "
            "the learning rate reached its end. Raise train.time_limit to continue.",
        )
        return self._stop()

    def on_before_evaluate(self, at: Progress) -> None:
        """Start to measure an evaluation."""
        self._evaluating_since = self.clock.seconds()
        self._generating = 0.0

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Expect the last evaluation to take as long as the longest so far."""
        seconds = self.clock.seconds() - self._evaluating_since
        self.evaluating = max(self.evaluating, seconds - self._generating)
        self.texts = max(self.texts, self._generating)

    def texts_that_fit(self, n: int, *, final: bool) -> tuple[int, float]:
        """Return how many of `n` texts fit into the limit, and the seconds in which to finish them.

        The result is 0 texts while the model `is_young`. `final` is for the texts after training.
        """
        if self.is_young:
            return 0, 0.0

        seconds_after = self.ending
        if not final:
            seconds_after = self.evaluating + self.ending + self.final_texts
        seconds_left = self.seconds - self.clock.seconds() - seconds_after
        if seconds_left <= 0.0:
            return 0, 0.0

        n_fitting = n
        if self.each_text:
            n_fitting = math.floor(seconds_left / self.each_text)
        min_texts = 1 if final else 0  # a final text takes no time from training
        return min(n, max(min_texts, n_fitting)), seconds_left

    @property
    def is_young(self) -> bool:
        """True if the model began with random weights and has had few updates."""
        return self.from_scratch and self._step < _MIN_UPDATES_FOR_TEXTS

    def record_texts(self, n: int, seconds: float) -> None:
        """Record the seconds for generating `n` texts, to predict the time of later texts."""
        self._generating += seconds
        self.each_text = seconds / n

    def describe_left_out(self, n: int, total: int) -> str:
        """Describe why `n` of `total` texts were not generated."""
        if self.is_young:
            reason = (
                "a model from random weights generates no texts before update "
                f"{_MIN_UPDATES_FOR_TEXTS}"
            )
        elif self.length is not None:
            reason = "train.time_limit left no time for them"
        else:
            reason = "the time limit of train.stop_after left no time for them"
        texts = "texts" if total > 1 else "text"
        return f"{n:,} of {total:,} {texts} not generated: {reason}"

    def on_before_save(self, at: Progress) -> None:
        """Start to measure a save."""
        self._saving_since = self.clock.seconds()

    def on_save(self, at: Progress, saved: Saved) -> None:
        """Expect the next save to block training as long as the longest so far."""
        seconds = saved.blocked_seconds
        if seconds is None:  # the save was not in the background
            seconds = self.clock.seconds() - self._saving_since
        self._saving = max(self._saving, seconds)

    def state_dict(self) -> State:
        """Return the limit that was reached, in seconds."""
        return {"reached": self._reached} if self._reached else {}

    def load_state_dict(self, state: State) -> None:
        """Restore the limit that was reached."""
        self._reached = float(state["reached"])

    def _seconds_left(self) -> float:
        """Return the seconds left for further updates."""
        # Two held-out losses: one at the end of training and one of the best weights.
        evaluating = 2 * self.evaluating
        seconds_after = evaluating + self.texts + self.final_texts + self.ending
        return self.seconds - self.clock.seconds() - seconds_after

    def _stop(self) -> Requests:
        self._reached = max(self._reached, self.seconds)
        return Requests(stop=True, reason=FINISHED)
