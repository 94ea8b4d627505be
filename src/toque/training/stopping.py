"""Stopping before the end: a metric that no longer improves, a command's time limit, and signals.

SIGTERM, SIGHUP and Ctrl-C finish the step, save and stop; a second one exits at once. An evaluation
is left between two batches or tokens, and made when the run continues. A terminal that goes away
sends SIGHUP, often twice (the kernel and the shell both do) and followed by SIGTERM: none of these
is somebody asking twice. Under nohup SIGHUP is ignored and stays so.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
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
from toque.training.state_values import count_in, number_in
from toque.units import Duration, Progress

INTERRUPTED: Final = "interrupted"
"""`RunEnd.reason` after a signal; the command line then exits with 75."""
TAKEN_OVER: Final = "taken_over"
"""`RunEnd.reason` where another process has taken the run's place in a bucket."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PASSED_ON: Final = 5.0  # seconds in which a launcher passes on a signal
_AFTER_HANGUP: Final = 5.0  # seconds in which whatever follows a hangup belongs to it
_STANDARD_ERROR: Final = 2
_STEP: Final = "finishing this step"
_LEARNT_LITTLE: Final = 10
"""Updates before which a model from random weights writes no texts within a time limit: a guess."""
_NO_SETTINGS: Final[Mapping[str, Any]] = {}


class Patience(Callback):
    """Early stopping, when a metric has not improved for `patience` evaluations.

    A change for the better smaller than `min_delta`, in the metric's unit, is none. Of the settings
    of `evaluation`, those that the metric depends on must stay the same.
    """

    def __init__(
        self,
        *,
        patience: int,
        min_delta: float = 0.0,
        metric: str = "loss",
        rises: bool = False,
        evaluation: Mapping[str, Any] = _NO_SETTINGS,
    ) -> None:
        self.patience, self.min_delta = patience, min_delta
        self.metric, self.goal = metric, Goal(metric, rises)
        self.measured_by = self.goal.measured_by(evaluation)
        self.best: float | None = None
        self.evaluations_without_improvement = 0

    @property
    def is_over(self) -> bool:
        """True if the metric has not improved for too long."""
        return self.evaluations_without_improvement >= self.patience

    def on_fit_start(self, start: RunStart) -> Requests | None:
        """Restarting a run does not reset its patience."""
        return self._verdict()

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> Requests | None:
        """Compare with the best so far; an evaluation has every metric that a run goes by."""
        value = metrics[self.metric]
        if self.goal.better(value, self.best, by=self.min_delta):
            self.best, self.evaluations_without_improvement = value, 0
        else:
            self.evaluations_without_improvement += 1
        return self._verdict()

    def _verdict(self) -> Requests | None:
        return Requests(stop=True, reason="early_stopping") if self.is_over else None

    def state_dict(self) -> State:
        """The metric and how it is measured, its best value and the count."""
        names = ("metric", "measured_by", "best", "evaluations_without_improvement")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: State) -> None:
        """Restore them; a run that goes by another metric, or another measurement, begins anew."""
        measured_by = state.get("measured_by", self.measured_by)  # states of before lack it
        if (state["metric"], measured_by) != (self.metric, self.measured_by):
            return
        self.best = None if state["best"] is None else number_in(state, "best")
        self.evaluations_without_improvement = count_in(state, "evaluations_without_improvement")


