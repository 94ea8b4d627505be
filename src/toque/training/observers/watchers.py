"""Watchers of a run: a user's callbacks, a webhook, trackers, and warnings of Toque's own.

A user's class has any of the methods in `METHODS`; each takes one `RunState`. It imports nothing
from Toque. If it raises, the run continues: a warning names the first error, the rest are counted.
"""

from __future__ import annotations

import json
import math
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import torch
from torch import Tensor

from toque.config.schema import ObserveConfig
from toque.config.user_code import ForeignCode, imported
from toque.data.store.token_store import TokenStore, refuse_replaced
from toque.errors import ConfigError, nearest_hint
from toque.training.bottlenecks import DATA_ADVICE, DATA_SHARE
from toque.training.callbacks import Callback, Requests, RunEnd, RunStart, Saved, State, StepInfo
from toque.training.observers.metrics_log import StepWindow
from toque.training.observers.tracker_services import Open, opener
from toque.training.observers.trackers import TrackerFeed, tracker_values
from toque.training.observers.webhook import Webhook
from toque.training.state_values import count_in, flag_in, number_in
from toque.units import Duration, Progress

Warn = Callable[[Progress, str], None]
METHODS: Final = (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_step_end",
    "on_evaluate_begin",
    "on_evaluate_end",
    "on_save",
)
ASKS: Final = ("stop", "save", "evaluate")  # words that a method may return, one or a list of them


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
    """Calls a user's object, called `name`, passes on its requests, and survives its exceptions."""

    def __init__(self, watcher: object, *, name: str, warn: Warn) -> None:
        self.watcher, self.name, self.warn = watcher, name, warn
        self.errors = 0
        self._state = RunState(Progress(), Duration(1, "steps"))

    @property
    def label(self) -> str:
        """The user's name for it is in the key, so that one added before it takes no state."""
        return f"{type(self).__name__} {self.name}"

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

    def on_save(self, at: Progress, saved: Saved) -> None:
        """`on_save`."""
        self._call("on_save")

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
        give: Callable[[], object] = getattr(self.watcher, "state_dict", dict)

        def kept() -> Any:
            state = give()
            try:
                return json.loads(json.dumps(state, allow_nan=False))
            except ValueError as error:
                raise ValueError(
                    f"its state is not JSON, which has no NaN and no infinity ({error}), so this "
                    "checkpoint has none of it; give None in place of such a number"
                ) from error

        own = self._guarded(kept, "state_dict")
        return {"name": self.name, "own": own} if own else {}

    def load_state_dict(self, state: State) -> None:
        """Restore it, unless it is another callback's."""
        load = getattr(self.watcher, "load_state_dict", None)
        if load is not None and state.get("name") == self.name:
            self._guarded(lambda: load(state["own"]), "load_state_dict")

    def _call(self, method: str) -> Requests | None:
        """Call a method where there is one; its words (`ASKS`) as requests."""
        bound: Callable[[RunState], Any] | None = getattr(self.watcher, method, None)
        if bound is None:
            return None

        def call() -> Requests | None:
            asked = bound(self._state)
            if asked is None:
                return None
            words = list(asked) if isinstance(asked, list | tuple | set) else [asked]
            for word in words:
                if word not in ASKS:
                    raise ValueError(
                        f"it returned {word!r}; a callback returns nothing, or one or a list of "
                        f"{', '.join(ASKS)}"
                    )
            given = {word: word in words for word in ASKS}
            return Requests(**given, reason="callback" if given["stop"] else "")

        wants: Requests | None = self._guarded(call, method)
        return wants

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
                    f"({last.filename}, line {last.lineno}); the run continues",
                )
            return None


@dataclass(frozen=True)
class Watchers:
    """The watchers of a run, checked and ready before a model is built."""

    own: Sequence[tuple[str, object]]  # name and object of each of the user's
    webhook: str | None
    trackers: Mapping[str, Open]
    run: Path
    values: Callable[[Mapping[str, Any]], dict[str, float]]
    """Numbers of a record of metrics.jsonl by their names in trackers."""
    opened: list[TrackerFeed] = field(default_factory=list)  # to be finished with the command

    @classmethod
    def from_settings(
        cls,
        observe: ObserveConfig,
        foreign: ForeignCode,
        own: Sequence[object] = (),
        *,
        run: Path,
        settings: Mapping[str, Any],
        scores: frozenset[str],
        bridge: Callable[[object], object] = lambda item: item,
    ) -> Self:
        """Everything that `observe` asks for; a ConfigError now if it cannot be had.

        `own` are objects as observe.callbacks would make them, `foreign` is code of the
        configuration that nobody vouches for, `scores` are names of the domain's scores of texts,
        `bridge` gives a callback of another kind these methods.
        """
        objects = [(path, bridge(_made(foreign, path))) for path in observe.callbacks]
        objects += [(type(item).__name__, bridge(item)) for item in own]
        for name, item in objects:
            _check(name, item)
        stages = settings["curriculum"]["stages"] if settings["curriculum"] else ()
        values = partial(tracker_values, stages=stages, recipe_scores=scores)
        trackers: dict[str, Open] = {
            name: opener(name, folder=run, settings=settings) for name in observe.trackers
        }
        return cls(objects, _address(observe.webhook), trackers, run, values)

    def callbacks(self, warn: Warn) -> list[Callback]:
        """The observers of the loop; `warn` takes their sentences."""
        found: list[Callback] = [Overfitting(warn=warn), DataBound(warn=warn)]
        found += [UserCallback(watcher, name=name, warn=warn) for name, watcher in self.own]
        if self.webhook is not None:
            found.append(Webhook(self.webhook, run=self.run.name, warn=warn))
        return found

    def feeds(self, warn: Warn) -> list[TrackerFeed]:
        """One for each tracker."""
        samples = self.run / "samples.jsonl"
        self.opened.extend(
            TrackerFeed(name, connect, warn=warn, values=self.values, samples=samples)
            for name, connect in self.trackers.items()
        )
        return list(self.opened)


