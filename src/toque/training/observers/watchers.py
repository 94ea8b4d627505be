"""Watchers of a run: a user's callbacks, a webhook, trackers, and Toque's warnings.

A user's class has any of the methods in `METHODS`, and each takes one `RunState`. The class need
not import Toque. If a method raises, the run continues: the first error becomes a warning, and
further errors are counted.
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

from toque.config.schema import ObserveConfig
from toque.config.schema_methods import FROM_REWARDS
from toque.config.user_code import ForeignCode, import_user_code
from toque.data.store.token_store import TokenStore, refuse_replaced
from toque.errors import ConfigError, nearest_hint
from toque.training.bottlenecks import DATA_ADVICE, DATA_SHARE
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
from toque.training.observers.metrics_log import LossSum, StepWindow
from toque.training.observers.tracker_services import Connect, tracker_connector
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
REQUESTS: Final = ("stop", "save", "evaluate")
"""Requests that a method may return, as one string or a list."""
MAX_LOSS_GAP: Final = 0.3
"""Fraction by which the held-out loss may exceed the training loss without a warning."""
MIN_LOSS_GAP: Final = 0.05
"""Smallest gap in nats that causes a warning, because both losses of pairs may be almost 0."""


@dataclass(frozen=True)
class RunState:
    """State of a run, the argument of a user's method. Nothing in it can change the run."""

    progress: Progress
    stop_after: Duration
    update: StepInfo | None = None
    """Newest update of this session, or None before the first update."""
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Metrics of the newest evaluation of this session."""
    reason: str | None = None
    """Reason for the end of the session, such as "finished", only in on_train_end."""
    error: str | None = None
    """Error that ended the session, only in on_train_end."""

    @property
    def step(self) -> int:
        """Number of updates since the beginning of the run."""
        return self.progress.step

    @property
    def epoch(self) -> float:
        """Number of epochs: 1.25 is a quarter of the way through the second epoch."""
        return self.progress.epoch

    @property
    def loss(self) -> float:
        """Loss of the newest update in nats per target token, or NaN before the first update.

        On CUDA, reading it waits for the device. Do not read it at every step of a fast run.
        """
        return math.nan if self.update is None else float(self.update.loss)

    @property
    def grad_norm(self) -> float:
        """Gradient norm of the newest update before clipping. On CUDA, reading it waits."""
        return math.nan if self.update is None else float(self.update.grad_norm)

    @property
    def lr(self) -> float:
        """Learning rate of the newest update."""
        return math.nan if self.update is None else self.update.lr


class UserCallback(Callback):
    """Adapter of a user's object. It forwards the object's requests and catches its exceptions."""

    def __init__(self, watcher: object, *, name: str, warn: Warn) -> None:
        self.watcher = watcher
        self.name = name
        self.warn = warn
        self.errors = 0
        self._state = RunState(Progress(), Duration(1, "steps"))

    @property
    def label(self) -> str:
        """Key in a checkpoint. It has the callback's name, so that states are not confused."""
        return f"{type(self).__name__} {self.name}"

    def on_fit_start(self, start: RunStart) -> Requests | None:
        """Call `on_train_begin`."""
        self._state = RunState(start.progress, start.stop_after)
        return self._call("on_train_begin")

    def on_before_step(self, at: Progress) -> None:
        """Call `on_epoch_begin` at the start of an epoch, then `on_step_begin`."""
        if at.epoch == math.floor(at.epoch):
            self._call("on_epoch_begin")
        self._call("on_step_begin")

    def on_step(self, info: StepInfo) -> Requests | None:
        """Call `on_step_end`, then `on_epoch_end` at the end of an epoch."""
        self._state = replace(self._state, progress=info.progress, update=info)
        requests = self._call("on_step_end") or Requests()
        if math.floor(info.progress.epoch) > math.floor(info.before.epoch):
            requests |= self._call("on_epoch_end") or Requests()
        return requests

    def on_before_evaluate(self, at: Progress) -> None:
        """Call `on_evaluate_begin`."""
        self._call("on_evaluate_begin")

    def on_evaluate(
        self, at: Progress, metrics: Mapping[str, float]
    ) -> Requests | None:
        """Call `on_evaluate_end`."""
        self._state = replace(self._state, metrics=MappingProxyType(dict(metrics)))
        return self._call("on_evaluate_end")

    def on_save(self, at: Progress, saved: Saved) -> None:
        """Call `on_save`."""
        self._call("on_save")

    def on_fit_end(self, end: RunEnd) -> None:
        """Call `on_train_end`, then warn of the number of errors."""
        self._state = replace(
            self._state, progress=end.progress, reason=end.reason, error=end.error
        )
        self._call("on_train_end")
        if self.errors > 1:
            self.warn(
                end.progress,
                f"the callback {self.name} raised {self.errors:,} times in total",
            )

    def state_dict(self) -> State:
        """Return the state of the user's object, if it is JSON."""
        get_state: Callable[[], object] = getattr(self.watcher, "state_dict", dict)
        state = self._call_safely(lambda: _json_copy(get_state()), "state_dict")
        return {"name": self.name, "own": state} if state else {}

    def load_state_dict(self, state: State) -> None:
        """Restore the state, unless it belongs to another callback."""
        load = getattr(self.watcher, "load_state_dict", None)
        if load is not None and state.get("name") == self.name:
            self._call_safely(lambda: load(state["own"]), "load_state_dict")

    def _call(self, method: str) -> Requests | None:
        """Call the method, if the user's object has it, and return its requests."""
        bound: Callable[[RunState], Any] | None = getattr(self.watcher, method, None)
        if bound is None:
            return None
        requests: Requests | None = self._call_safely(
            lambda: _parse_requests(bound(self._state)), method
        )
        return requests

    def _call_safely(self, call: Callable[[], Any], method: str) -> Any:
        """Call `call` and return its result. If it raises, count the error and return None."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - a user's method may raise anything
            self.errors += 1
            if self.errors == 1:
                last = traceback.extract_tb(error.__traceback__)[-1]
                self.warn(
                    self._state.progress,
                    f"the callback {self.name} raised in {method}: {type(error).__name__}: {error} "
                    f"({last.filename}, line {last.lineno}). The run continues",
                )
            return None


def _json_copy(state: object) -> Any:
    try:
        return json.loads(json.dumps(state, allow_nan=False))
    except ValueError as error:
        raise ValueError(
            f"its state is not JSON ({error}), so this checkpoint does not contain it. Return "
            "None instead of NaN or infinity"
        ) from error


def _parse_requests(returned: Any) -> Requests | None:
    if returned is None:
        return None
    names = list(returned) if isinstance(returned, list | tuple | set) else [returned]
    for name in names:
        if name not in REQUESTS:
            raise ValueError(
                f"it returned {name!r}. It must return None, or one or more of "
                f"{', '.join(REQUESTS)}"
            )
    stop = "stop" in names
    return Requests(
        stop=stop,
        evaluate="evaluate" in names,
        save="save" in names,
        reason="callback" if stop else "",
    )


@dataclass(frozen=True)
class Watchers:
    """Watchers of a run. Building them checks the settings before a model is built."""

    user_objects: Sequence[tuple[str, object]]  # name and object of each user callback
    webhook: str | None
    trackers: Mapping[str, Connect]
    run: Path
    values: Callable[[Mapping[str, Any]], dict[str, float]]
    """Function that returns a record's numbers by their names in trackers."""
    goal: Goal
    """Goal of `train.best_by`."""
    learns_from_rewards: bool = False
    """True if the objective is grpo or best_of. Its training loss is not the held-out loss."""
    open_feeds: list[TrackerFeed] = field(default_factory=list)
    """Feeds that the command must finish."""

    @classmethod
    def from_settings(
        cls,
        observe: ObserveConfig,
        foreign: ForeignCode,
        user_objects: Sequence[object] = (),
        *,
        run: Path,
        settings: Mapping[str, Any],
        scores: frozenset[str],
        goal: Goal,
        bridge: Callable[[object], object] = lambda item: item,
    ) -> Self:
        """Build the watchers for the section `observe`.

        Args:
            observe: Settings of the section `observe`.
            foreign: Code that the configuration names and that is not trusted.
            user_objects: Callbacks in addition to observe.callbacks.
            run: Run folder.
            settings: Entire configuration, for trackers.
            scores: Names of the recipe scores.
            goal: Goal of `train.best_by`.
            bridge: Function that adapts other kinds of callbacks to these methods.

        Raises:
            ConfigError: A watcher is not available, or a callback has unknown methods.
        """
        objects = [
            (path, bridge(_build_callback(foreign, path))) for path in observe.callbacks
        ]
        objects += [(type(item).__name__, bridge(item)) for item in user_objects]
        for name, item in objects:
            _check_methods(name, item)

        curriculum = settings["curriculum"]
        stages = curriculum["stages"] if curriculum else ()
        values = partial(tracker_values, stages=stages, recipe_scores=scores)
        trackers: dict[str, Connect] = {
            name: tracker_connector(name, folder=run, settings=settings)
            for name in observe.trackers
        }
        return cls(
            objects,
            _resolve_address(observe.webhook),
            trackers,
            run,
            values,
            goal,
            learns_from_rewards=settings["objective"]["kind"] in FROM_REWARDS,
        )

    def callbacks(self, warn: Warn) -> list[Callback]:
        """Return the callbacks for the training loop."""
        callbacks: list[Callback] = [DataBound(warn=warn), Overfitting(warn=warn)]
        if self.learns_from_rewards:
            callbacks = [EqualRewards(warn=warn)]
        for name, watcher in self.user_objects:
            callbacks.append(UserCallback(watcher, name=name, warn=warn))
        if self.webhook is not None:
            hook = Webhook(self.webhook, run=self.run.name, goal=self.goal, warn=warn)
            callbacks.append(hook)
        return callbacks

    def start_feeds(self, warn: Warn) -> list[TrackerFeed]:
        """Build a feed for each tracker, and add it to `open_feeds`."""
        samples = self.run / "samples.jsonl"
        self.open_feeds.extend(
            TrackerFeed(name, connect, warn=warn, values=self.values, samples=samples)
            for name, connect in self.trackers.items()
        )
        return list(self.open_feeds)


