"""Bridge from a Toque run to callbacks for transformers' Trainer.

The callback receives transformers' `TrainerState`, and losses have Trainer's names. Its arguments
are a plain namespace with the most common fields of `TrainingArguments`. A callback that reads
another field raises AttributeError, and `UserCallback` warns of it.
"""

from __future__ import annotations

from functools import partialmethod
from types import SimpleNamespace
from typing import Any, Final

from transformers import TrainerCallback, TrainerControl, TrainerState

from toque.config import RunConfig
from toque.errors import ConfigError
from toque.training.callbacks import Goal
from toque.training.observers.watchers import RunState
from toque.units import Progress

_EVENTS: Final = {
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_step_end",
    "on_evaluate",
    "on_save",
    "on_log",
}
_EVENTS_WITHOUT_REQUESTS: Final = {
    "on_init_end",
    "on_train_end",
    "on_epoch_begin",
    "on_step_begin",
}
"""Events after which requests stay set until another event handles them."""
_UNSUPPORTED_EVENTS: Final = {
    name
    for name in vars(TrainerCallback)
    if name.startswith("on_") and name not in _EVENTS
}
_REQUESTS: Final = {
    "should_training_stop": "stop",
    "should_save": "save",
    "should_evaluate": "evaluate",
}
_MISSING_ARGUMENTS: Final = (
    "model",
    "processing_class",
    "optimizer",
    "lr_scheduler",
    "train_dataloader",
    "eval_dataloader",
)
"""Arguments of Trainer's events that are None, because a Toque run does not expose them."""


def _refuse_unsupported_events(callback_class: type[TrainerCallback]) -> None:
    unsupported = [
        event
        for event in _UNSUPPORTED_EVENTS
        if getattr(callback_class, event) is not getattr(TrainerCallback, event)
    ]
    if unsupported:
        raise ConfigError(
            f"The callback {callback_class.__name__} overrides {', '.join(sorted(unsupported))}, "
            f"which Toque does not call. The events of a run are {', '.join(sorted(_EVENTS))}."
        )


class TrainerCallbackBridge:
    """Callback for observe.callbacks that forwards a run's events to a Trainer callback."""

    def __init__(self, watcher: TrainerCallback, config: RunConfig, goal: Goal) -> None:
        _refuse_unsupported_events(type(watcher))

        length = config.train.stop_after
        self.stop_after = length
        self.log_every = config.observe.log_every
        self.goal = goal
        self.watcher = watcher
        self.before = Progress()
        self.control = TrainerControl()
        self.state = TrainerState()
        self.state.max_steps = int(length.amount) if length.unit == "steps" else 0

        self.args = SimpleNamespace(
            output_dir=config.run_dir,
            seed=config.seed,
            learning_rate=config.optim.peak_lr,
            weight_decay=config.optim.weight_decay,
            num_train_epochs=length.amount if length.unit == "epochs" else 0,
            max_steps=self.state.max_steps or -1,
            eval_strategy="steps",
            save_strategy="steps",
            logging_strategy="steps",
            save_total_limit=config.train.keep_last,
            # The finished model has the best weights by this metric.
            load_best_model_at_end=True,
            metric_for_best_model=goal.metric,
            greater_is_better=goal.rises,
        )

    def on_train_begin(self, state: RunState) -> list[str]:
        """Pass on the start, with Trainer's `on_init_end` before it."""
        self.before = state.progress
        self.pass_on("on_init_end", state)
        return self.pass_on("on_train_begin", state)

    def on_step_end(self, state: RunState) -> list[str]:
        """Pass on the end of an update. Log it if the callback or observe.log_every requests it."""
        requests = self.pass_on("on_step_end", state)
        log_is_due = self.log_every.crossed(
            self.before, state.progress, self.stop_after
        )
        self.before = state.progress
        if self.control.should_log or log_is_due:
            self.control.should_log = False
            logs = {
                "loss": state.loss,
                "grad_norm": state.grad_norm,
                "learning_rate": state.lr,
            }
            requests += self._log(logs, state)
        return requests

    def on_evaluate_end(self, state: RunState) -> list[str]:
        """Log an evaluation and pass it on. Then update the best metric, in Trainer's order."""
        metrics = {f"eval_{name}": value for name, value in state.metrics.items()}
        requests = self._log(metrics, state)
        requests += self.pass_on(
            "on_evaluate", state, metrics=metrics | {"epoch": state.epoch}
        )
        value = state.metrics.get(self.goal.metric)
        if value is not None and self.goal.is_better(value, self.state.best_metric):
            self.state.best_metric = value
            self.state.best_global_step = state.step
        return requests

    def state_dict(self) -> dict[str, Any]:
        """Return the best metric and, if the callback is an `ExportableState`, its attributes."""
        exported: dict[str, Any] = getattr(self.watcher, "state", dict)()
        return {
            "best_metric": self.state.best_metric,
            "at": self.state.best_global_step,
            "attributes": exported.get("attributes", {}),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the best metric and the callback's attributes."""
        self.state.best_metric = saved["best_metric"]
        self.state.best_global_step = saved["at"]
        for name, value in saved["attributes"].items():
            setattr(self.watcher, name, value)

    def _log(self, logs: dict[str, float], state: RunState) -> list[str]:
        logs = {**logs, "epoch": state.epoch}
        self.state.log_history.append(logs | {"step": state.step})
        return self.pass_on("on_log", state, logs=dict(logs))

    def pass_on(self, event: str, state: RunState, **extra: Any) -> list[str]:
        """Call the callback's method for `event`, and return its requests."""
        self.state.epoch = state.epoch
        self.state.global_step = state.step
        self.state.num_input_tokens_seen = state.progress.tokens
        arguments = dict.fromkeys(_MISSING_ARGUMENTS) | extra
        method = getattr(self.watcher, event)
        # A callback may return a new control, or change the given one and return None.
        returned = method(self.args, self.state, self.control, **arguments)
        self.control = returned or self.control
        if event in _EVENTS_WITHOUT_REQUESTS:
            return []

        requests = []
        for flag, request in _REQUESTS.items():
            if getattr(self.control, flag):
                requests.append(request)
            setattr(self.control, flag, False)
        return requests

    # Events that need nothing else. Requests at the start of an epoch or a step are handled
    # after the update.
    on_train_end = partialmethod(pass_on, "on_train_end")
    on_epoch_begin = partialmethod(pass_on, "on_epoch_begin")
    on_epoch_end = partialmethod(pass_on, "on_epoch_end")
    on_step_begin = partialmethod(pass_on, "on_step_begin")
    on_save = partialmethod(pass_on, "on_save")
