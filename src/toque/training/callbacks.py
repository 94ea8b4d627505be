"""Callbacks: observers that watch the training loop and may ask it to stop, save or evaluate.

The loop tells them of its events; only the loop acts on their requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec

from torch import Tensor

from toque.units import Duration, Progress

State = dict[str, Any]  # JSON
_About = ParamSpec("_About")


@dataclass(frozen=True)
class Best:
    """The best evaluation of the run by a metric, with its value; None if it is the loss."""

    step: int
    loss: float
    metric: str = "loss"
    value: float | None = None

    @property
    def score(self) -> float:
        """The value of `metric`."""
        return self.loss if self.value is None else self.value

    def __str__(self) -> str:
        by = "" if self.metric == "loss" else f"{self.metric.replace('_', ' ')} {self.score:.4f}, "
        return f"{by}loss {self.loss:.4f} at step {self.step:,}"


@dataclass(frozen=True)
class Goal:
    """The metric of the evaluations that says which is best; `rises` if more is better.

    >>> Goal("bleu", rises=True).better(31.0, 30.5), Goal().better(2.0, 2.1, by=0.5)
    (True, False)
    """

    metric: str = "loss"
    rises: bool = False

    def rank(self, metrics: Mapping[str, float]) -> float:
        """A number that is the lower the better; infinity where the metric was not measured."""
        value = metrics.get(self.metric, math.nan)
        return math.inf if not math.isfinite(value) else -value if self.rises else value

    def better(self, value: float, than: float | None, *, by: float = 0.0) -> bool:
        """True if a value is better than another by more than `by`; one not measured never is."""
        if not math.isfinite(value) or than is None:
            return math.isfinite(value)
        return value > than + by if self.rises else value < than - by

    def best(self, so_far: Best | None, step: int, metrics: Mapping[str, float]) -> Best | None:
        """The better one of the best so far and this evaluation."""
        value, loss = (metrics.get(name, math.nan) for name in (self.metric, "loss"))
        known = so_far.score if so_far is not None and so_far.metric == self.metric else None
        if not math.isfinite(loss) or not self.better(value, known):
            return so_far
        return Best(step, loss, self.metric, None if self.metric == "loss" else value)

    def measured_by(self, evaluation: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of evaluations that the metric depends on; values under others are others.

        >>> Goal().measured_by({"max_examples": 512, "texts": 16})
        {'max_examples': 512}
        """
        names = {"max_examples"} if self.metric == "loss" else evaluation.keys() - {"prompts"}
        return {name: evaluation[name] for name in sorted(names & evaluation.keys())}

    def __str__(self) -> str:
        if self.metric == "loss":
            return "lowest held-out loss"
        return f"{'highest' if self.rises else 'lowest'} {self.metric.replace('_', ' ')}"


LOSS: Final = Goal()  # the held-out loss as a goal


@dataclass(frozen=True)
class StepInfo:
    """One update, seen from outside. Counts are over all ranks."""

    before: Progress
    progress: Progress
    loss: Tensor
    """[] nats per target token over the whole update. On CUDA, reading it waits for the device."""
    grad_norm: Tensor  # [] before clipping
    lr: float
    n_targets: int
    n_tokens: int
    n_examples: int
    n_computed: int
    seconds: float  # wall seconds of the whole update, waiting for data included
    parts: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds since the update before, by what they went into: `phases.Part`."""
    stage: int | None = None  # stage of the curriculum, counted from 1; None without one
    slowed: bool = False
    """True if an observer slowed the update, as a profiler does; rates leave it out."""

    @property
    def data_wait_seconds(self) -> float:
        """The part of `seconds` that the update waited for its batch."""
        return self.parts.get("data_wait", 0.0)


@dataclass(frozen=True)
class RunStart:
    """The beginning of a session."""

    progress: Progress
    stop_after: Duration
    notes: tuple[str, ...] = ()
    """Sentences for the user: choices made, checkpoints skipped, leftovers removed."""
    best: Best | None = None


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is durable."""

    path: Path
    step: int
    bytes: int
    seconds: float  # seconds from the first byte until it was durable
    blocked_seconds: float | None = None
    """Seconds that training waited for a save in the background; None: all of `seconds`."""


