"""Watchers of a run that the user names: classes of their own, a webhook, trackers."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from toque.config.schema import ObserveConfig
from toque.config.user_code import ForeignCode, imported
from toque.errors import ConfigError
from toque.training.callbacks import Callback
from toque.training.observers.run_warnings import DataBound, Overfitting
from toque.training.observers.tracker_services import Open, opener
from toque.training.observers.trackers import TrackerFeed, TrackerNames
from toque.training.observers.user_callbacks import METHODS, UserCallback
from toque.training.observers.webhook import Webhook
from toque.units import Progress

Warn = Callable[[Progress, str], None]


@dataclass(frozen=True)
class Watchers:
    """The watchers of a run, checked and ready before a model is built."""

    own: Sequence[tuple[str, object]]
    """Name and object of each of the user's."""
    webhook: str | None
    trackers: Sequence[tuple[str, Open]]
    run: Path
    names: TrackerNames
    opened: list[TrackerFeed] = field(default_factory=list)
    """The feeds of this command, to be finished when it ends."""

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
    ) -> Self:
        """Everything that `observe` asks for, refused now if it cannot be had.

        Args:
            observe: names the watchers.
            foreign: code of the configuration that nobody vouches for.
            own: objects as observe.callbacks would make them, from Python.
            run: folder of the run.
            settings: all of the run's, for trackers.
            scores: names of the domain's scores of texts.

        Raises:
            ConfigError: a class that cannot be imported or made or has no known method, a variable
                that is not set, a tracker that is not installed.
        """
        objects = [(path, _made(foreign, path)) for path in observe.callbacks]
        objects += [(type(item).__name__, item) for item in own]
        for name, item in objects:
            _check(name, item)
        stages = settings["curriculum"]["stages"] if settings["curriculum"] else ()
        names = TrackerNames(stages, scores)
        trackers = [
            (name, opener(name, folder=run, settings=settings)) for name in observe.trackers
        ]
        return cls(objects, _address(observe.webhook), trackers, run, names)

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
            TrackerFeed(name, connect, warn=warn, names=self.names, samples=samples)
            for name, connect in self.trackers
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
