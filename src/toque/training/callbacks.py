"""Callbacks: observers of the training loop, which may ask it to stop, save or evaluate.

The loop calls them at its events. Only the loop acts on their requests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec

from torch import Tensor

from toque.data.loader.batch_stream import RewardedText
from toque.units import Duration, Progress

State = dict[str, Any]  # JSON
_Arguments = ParamSpec("_Arguments")


@dataclass(frozen=True)
class Best:
    """Best evaluation of the run by a metric."""

    step: int
    loss: float
    metric: str = "loss"
    value: float | None = None  # value of the metric, or None if the metric is the loss

    @property
    def score(self) -> float:
        """Value of `metric`."""
        return self.loss if self.value is None else self.value

    def __str__(self) -> str:
        text = f"loss {self.loss:.4f} at step {self.step:,}"
        if self.metric == "loss":
            return text
        return f"{self.metric.replace('_', ' ')} {self.score:.4f}, {text}"


@dataclass(frozen=True)
class Goal:
    """Metric that decides which evaluation is best. `rises` is True if higher values are better.

    >>> Goal("bleu", rises=True).is_better(31.0, 30.5), Goal().is_better(2.0, 2.1, by=0.5)
    (True, False)
    """

    metric: str = "loss"
    rises: bool = False

    def rank(self, metrics: Mapping[str, float]) -> float:
        """Return a sort key of an evaluation. Lower is better. Without the metric it is inf."""
        value = metrics.get(self.metric, math.nan)
        if not math.isfinite(value):
            return math.inf
        return -value if self.rises else value

    def is_better(self, value: float, than: float | None, *, by: float = 0.0) -> bool:
        """Check whether `value` is finite and better than `than` by more than `by`."""
        if not math.isfinite(value) or than is None:
            return math.isfinite(value)
        return value > than + by if self.rises else value < than - by

    def best(
        self, so_far: Best | None, step: int, metrics: Mapping[str, float]
    ) -> Best | None:
        """Return the better of `so_far` and this evaluation."""
        value = metrics.get(self.metric, math.nan)
        loss = metrics.get("loss", math.nan)
        best_value = None  # values of another metric cannot be compared
        if so_far is not None and so_far.metric == self.metric:
            best_value = so_far.score
        if not math.isfinite(loss) or not self.is_better(value, best_value):
            return so_far
        return Best(step, loss, self.metric, None if self.metric == "loss" else value)

    def relevant_settings(self, evaluation: Mapping[str, Any]) -> dict[str, Any]:
        """Select the settings of `evaluation` that affect the metric.

        Values of the metric under different settings cannot be compared.

        >>> Goal().relevant_settings({"max_examples": 512, "texts": 16})
        {'max_examples': 512}
        """
        # Texts for the user's prompts are not scored.
        names = evaluation.keys() - {"prompts"}
        if self.metric == "loss":
            names &= {"max_examples"}
        return {name: evaluation[name] for name in sorted(names)}

    def __str__(self) -> str:
        if self.metric == "loss":
            return "lowest held-out loss"
        extreme = "highest" if self.rises else "lowest"
        return f"{extreme} {self.metric.replace('_', ' ')}"


LOSS: Final = Goal()
"""Goal of a run by default: the lowest held-out loss."""


@dataclass(frozen=True)
class StepInfo:
    """Measurements of an update. Counts are over all ranks."""

    before: Progress
    progress: Progress
    loss: Tensor
    """Mean loss of the entire update, []: nats per target token for imitation, and the mean over
    pairs for dpo. On CUDA, reading it waits."""
    grad_norm: Tensor  # gradient norm before clipping, []
    lr: float
    n_targets: int
    n_tokens: int
    n_examples: int
    n_computed: int
    loss_count: int  # target tokens with loss, or pairs: the weight of `loss` in a mean
    seconds: float  # wall seconds of the update, including the wait for data
    parts: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds since the previous update, by `phases.Part`."""
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    """Means over the update that the objective measures, by metric name, each []."""
    texts: Sequence[RewardedText] = ()
    """Best and worst generated text of one prompt, or one text if their rewards are equal."""
    stage: int | None = None  # stage of the curriculum, counted from 1
    slowed: bool = False
    """True if an observer such as a profiler slowed the update. Rates exclude such updates."""


@dataclass(frozen=True)
class RunStart:
    """Start of a session."""

    progress: Progress
    stop_after: Duration
    notes: tuple[str, ...] = ()
    """Notes for the user about choices, skipped checkpoints and removed leftovers."""
    best: Best | None = None


@dataclass(frozen=True)
class Saved:
    """Durable checkpoint."""

    path: Path
    step: int
    bytes: int
    seconds: float  # seconds from the first byte until the checkpoint was durable
    blocked_seconds: float | None = None
    """Seconds that training waited for a background save. None means all of `seconds`."""


@dataclass
class SaveCounts:
    """Number of saves in a session by outcome."""

    written: int = 0
    skipped: int = 0  # due while the previous save was still being written
    # Written while training waited, because there was not enough memory for a snapshot.
    waited: int = 0
    failed: int = 0