@dataclass
class SaveCounts:
    """The saves of a session, by outcome."""

    written: int = 0
    skipped: int = 0  # due while the one before was still being written
    waited: int = 0  # written while the loop waited, because memory had no room for a copy
    failed: int = 0


@dataclass(frozen=True)
class RunEnd:
    """The end of a session."""

    reason: str
    """finished | early_stopping | interrupted | non_finite | what a callback or an error named."""
    progress: Progress
    seconds: float  # wall seconds of this session, evaluating and saving included
    best: Best | None = None
    error: str | None = None
    saves: SaveCounts = field(default_factory=SaveCounts)
    skipped_updates: int = 0  # outliers that were not applied, over the whole run
    parts: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds since the last update, as in `StepInfo`."""


@dataclass(frozen=True)
class Requests:
    """Requests of an observer; only the loop acts on them.

    >>> Requests(save=True) | Requests(stop=True, reason="early_stopping")
    Requests(stop=True, evaluate=False, save=True, reason='early_stopping')
    """

    stop: bool = False
    evaluate: bool = False
    save: bool = False
    reason: str = ""  # reason to stop, in one word for logs and exit codes

    def __or__(self, other: Requests) -> Requests:
        return Requests(
            stop=self.stop or other.stop,
            evaluate=self.evaluate or other.evaluate,
            save=self.save or other.save,
            reason=self.reason or other.reason,
        )


class Callback:
    """Every method does nothing; override the ones you need, and never call the base's."""

    slows: bool = False
    """True while it slows the current update so much that rates should leave it out."""

    @property
    def label(self) -> str:
        """Name of its state in a checkpoint; of several with one label by their order."""
        return type(self).__name__

    @property
    def is_over(self) -> bool:
        """True if the run has come to the end that this callback watches for."""
        return False

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

    def tell(
        self,
        method: Callable[Concatenate[Callback, _About], None],
        *about: _About.args,
        **named: _About.kwargs,
    ) -> None:
        """Call a method of `Callback` on each that asks for nothing: `tell(Callback.on_save, ...)`.

        A callback's own method is called, by the name that `Callback` has for it.
        """
        for callback in self._callbacks:
            getattr(callback, method.__name__)(*about, **named)

    def on_step(self, info: StepInfo) -> Requests:
        """An update is done; all requests combined."""
        return _combined([c.on_step(info) for c in self._callbacks])

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> Requests:
        """An evaluation is done; all requests combined."""
        return _combined([c.on_evaluate(at, metrics) for c in self._callbacks])

    def on_warning(self, at: Progress, message: str) -> None:
        """The user should read `message`; the run continues."""
        self.tell(Callback.on_warning, at, message)

    def state_dict(self) -> State:
        """The states by callback, without empty ones."""
        states = {name: callback.state_dict() for name, callback in self._named()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: State) -> None:
        """Restore each callback's state; one without a state starts afresh."""
        if not isinstance(state, dict) or not all(isinstance(s, dict) for s in state.values()):
            raise TypeError(f"callbacks is {state!r:.60}, not an object of objects")
        # Checkpoints of version 0.1.0 have classes alone.
        classes = _numbered([type(c).__name__ for c in self._callbacks])
        for (name, callback), of_class in zip(self._named(), classes, strict=True):
            own = state.get(name, state.get(of_class))
            if own is not None:
                callback.load_state_dict(own)

    def _named(self) -> list[tuple[str, Callback]]:
        names = _numbered([c.label for c in self._callbacks])
        return list(zip(names, self._callbacks, strict=True))


def _numbered(names: Sequence[str]) -> list[str]:
    """The names, each that was there before with its number.

    >>> _numbered(["a", "b", "a"])
    ['a', 'b', 'a.1']
    """
    return [
        f"{name}.{names[:i].count(name)}" if name in names[:i] else name
        for i, name in enumerate(names)
    ]


def _combined(requests: Sequence[Requests | None]) -> Requests:
    return reduce(or_, filter(None, requests), Requests())
