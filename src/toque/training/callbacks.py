"""Callbacks: observers that watch the training loop and may ask it to stop, save or evaluate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from operator import or_

from toque.errors import ConfigError
from toque.training.events import Requests, RunEnd, RunStart, Saved, State, StepInfo
from toque.training.goal import Goal
from toque.training.state_values import count_in, number_in, object_in
from toque.units import Progress


class Callback:
    """Every method does nothing; override the ones you need, and never call the base's."""

    slows: bool = False
    """True while it slows the current update so much that rates should leave it out."""

    def on_fit_start(self, start: RunStart) -> Requests | None:
        """A session begins."""

    def on_before_step(self, at: Progress) -> None:
        """An update begins."""

    def on_micro_batch(self, at: Progress, done: int, total: int) -> None:
        """So many of an update's micro-batches are computed."""

    def on_step(self, info: StepInfo) -> Requests | None:
        """An update is done; not yet evaluated or saved."""

    def on_before_evaluate(self, at: Progress) -> None:
        """An evaluation begins."""

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> Requests | None:
        """An evaluation is done."""

    def on_before_save(self, at: Progress) -> None:
        """A checkpoint is about to be written, with what `state_dict` returns now."""

    def on_save(self, at: Progress, saved: Saved) -> None:
        """A checkpoint is durable."""

    def on_warning(self, at: Progress, message: str) -> None:
        """Something the user should read; the run continues."""

    def on_fit_end(self, end: RunEnd) -> None:
        """The session is over, whatever ended it; called once for every `on_fit_start`."""

    def state_dict(self) -> State:
        """JSON that a restart cannot recompute."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore `state_dict`'s result."""


class Callbacks:
    """Several callbacks, called in this order."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)

    def extend(self, callbacks: Iterable[Callback]) -> None:
        """Call these too, after the others; before a session begins."""
        self._callbacks += tuple(callbacks)

    def __iter__(self) -> Iterator[Callback]:
        """Each, in order."""
        return iter(self._callbacks)

    @property
    def slow(self) -> bool:
        """True if any of them slows the current update."""
        return any(callback.slows for callback in self._callbacks)

    @contextmanager
    def around(
        self, start: RunStart, end: Callable[[BaseException | None], RunEnd]
    ) -> Iterator[Requests]:
        """Call every `on_fit_start`, yield their requests, and always call every `on_fit_end`."""
        started: list[Callback] = []
        failure: BaseException | None = None
        wants = Requests()
        try:
            for callback in self._callbacks:
                started.append(callback)
                wants |= callback.on_fit_start(start) or Requests()
            yield wants
        except BaseException as error:
            failure = error
            raise
        finally:
            summary = end(failure)
            with ExitStack() as stack:  # each is called even when another one fails
                for callback in reversed(started):
                    stack.callback(callback.on_fit_end, summary)

    def on_before_step(self, at: Progress) -> None:
        """Call every callback; so do the methods below."""
        for callback in self._callbacks:
            callback.on_before_step(at)

    def on_micro_batch(self, at: Progress, done: int, total: int) -> None:
        """So many of an update's micro-batches are computed."""
        for callback in self._callbacks:
            callback.on_micro_batch(at, done, total)

    def on_before_evaluate(self, at: Progress) -> None:
        """An evaluation begins."""
        for callback in self._callbacks:
            callback.on_before_evaluate(at)

    def on_step(self, info: StepInfo) -> Requests:
        """An update is done; all requests combined."""
        return _combined([c.on_step(info) for c in self._callbacks])

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> Requests:
        """An evaluation is done; all requests combined."""
        return _combined([c.on_evaluate(at, metrics) for c in self._callbacks])

    def on_before_save(self, at: Progress) -> None:
        """A checkpoint is about to be written."""
        for callback in self._callbacks:
            callback.on_before_save(at)

    def on_save(self, at: Progress, saved: Saved) -> None:
        """A checkpoint is durable."""
        for callback in self._callbacks:
            callback.on_save(at, saved)

    def on_warning(self, at: Progress, message: str) -> None:
        """The user should read `message`; the run continues."""
        for callback in self._callbacks:
            callback.on_warning(at, message)

    def state_dict(self) -> State:
        """The states by callback, without empty ones."""
        states = {name: callback.state_dict() for name, callback in self._named()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: State) -> None:
        """Restore each callback's state; one without a state starts afresh."""
        if not isinstance(state, dict):
            raise TypeError(f"callbacks is {state!r:.60}, not an object")
        for name, callback in self._named():
            if name in state:
                callback.load_state_dict(object_in(state, name))

    def _named(self) -> list[tuple[str, Callback]]:
        names = [type(c).__name__ for c in self._callbacks]
        return [
            (f"{name}.{names[:i].count(name)}" if name in names[:i] else name, callback)
            for i, (name, callback) in enumerate(zip(names, self._callbacks, strict=True))
        ]


def _combined(requests: Sequence[Requests | None]) -> Requests:
    return reduce(or_, filter(None, requests), Requests())


class EarlyStopping(Callback):
    """Early stopping, when a metric has not improved for a number of evaluations.

    Args:
        patience: evaluations without improvement after which to stop, at least 1.
        min_delta: a change for the better smaller than this, in the metric's unit, is none.
        metric: the metric's name.
        rises: whether more of it is better.

    Raises:
        ConfigError: patience is below 1 or min_delta below 0.
    """

    def __init__(
        self, *, patience: int, min_delta: float = 0.0, metric: str = "loss", rises: bool = False
    ) -> None:
        if patience < 1 or min_delta < 0:
            raise ConfigError(
                f"Early stopping got patience {patience} and min_delta {min_delta:g}. Patience is "
                "a number of evaluations, at least 1; min_delta is at least 0."
            )
        self.patience, self.min_delta = patience, min_delta
        self.metric, self.goal = metric, Goal(metric, rises)
        self.best: float | None = None
        self.evaluations_without_improvement = 0

    def on_fit_start(self, start: RunStart) -> Requests | None:
        """Restarting a run does not reset its patience."""
        return self._verdict()

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> Requests | None:
        """Compare with the best so far.

        Raises:
            ConfigError: the evaluation has no such metric.
        """
        if self.metric not in metrics:
            raise ConfigError(
                f"Early stopping watches {self.metric!r}, which the evaluation does not give; it "
                f"gives {', '.join(metrics) or 'nothing'}."
            )
        value = metrics[self.metric]
        if self.goal.better(value, self.best, by=self.min_delta):
            self.best, self.evaluations_without_improvement = value, 0
        else:
            self.evaluations_without_improvement += 1
        return self._verdict()

    def _verdict(self) -> Requests | None:
        if self.evaluations_without_improvement < self.patience:
            return None
        return Requests(stop=True, reason="early_stopping")

    def state_dict(self) -> State:
        """The metric, its best value and the count."""
        count = self.evaluations_without_improvement
        return {
            "metric": self.metric, "best": self.best, "evaluations_without_improvement": count
        }  # fmt: skip

    def load_state_dict(self, state: State) -> None:
        """Restore them; a run that now goes by another metric begins to count."""
        if state["metric"] != self.metric:
            return
        self.best = None if state["best"] is None else number_in(state, "best")
        self.evaluations_without_improvement = count_in(state, "evaluations_without_improvement")