class Interrupt(Callback):
    """The first signal becomes a request to stop, the second an exit.

    Handlers are set from `on_fit_start` to `on_fit_end` and only in the main thread, the only one
    in which Python allows it; in another thread signals keep their meaning. A rank that is `silent`
    prints nothing. Where it was `launched`, a second signal soon after counts as the first:
    torchrun forwards one that the terminal or the scheduler has already sent to every process.
    """

    def __init__(self, *, silent: bool = False, launched: bool = False) -> None:
        self._silent, self._same_for_seconds = silent, _PASSED_ON if launched else 0.0
        self._caught_at = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._caught: signal.Signals | None = None
        self._doing = _STEP

    def has_come(self) -> bool:
        """True if a signal has come."""
        return self._caught is not None

    def on_fit_start(self, start: RunStart) -> None:
        """Set the handlers."""
        self._caught = None
        if threading.current_thread() is threading.main_thread():
            handled = [s for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
            self._before = {s: signal.signal(s, self._handle) for s in handled}

    def on_before_step(self, at: Progress) -> None:
        """A signal from here on finds an update under way."""
        self._doing = _STEP

    def on_before_evaluate(self, at: Progress) -> None:
        """A signal from here on finds an evaluation under way."""
        self._doing = "leaving this evaluation, which is made when the run continues"

    def on_step(self, info: StepInfo | None) -> Requests | None:
        """Ask to stop once a signal has come."""
        return Requests(stop=True, save=True, reason=INTERRUPTED) if self._caught else None

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> Requests | None:
        """Ask to stop once a signal has come."""
        self._doing = _STEP
        return self.on_step(None)

    def on_fit_end(self, end: RunEnd) -> None:
        """Restore the handlers that were there before."""
        _restore(self._before)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._caught is not None:
            same_for = self._same_for_seconds
            if self._caught is signal.SIGHUP:
                same_for = max(same_for, _AFTER_HANGUP)
            if number == signal.SIGHUP or time.monotonic() - self._caught_at < same_for:
                return
            _say(f"\n{name} again: exiting at once. The last checkpoint is whole.\n")
            os._exit(128 + number)  # the shell's convention for death by a signal
        self._caught, self._caught_at = signal.Signals(number), time.monotonic()
        if not self._silent:
            _say(f"\n{name}: {self._doing}, then saving. Once more exits at once.\n")


@contextlib.contextmanager
def leaving_on_signal() -> Iterator[None]:
    """Until the context ends, a signal that asks to stop raises `Interrupted` where it is met.

    For work that the same command does again from its beginning, in one process: where ranks wait
    for each other, none may leave alone.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(f"{signal.Signals(number).name} came before the end was written.")

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handled = [s for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
        before = {s: signal.signal(s, leave) for s in handled}
    try:
        yield
    finally:
        _restore(before)


def _restore(before: Mapping[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        # None: a handler that was not set from Python, which Python cannot restore.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _say(text: str) -> None:
    # Not print: a handler may interrupt one, and Python's streams are not re-entrant.
    with contextlib.suppress(OSError):  # nobody may be there to read it
        os.write(_STANDARD_ERROR, text.encode())


@dataclass(frozen=True)
class CommandClock:
    """Seconds since a command began."""

    now: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Seconds until now."""
        return self.now() - self.began


def _ignored(_at: Progress, _message: str) -> None:
    """Ignore a warning."""


@dataclass(eq=False)
class TimeLimit(Callback):
    """Ends training so that evaluating and writing fit into the limit on the whole command.

    Without another `length`, `Progress.seconds` counts evaluating and saving as well, from the
    first update on: what went into reading and measuring is taken off the limit at the beginning.
    Texts get the time that the rest of the end does not need.
    """

    seconds: float
    clock: CommandClock
    evaluating: float  # seconds of one held-out loss, as measured before the first update
    ending: float  # seconds of the last scores, the last checkpoint and the finished model
    texts: float = 0.0  # seconds of the texts of one evaluation
    final_texts: float = 0.0  # seconds of the texts at the end
    each_text: float = 0.0  # seconds of one text; 0.0 if none is written
    from_scratch: bool = False  # training began with random weights
    length: Duration | None = None  # of the run, if not the limit ends it
    warn: Callable[[Progress, str], None] = _ignored

    def __post_init__(self) -> None:
        self._writing, self._step = 0.0, 0
        self.stop_after = Duration(round(self._left() / 60, 4), "minutes")
        """Time left for updates, and the evaluations and saves between them."""
        self._counted_until = self._evaluating_since = self.clock.seconds()
        self._saving_since = self._saving = self._reached = 0.0

    @property
    def is_over(self) -> bool:
        """True if a session came to the end of this limit or a longer one."""
        return self._reached >= self.seconds

    def count_seconds(self, of_the_update: float) -> float:
        """Seconds for `Progress`: those since the last update, if the limit ends the run."""
        if self.length is not None:
            return of_the_update
        before, self._counted_until = self._counted_until, self.clock.seconds()
        return self._counted_until - before

    def on_fit_start(self, start: RunStart) -> Requests | None:
        """Stop at once where an earlier session came to the end of the same limit."""
        self._counted_until, self._step = self.clock.seconds(), start.progress.step
        return self._stop() if self.is_over else None

    def on_step(self, info: StepInfo) -> Requests | None:
        """Stop while there is time for what comes after; another update would take as long."""
        self._step = info.progress.step
        next_update = info.seconds + self._saving
        has_time = self._left() >= next_update
        if self.length is None:
            over = self.stop_after.reached(info.progress) or not has_time
            return self._stop() if over else None
        if has_time or self.length.reached(info.progress):
            return None
        self.warn(
            info.progress,
            f"train.time_limit, {self.seconds:,.0f} seconds, ended training after "
            f"{self.length.fraction(info.progress):.0%} of train.stop_after, {self.length}, before "
            "the learning rate had come down. Raise train.time_limit to continue.",
        )
        return self._stop()

    def on_before_evaluate(self, at: Progress) -> None:
        """Take the time."""
        self._evaluating_since, self._writing = self.clock.seconds(), 0.0

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Expect the last ones to take as long as the longest so far."""
        took = self.clock.seconds() - self._evaluating_since
        self.evaluating = max(self.evaluating, took - self._writing)
        self.texts = max(self.texts, self._writing)

    def texts_that_fit(self, n: int, *, final: bool) -> tuple[int, float]:
        """Number of the next `n` texts that there is time for, and the seconds until all must end.

        `final`: these are the texts after training. A model that has learnt little writes none.
        """
        if self.is_young:
            return 0, 0.0
        after = self.ending if final else self.evaluating + self.ending + self.final_texts
        left = self.seconds - self.clock.seconds() - after
        if left <= 0.0:
            return 0, 0.0
        fewest = 1 if final else 0  # which costs no training, and is left when the time is over
        fit = math.floor(left / self.each_text) if self.each_text else n
        return min(n, max(fewest, fit)), left

    @property
    def is_young(self) -> bool:
        """True if the model began with random weights and has hardly been trained."""
        return self.from_scratch and self._step < _LEARNT_LITTLE

    def wrote(self, n: int, seconds: float) -> None:
        """Record that `n` texts took so long: later ones are expected to take as long."""
        self._writing += seconds
        self.each_text = seconds / n

    def left_out(self, n: int, of: int) -> str:
        """A sentence about `n` texts that were not written, of so many."""
        setting = "train.time_limit" if self.length else "the time limit of train.stop_after"
        why = f"{setting} left no time for them"
        if self.is_young:
            why = f"a model from random weights writes none before update {_LEARNT_LITTLE}"
        return f"{n:,} of {of:,} text{'s' * (of > 1)} not written: {why}"

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
        # Two held-out losses: where training ends, and of the best weights.
        after = 2 * self.evaluating + self.texts + self.final_texts + self.ending
        return self.seconds - self.clock.seconds() - after

    def _stop(self) -> Requests:
        self._reached = max(self._reached, self.seconds)
        return Requests(stop=True, reason=FINISHED)
