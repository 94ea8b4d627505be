"""Watcher: every run of a place, looked at when somebody watches and not oftener than need be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeVar, final

from toque.errors import ToqueError
from toque.watching.found_runs import Finder
from toque.watching.watched_run import WatchedRun

Made = TypeVar("Made")
_LIST_EVERY: Final = 5
"""Looks at the files between two listings of the runs."""


@final
class Watcher:
    """The runs below an address; safe to use from several threads.

    Args:
        finder: knows where runs are.
        every: seconds between two looks.
        clock: seconds that pass.
    """

    def __init__(
        self, finder: Finder, *, every: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.finder, self.every = finder, every
        self._clock = clock
        self._lock = threading.Lock()
        self._looked: float | None = None
        self._looks = 0
        self._runs: dict[str, WatchedRun] = {}
        self.trouble = ""
        """Why the runs could not be listed; "" where they could."""

    def refresh(self) -> None:
        """Look, unless the last look was a moment ago."""
        with self._lock:
            now = self._clock()
            if self._looked is not None and now - self._looked < self.every:
                return
            if self._looks % _LIST_EVERY == 0 or not self._runs:
                self._list()
            for run in self._runs.values():
                run.refresh()
            self._looked, self._looks = self._clock(), self._looks + 1

    def seen(self, make: Callable[[Mapping[str, WatchedRun]], Made]) -> Made:
        """What `make` makes of the runs by name; they do not change meanwhile."""
        with self._lock:
            return make(self._runs)

    def _list(self) -> None:
        try:
            places = self.finder.places()
            self.trouble = ""
        except (OSError, ToqueError) as error:
            self.trouble = str(error)
            return
        self._runs = {
            name: self._runs.get(name) or WatchedRun(place) for name, place in places.items()
        }