@dataclass(frozen=True)
class RunEnd:
    """End of a session."""

    reason: str
    """finished, early_stopping, interrupted, non_finite, a callback's reason, or an error's class
    name."""
    progress: Progress
    seconds: float  # wall seconds of this session, including evaluations and saves
    best: Best | None = None
    error: str | None = None
    saves: SaveCounts = field(default_factory=SaveCounts)
    skipped_updates: int = 0  # number of outliers not applied, over the entire run
    parts: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds since the last update, by `phases.Part`."""


@dataclass(frozen=True)
class Requests:
    """Requests from a callback to the training loop.

    >>> Requests(save=True) | Requests(stop=True, reason="early_stopping")
    Requests(stop=True, evaluate=False, save=True, reason='early_stopping')
    """

    stop: bool = False
    evaluate: bool = False
    save: bool = False
    reason: str = ""  # one word for logs and exit codes, if `stop` is set

    def __or__(self, other: Requests) -> Requests:
        return Requests(
            stop=self.stop or other.stop,
            evaluate=self.evaluate or other.evaluate,
            save=self.save or other.save,
            reason=self.reason or other.reason,
        )


class Callback:
    """Base class of callbacks. Its methods do nothing, so an override need not call them."""

    slows: bool = False
    """True while the callback makes the current update so slow that rates should exclude it.
    """

    @property
    def label(self) -> str:
        """Name of the callback's state in a checkpoint. Repeated labels are numbered in order."""
        return type(self).__name__

    @property
    def is_over(self) -> bool:
        """True if the run has reached the end that this callback watches for."""
        return False

    def on_fit_start(self, start: RunStart) -> Requests | None:
        """Handle the start of a session."""

    def on_before_step(self, at: Progress) -> None:
        """Handle the start of an update."""

    def on_micro_batch(self, at: Progress, done: int, total: int) -> None:
        """Handle the end of micro-batch `done` of `total` in an update, counted from 1."""

    def on_step(self, info: StepInfo) -> Requests | None:
        """Handle the end of an update, before an evaluation or save."""

    def on_before_evaluate(self, at: Progress) -> None:
        """Handle the start of an evaluation."""

    def on_evaluate(
        self, at: Progress, metrics: Mapping[str, float]
    ) -> Requests | None:
        """Handle the end of an evaluation."""

    def on_before_save(self, at: Progress) -> None:
        """Handle the start of a save, before it calls `state_dict`."""

    def on_save(self, at: Progress, saved: Saved) -> None:
        """Handle a durable checkpoint."""

    def on_warning(self, at: Progress, message: str) -> None:
        """Handle a warning for the user. The run continues."""

    def on_fit_end(self, end: RunEnd) -> None:
        """Handle the end of a session. It follows every `on_fit_start`, even after an error."""

    def state_dict(self) -> State:
        """Return the state that a restart cannot recompute, as JSON."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""


class Callbacks:
    """List of callbacks. Each event calls them in order."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)

    def extend(self, callbacks: Iterable[Callback]) -> None:
        """Add callbacks at the end, before a session starts."""
        self._callbacks += tuple(callbacks)

    def __iter__(self) -> Iterator[Callback]:
        """Iterate over the callbacks in order."""
        return iter(self._callbacks)

    @property
    def are_slow(self) -> bool:
        """True if a callback slows the current update."""
        return any(callback.slows for callback in self._callbacks)

    @contextmanager
    def around(
        self, start: RunStart, end: Callable[[BaseException | None], RunEnd]
    ) -> Iterator[Requests]:
        """Call every `on_fit_start`, yield their requests, and always call every `on_fit_end`."""
        started: list[Callback] = []
        failure: BaseException | None = None
        requests = Requests()
        try:
            for callback in self._callbacks:
                started.append(callback)
                requests |= callback.on_fit_start(start) or Requests()
            yield requests
        except BaseException as error:
            failure = error
            raise
        finally:
            summary = end(failure)
            # The stack calls every callback, even if another callback fails.
            with ExitStack() as stack:
                for callback in reversed(started):
                    stack.callback(callback.on_fit_end, summary)

    def tell(
        self,
        method: Callable[Concatenate[Callback, _Arguments], None],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> None:
        """Call a method that returns no requests on every callback.

        `tell(Callback.on_save, ...)` calls the overriding methods of subclasses. `Callback` only
        provides the name and the types of the arguments.
        """
        for callback in self._callbacks:
            getattr(callback, method.__name__)(*args, **kwargs)

    def on_step(self, info: StepInfo) -> Requests:
        """Call every `on_step`, and combine the requests."""
        return _combine([c.on_step(info) for c in self._callbacks])

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> Requests:
        """Call every `on_evaluate`, and combine the requests."""
        return _combine([c.on_evaluate(at, metrics) for c in self._callbacks])

    def on_warning(self, at: Progress, message: str) -> None:
        """Pass a warning for the user to every callback."""
        self.tell(Callback.on_warning, at, message)

    def state_dict(self) -> State:
        """Return the states that are not empty, by label."""
        callbacks = self._by_label()
        states = {name: callback.state_dict() for name, callback in callbacks.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: State) -> None:
        """Restore the states. A callback without a state starts fresh."""
        is_valid = isinstance(state, dict) and all(
            isinstance(callback_state, dict) for callback_state in state.values()
        )
        if not is_valid:
            raise TypeError(f"callbacks is {state!r:.60}, not an object of objects")
        for name, callback in self._by_label().items():
            if name in state:
                callback.load_state_dict(state[name])

    def _by_label(self) -> dict[str, Callback]:
        """Return the callbacks by label. A repeated label "a" becomes "a.1", "a.2" and so on."""
        named: dict[str, Callback] = {}
        counts: Counter[str] = Counter()
        for callback in self._callbacks:
            label = callback.label
            name = f"{label}.{counts[label]}" if counts[label] else label
            named[name] = callback
            counts[label] += 1
        return named


def _combine(requests: Sequence[Requests | None]) -> Requests:
    return reduce(or_, filter(None, requests), Requests())