def _build_callback(foreign: ForeignCode, path: str) -> object:
    setting = "observe.callbacks"
    requirement = f"a class with any of {', '.join(METHODS)}"
    callback_class = import_user_code(foreign, path, setting=setting, kind=requirement)
    if not isinstance(callback_class, type):
        raise ConfigError(
            f"{setting} names {path}, which is a {type(callback_class).__name__}, not a class. "
            f"Name {requirement}."
        )
    try:
        callback: object = callback_class()
    except Exception as error:
        raise ConfigError(
            f"{setting} names {path}, which raised {type(error).__name__} when Toque called it "
            f"without arguments: {error}. The class must take its settings from its module or "
            "the environment."
        ) from error
    return callback


def _check_methods(name: str, watcher: object) -> None:
    """Raise a ConfigError if an object has no method of a callback, or one that is not called."""
    methods = [method for method in dir(watcher) if method.startswith("on_")]
    unknown = [method for method in methods if method not in METHODS]
    if methods and not unknown:
        return

    problem = "none of a callback's methods."
    if unknown:
        # Other trainers call a step "batch" and an evaluation "validation".
        word = unknown[0].replace("batch", "step").replace("validation", "evaluate")
        hint = nearest_hint(word, METHODS)
        problem = f"a method {unknown[0]}, which is not called.{hint}"
    raise ConfigError(
        f"The callback {name} has {problem} The methods are {', '.join(METHODS)}. Each takes "
        "the state of the run (docs/guides/callbacks-and-trackers.md)."
    )


