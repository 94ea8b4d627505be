"""User callbacks: an adapter from a user's own class to the loop's callbacks.

A user's class has any of the methods in `METHODS`; each takes one `RunState`. It imports nothing
from Toque. If it raises, the run goes on: a warning names the first error, the rest are counted.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from toque.training.callbacks import Callback, Requests, RunEnd, RunStart, State, StepInfo
from toque.units import Duration, Progress

METHODS: Final = (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_step_end",
    "on_evaluate_begin",
    "on_evaluate_end",
)
ASKS: Final = ("stop", "save", "evaluate")
"""Words that a method may return, one or a list of them."""


@dataclass(frozen=True)
class RunState:
    """The argument of a user's method. Nothing in it can change the run."""

    progress: Progress
    stop_after: Duration
    update: StepInfo | None = None
    """The newest update of this session; None before the first."""
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Metrics of the newest evaluation of this session."""
    reason: str | None = None
    """Way the session ended, in on_train_end: finished, early_stopping, interrupted and so on."""
    error: str | None = None
    """Error that ended the session, in on_train_end, if one did."""

    @property
    def step(self) -> int:
        """Updates done since the beginning of the run."""
        return self.progress.step

    @property
    def epoch(self) -> float:
        """Epochs done: 1.25 is a quarter of the way through the second."""
        return self.progress.epoch

    @property
    def loss(self) -> float:
        """Nats per target token of the newest update; NaN before the first.

        On CUDA reading it waits for the device: not every step, where speed matters.
        """
        return math.nan if self.update is None else float(self.update.loss)

    @property
    def grad_norm(self) -> float:
        """Gradient norm of the newest update, before clipping; read it as rarely as the loss."""
        return math.nan if self.update is None else float(self.update.grad_norm)

    @property
    def lr(self) -> float:
        """Learning rate of the newest update."""
        return math.nan if self.update is None else self.update.lr


class UserCallback(Callback):
    """Calls a user's object, passes on its requests, and survives its exceptions.

    Args:
        watcher: has any of `METHODS`; may have `state_dict` and `load_state_dict`, of JSON.
        name: for sentences, e.g. "mymodule:Class".
        warn: takes the warning about an error.
    """

    def __init__(
        self, watcher: object, *, name: str, warn: Callable[[Progress, str], None]
    ) -> None:
        self.watcher, self.name, self.warn = watcher, name, warn
        self.errors = 0
        self._state = RunState(Progress(), Duration(1, "steps"))

    def on_fit_start(self, start: RunStart) -> Requests | None:
        """`on_train_begin`."""
        self._state = RunState(start.progress, start.stop_after)
        return self._call("on_train_begin")

    def on_before_step(self, at: Progress) -> None:
        """`on_epoch_begin` where an epoch begins, and `on_step_begin`."""
        if at.epoch == math.floor(at.epoch):
            self._call("on_epoch_begin")
        self._call("on_step_begin")

    def on_step(self, info: StepInfo) -> Requests | None:
        """`on_step_end`, and `on_epoch_end` where an epoch ended."""
        self._state = replace(self._state, progress=info.progress, update=info)
        wants = self._call("on_step_end") or Requests()
        if math.floor(info.progress.epoch) > math.floor(info.before.epoch):
            wants |= self._call("on_epoch_end") or Requests()
        return wants

    def on_before_evaluate(self, at: Progress) -> None:
        """`on_evaluate_begin`."""
        self._call("on_evaluate_begin")

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> Requests | None:
        """`on_evaluate_end`."""
        self._state = replace(self._state, metrics=MappingProxyType(dict(metrics)))
        return self._call("on_evaluate_end")

    def on_fit_end(self, end: RunEnd) -> None:
        """`on_train_end`, and the number of errors."""
        self._state = replace(
            self._state, progress=end.progress, reason=end.reason, error=end.error
        )
        self._call("on_train_end")
        if self.errors > 1:
            self.warn(end.progress, f"the callback {self.name} raised {self.errors:,} times in all")

    def state_dict(self) -> State:
        """The user's own, when it is JSON."""
        give = getattr(self.watcher, "state_dict", dict)
        own = self._guarded(lambda: json.loads(json.dumps(give())), "state_dict")
        return {"name": self.name, "own": own} if own else {}

    def load_state_dict(self, state: State) -> None:
        """Restore it, unless it is another callback's."""
        load = getattr(self.watcher, "load_state_dict", None)
        if load is not None and state.get("name") == self.name:
            self._guarded(lambda: load(state["own"]), "load_state_dict")

    def _call(self, method: str) -> Requests | None:
        bound = getattr(self.watcher, method, None)
        if bound is None:
            return None
        asked: Requests | None = self._guarded(lambda: _requests(bound(self._state)), method)
        return asked

    def _guarded(self, call: Callable[[], Any], method: str) -> Any:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - whatever a user's method may raise
            self.errors += 1
            if self.errors == 1:
                last = traceback.extract_tb(error.__traceback__)[-1]
                self.warn(
                    self._state.progress,
                    f"the callback {self.name} raised in {method}: {type(error).__name__}: {error} "
                    f"({last.filename}, line {last.lineno}); the run goes on",
                )
            return None


def _requests(asked: object) -> Requests | None:
    """A method's return value as requests.

    >>> _requests(["save", "stop"])
    Requests(stop=True, evaluate=False, save=True, reason='callback')
    """
    if asked is None:
        return None
    words = list(asked) if isinstance(asked, list | tuple | set) else [asked]
    for word in words:
        if word not in ASKS:
            raise ValueError(
                f"it returned {word!r}; a callback returns nothing, or one or a list of "
                f"{', '.join(ASKS)}"
            )
    stop = "stop" in words
    return Requests(
        stop=stop,
        evaluate="evaluate" in words,
        save="save" in words,
        reason="callback" if stop else "",
    )
