"""Bridge for callbacks of transformers' Trainer: its events, in its own words, of a run of Toque.

The state is of transformers' own class. The arguments are a plain namespace of what a run knows: a
callback that asks for more raises, which the user is told. Losses are under their Trainer's names.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from transformers import TrainerCallback, TrainerControl, TrainerState

from toque.config import RunConfig
from toque.errors import ConfigError
from toque.training.callbacks import Goal
from toque.training.observers.watchers import RunState
from toque.units import Progress

_TOLD: Final = {
    *("on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end"),
    *("on_step_begin", "on_step_end", "on_evaluate", "on_save", "on_log"),
}
_UNTOLD: Final = {name for name in vars(TrainerCallback) if name.startswith("on_")} - _TOLD
_ASKED: Final = {
    "should_training_stop": "stop",
    "should_save": "save",
    "should_evaluate": "evaluate",
}
_NOTHING: Final = (
    *("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader"),
    "eval_dataloader",
)


def _telling(event: str) -> Callable[[TrainerCallbackBridge, RunState], list[str]]:
    """A method that tells of an event; the words for what is asked of the run then."""
    return lambda bridge, state: bridge.tell(event, state)


class TrainerCallbackBridge:
    """A callback as observe.callbacks names one, which tells a Trainer's of what happens."""

    def __init__(self, watcher: TrainerCallback, config: RunConfig, goal: Goal) -> None:
        unheard = [
            n for n in _UNTOLD if getattr(type(watcher), n) is not getattr(TrainerCallback, n)
        ]
        if unheard:
            raise ConfigError(
                f"The callback {type(watcher).__name__} has {', '.join(sorted(unheard))}, which "
                f"nothing here would call. A run has the events {', '.join(sorted(_TOLD))}."
            )
        train, stop = config.train, config.train.stop_after
        self.watcher, self.control, self.state = watcher, TrainerControl(), TrainerState()
        self.log_every, self.goal, self.stop_after = config.observe.log_every, goal, stop
        self.before = Progress()
        self.state.max_steps = int(stop.amount) if stop.unit == "steps" else 0
        self.args = SimpleNamespace(
            output_dir=config.run_dir,
            seed=config.seed,
            learning_rate=config.optim.peak_lr,
            weight_decay=config.optim.weight_decay,
            num_train_epochs=stop.amount if stop.unit == "epochs" else 0,
            max_steps=self.state.max_steps or -1,
            eval_strategy="steps",
            save_strategy="steps",
            logging_strategy="steps",
            save_total_limit=train.keep_last,
            # The finished model is the best of the run, by this.
            load_best_model_at_end=True,
            metric_for_best_model=goal.metric,
            greater_is_better=goal.rises,
        )

    def on_train_begin(self, state: RunState) -> list[str]:
        """The beginning of their Trainer, too."""
        self.before = state.progress
        self.tell("on_init_end", state)
        return self.tell("on_train_begin", state)

    # What is asked for where an epoch or an update begins is done after the update.
    on_train_end, on_epoch_begin, on_epoch_end, on_step_begin, on_save = map(
        _telling, ("on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_save")
    )

    def on_step_end(self, state: RunState) -> list[str]:
        """An update has ended, and is logged as often as observe.log_every says."""
        asked = self.tell("on_step_end", state)
        before, self.before = self.before, state.progress
        if self.control.should_log or self.log_every.crossed(
            before, state.progress, self.stop_after
        ):
            self.control.should_log = False
            logs = {"loss": state.loss, "grad_norm": state.grad_norm, "learning_rate": state.lr}
            asked += self._log(logs, state)
        return asked

    def on_evaluate_end(self, state: RunState) -> list[str]:
        """An evaluation: it is logged, then told, and only then compared with the best."""
        metrics = {f"eval_{name}": value for name, value in state.metrics.items()}
        asked = self._log(metrics, state)
        asked += self.tell("on_evaluate", state, metrics=metrics | {"epoch": state.epoch})
        value = state.metrics.get(self.goal.metric)
        if value is not None and self.goal.better(value, self.state.best_metric):
            self.state.best_metric, self.state.best_global_step = value, state.step
        return asked

    def state_dict(self) -> dict[str, Any]:
        """The best so far, and what the callback itself gives to be saved."""
        own: dict[str, Any] = getattr(self.watcher, "state", dict)()
        best = {"best_metric": self.state.best_metric, "at": self.state.best_global_step}
        return best | {"attributes": own.get("attributes", {})}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore it."""
        self.state.best_metric, self.state.best_global_step = saved["best_metric"], saved["at"]
        for name, value in saved["attributes"].items():
            setattr(self.watcher, name, value)

    def _log(self, logs: dict[str, float], state: RunState) -> list[str]:
        logs = {**logs, "epoch": state.epoch}
        self.state.log_history.append(logs | {"step": state.step})
        return self.tell("on_log", state, logs=dict(logs))

    def tell(self, event: str, state: RunState, **more: Any) -> list[str]:
        """Call one of its methods; the words for what it asks of the run."""
        self.state.epoch, self.state.global_step = state.epoch, state.step
        self.state.num_input_tokens_seen = state.progress.tokens
        given = dict.fromkeys(_NOTHING) | more
        found = getattr(self.watcher, event)(self.args, self.state, self.control, **given)
        self.control = found or self.control
        words = [word for flag, word in _ASKED.items() if getattr(self.control, flag)]
        if event in ("on_epoch_begin", "on_step_begin", "on_init_end", "on_train_end"):
            return []  # these ask for nothing, so that it stays asked for
        for flag in _ASKED:
            setattr(self.control, flag, False)
        return words