def _resolve_address(webhook: str | None) -> str | None:
    """Return the webhook's address, read from the environment for the form `env:NAME`."""
    if webhook is None or not webhook.startswith("env:"):
        return webhook
    name = webhook.removeprefix("env:")
    address = os.environ.get(name, "")
    if not address.startswith(("http://", "https://")):
        problem = "is not an http or https address" if address else "is not set"
        raise ConfigError(
            f"observe.webhook is {webhook}, but the environment variable {name} {problem}. Set it "
            f"to the address (export {name}=https://...), or set observe.webhook=null."
        )
    return address


@dataclass(eq=False)
class DataBound(Callback):
    """Callback that warns if the loop waits for data for more than `DATA_SHARE` of the time.

    After a recovery it can warn again.
    """

    warn: Warn
    # Updates per window: long enough that a single slow read of the disk causes no warning.
    updates: int = 50
    _window: StepWindow | None = None
    _warned: bool = False

    def on_fit_start(self, start: RunStart) -> None:
        """Start a new window."""
        self._window = None

    def on_step(self, info: StepInfo) -> None:
        """Add the update. When the window is full, warn if its waiting time is too long."""
        if self._window is None:
            # The first batch of a session is not prefetched.
            self._window = StepWindow()
            return
        if info.slowed:
            return
        window = self._window
        window.add(info)
        if window.n_steps < self.updates:
            return
        self._window = StepWindow()
        share = window.waiting_share
        if share > DATA_SHARE and not self._warned:
            self.warn(
                info.progress,
                f"data-bound {share:.0%}: the last {window.n_steps} updates spent {share:.0%} of "
                f"their time waiting for batches. {DATA_ADVICE}",
            )
        self._warned = share > DATA_SHARE


