"""Observers of a run, assembled: the user's classes, a webhook, trackers."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toque.config import RunConfig
from toque.config.user_code import imported
from toque.cooking.recipe_scores import RECIPE_SCORES
from toque.errors import ConfigError
from toque.training.callbacks import Callback
from toque.training.observers.data_bound import DataBound
from toque.training.observers.overfitting import Overfitting
from toque.training.observers.tracker_services import Open, opener
from toque.training.observers.trackers import TrackerFeed, TrackerNames
from toque.training.observers.user_callbacks import METHODS, UserCallback
from toque.training.observers.webhook import Webhook
from toque.units import Progress

Warn = Callable[[Progress, str], None]


@dataclass(frozen=True)
class Watchers:
    """Who watches, checked and ready before a model is built."""

    own: Sequence[tuple[str, object]]
    """Name and object of each of the user's."""
    webhook: str | None
    trackers: Sequence[tuple[str, Open]]
    run: Path
    names: TrackerNames
    opened: list[TrackerFeed] = field(default_factory=list)
    """The feeds of this command, to be finished when it ends."""

    def callbacks(self, warn: Warn) -> list[Callback]:
        """As observers of the loop; `warn` takes what they have to say."""
        found: list[Callback] = [Overfitting(warn=warn), DataBound(warn=warn)]
        found += [UserCallback(watcher, name=name, warn=warn) for name, watcher in self.own]
        if self.webhook is not None:
            found.append(Webhook(self.webhook, run=self.run.name, warn=warn))
        return found

    def feeds(self, warn: Warn) -> list[TrackerFeed]:
        """One for each tracker."""
        samples = self.run / "samples.jsonl"
        self.opened.extend(
            TrackerFeed(name, connect, warn=warn, names=self.names, samples=samples)
            for name, connect in self.trackers
        )
        return list(self.opened)


def build_watchers(config: RunConfig, own: Sequence[object] = ()) -> Watchers:
    """Everything that `observe` asks for, refused now if it cannot be had.

    Args:
        config: of the run.
        own: objects as observe.callbacks would make them, from Python.

    Raises:
        ConfigError: a class that cannot be imported or made or has no known method, a variable
            that is not set, a tracker that is not installed.
    """
    observe, folder = config.observe, Path(config.run_dir)
    objects = [(path, _made(config, path)) for path in observe.callbacks]
    objects += [(type(item).__name__, item) for item in own]
    for name, item in objects:
        _check(name, item)
    settings: Mapping[str, Any] = config.model_dump(mode="json")
    stages = settings["curriculum"]["stages"] if settings["curriculum"] else ()
    names = TrackerNames(stages, RECIPE_SCORES)
    trackers = [(name, opener(name, folder=folder, settings=settings)) for name in observe.trackers]
    return Watchers(objects, _address(observe.webhook), trackers, folder, names)


def _made(config: RunConfig, path: str) -> object:
    setting, wanted = "observe.callbacks", f"a class with any of {', '.join(METHODS)}"
    found = imported(config.foreign_code, path, setting=setting, wanted=wanted)
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
        nearest = difflib.get_close_matches(word, METHODS, n=1)
        found = f"a method {unknown[0]}, which nothing would call"
        hint = f" Nearest: {nearest[0]}." if nearest else ""
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