def _made(foreign: ForeignCode, path: str) -> object:
    setting, wanted = "observe.callbacks", f"a class with any of {', '.join(METHODS)}"
    found = imported(foreign, path, setting=setting, wanted=wanted)
    if not isinstance(found, type):
        raise ConfigError(
            f"{setting} names {path}, which is a {type(found).__name__} and no class. Name "
            f"{wanted}."
        )
    try:
        made: object = found()
    except Exception as error:
        raise ConfigError(
            f"{setting} names {path}, and making one failed with {type(error).__name__}: {error}. "
            "It is made without arguments; read what it needs from its module or the environment."
        ) from error
    return made


def _check(name: str, watcher: object) -> None:
    own = [word for word in dir(watcher) if word.startswith("on_")]
    unknown = [word for word in own if word not in METHODS]
    if own and not unknown:
        return
    if not own:
        found, hint = "none of the methods of a callback", ""
    else:
        # "batch" and "validation" are what other trainers call these.
        word = unknown[0].replace("batch", "step").replace("validation", "evaluate")
        found = f"a method {unknown[0]}, which nothing would call"
        hint = nearest_hint(word, METHODS)
    raise ConfigError(
        f"The callback {name} has {found}.{hint} The methods are {', '.join(METHODS)}; each takes "
        "the state of the run (docs/guides/callbacks-and-trackers.md)."
    )


def _address(webhook: str | None) -> str | None:
    if webhook is None or not webhook.startswith("env:"):
        return webhook
    name = webhook.removeprefix("env:")
    address = os.environ.get(name, "")
    if not address.startswith(("http://", "https://")):
        found = "is no http or https address" if address else "is not set"
        raise ConfigError(
            f"observe.webhook is {webhook}, and the environment variable {name} {found}. Put the "
            f"address there (export {name}=https://...), or set observe.webhook=null."
        )
    return address


GAP: Final = 0.3  # share by which the held-out loss may lie above the training loss


@dataclass(eq=False)
class DataBound(Callback):
    """Warns when the loop waits for data over `DATA_SHARE` of the time; again after a recovery."""

    warn: Warn
    updates: int = 50  # judged together: one cold read of the disk is no verdict
    _window: StepWindow | None = None
    _warned: bool = False

    def on_fit_start(self, start: RunStart) -> None:
        """Start a new window."""
        self._window = None

    def on_step(self, info: StepInfo) -> None:
        """Add up, and judge once the window is full."""
        if self._window is None:
            self._window = StepWindow()  # nothing was prefetched for the first of a session
            return
        if info.slowed:
            return
        window = self._window
        window.add(info)
        if window.n_steps < self.updates:
            return
        self._window = StepWindow()
        waited = window.waiting_share
        if waited > DATA_SHARE and not self._warned:
            self.warn(
                info.progress,
                f"data-bound {waited:.0%}: of the time of the last {window.n_steps} updates so "
                f"much went into waiting for batches. {DATA_ADVICE}",
            )
        self._warned = waited > DATA_SHARE


@dataclass(eq=False)
class Overfitting(Callback):
    """Warns when held-out loss lies over `GAP` above the training loss; again after a recovery.

    Dropout and label smoothing raise the training loss, the mean over all updates since the last
    evaluation whose loss is finite: they never cause a warning, but may hide a small gap.
    """

    warn: Warn
    _nats: Tensor | float = 0.0
    _targets: Tensor | int = 0
    _warned: bool = False

    def on_step(self, info: StepInfo) -> None:
        """Add up; on CUDA without waiting for the device."""
        loss = info.loss.detach().double()
        counts = torch.isfinite(loss)  # others are never applied, and no state could hold the sum
        self._nats = self._nats + torch.where(counts, loss, 0.0) * info.n_targets
        self._targets = self._targets + counts * info.n_targets

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Compare."""
        held_out, targets = metrics.get("loss"), int(self._targets)
        if held_out is None or not targets:
            return
        trained = float(torch.as_tensor(self._nats)) / targets
        self._nats, self._targets = 0.0, 0
        above = held_out / trained - 1.0 if trained > 0 else 0.0
        if above > GAP and not self._warned:
            self.warn(
                at,
                f"the held-out loss ({held_out:.4f}) is {above:.0%} above the training loss "
                f"({trained:.4f}): the model learns its examples by heart. More data, fewer epochs "
                "(train.early_stopping), dropout, or a smaller model or adapter helps",
            )
        self._warned = above > GAP

    def state_dict(self) -> State:
        """The sums, so that a continued run compares the same updates."""
        nats = float(torch.as_tensor(self._nats))
        return {"nats": nats, "targets": int(self._targets), "warned": self._warned}

    def load_state_dict(self, state: State) -> None:
        """Restore them."""
        self._nats, self._targets = number_in(state, "nats"), count_in(state, "targets")
        self._warned = flag_in(state, "warned")


@dataclass(frozen=True)
class StoreWatch(Callback):
    """Looks before evaluations and saves whether the store was replaced, as where locks fail."""

    store: TokenStore

    def on_before_evaluate(self, at: Progress) -> None:
        """Refuse by a DataError, as `on_before_save` does, a store that was replaced or removed."""
        refuse_replaced(self.store)

    on_before_save = on_before_evaluate