@dataclass(eq=False)
class Overfitting(Callback):
    """Callback that warns if held-out loss exceeds training loss by more than `MAX_LOSS_GAP`.

    The difference must also be more than `MIN_LOSS_GAP`.
    The training loss is the mean over all updates since the last evaluation. Dropout and label
    smoothing raise it, so they never cause a warning but may hide a small gap. After a recovery
    it can warn again.
    """

    warn: Warn
    _losses: LossSum = field(default_factory=LossSum)
    _warned: bool = False

    def on_step(self, info: StepInfo) -> None:
        """Add the update."""
        self._losses = self._losses.plus(info)

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Warn if the gap between the losses is too large."""
        held_out_loss = metrics.get("loss")
        training_loss = self._losses.mean_since(LossSum())
        if held_out_loss is None or math.isnan(training_loss):
            return
        self._losses = LossSum()
        gap = held_out_loss / training_loss - 1.0 if training_loss > 0 else 0.0
        is_large = gap > MAX_LOSS_GAP and held_out_loss - training_loss > MIN_LOSS_GAP
        if is_large and not self._warned:
            self.warn(
                at,
                f"the held-out loss ({held_out_loss:.4f}) is {gap:.0%} above the training loss "
                f"({training_loss:.4f}): the model is memorising its examples. Use more data, "
                "fewer epochs (train.early_stopping), dropout, or a smaller model or adapter",
            )
        self._warned = is_large

    def state_dict(self) -> State:
        """Return the sums, so that a continued run compares the same updates."""
        return {
            "nats": float(self._losses.loss),
            "targets": int(self._losses.divisor),
            "warned": self._warned,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the sums."""
        self._losses = LossSum(number_in(state, "nats"), count_in(state, "targets"))
        self._warned = flag_in(state, "warned")


_MORE_VARIED: Final = (
    "Generate more texts per prompt (objective.samples), generate more varied texts "
    "(objective.temperature), or use a finer reward (objective.rewards) that also differs between "
    "bad texts"
)


@dataclass(eq=False)
class EqualRewards(Callback):
    """Callback that warns if the texts of each prompt had equal rewards for `updates` updates.

    If these are the first updates, the run ends. After a recovery it can warn again.
    """

    warn: Warn
    updates: int = 10
    _n_equal: int = 0
    """Updates in a row in which all prompts had equal rewards."""

    def on_step(self, info: StepInfo) -> None:
        """Count the update, and warn when the count reaches `updates`.

        Raises:
            ConfigError: The rewards were equal in every update of the run.
        """
        if float(info.measured["equal_groups"]) < 1.0:
            self._n_equal = 0
            return
        self._n_equal += 1
        if self._n_equal != self.updates:
            return
        if info.progress.step == self.updates:
            raise ConfigError(
                "The texts of each prompt had equal rewards in all of the first "
                f"{self.updates} updates (the last mean is {float(info.measured['reward']):g}), "
                f"so the model learned nothing. {_MORE_VARIED}. A "
                "run cannot continue with other rewards, so start a new one."
            )
        self.warn(
            info.progress,
            f"the texts of each prompt had equal rewards in the last {self.updates} updates, so "
            f"the rewards change nothing. {_MORE_VARIED}",
        )

    def state_dict(self) -> State:
        """Return the count, so that a continued run warns at the same update."""
        return {"equal": self._n_equal}

    def load_state_dict(self, state: State) -> None:
        """Restore the count."""
        self._n_equal = count_in(state, "equal")


@dataclass(frozen=True)
class StoreWatch(Callback):
    """Callback that detects a replaced store, because some file systems ignore the store's lock."""

    store: TokenStore

    def on_before_evaluate(self, at: Progress) -> None:
        """Check the store before each evaluation and each save.

        Raises:
            DataError: The store was replaced or removed.
        """
        refuse_replaced(self.store)

    on_before_save = on_before_evaluate
