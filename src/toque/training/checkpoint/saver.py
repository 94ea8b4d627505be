"""Checkpoint saver: save in the background or block, and report each result.

A save that is due while the one before it is still being written is skipped and counted. The last
save of a session is written while the loop waits, so that the end, and an interruption, are
durable before anything says so. An error is a warning when training goes on, and never vanishes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from toque.training.callbacks import Callbacks
from toque.training.checkpoint.background_writer import BackgroundWriter, Slot, Tensors
from toque.training.checkpoint.store import CheckpointStore, NamedTensors, SaveError
from toque.training.events import SaveCounts, Saved
from toque.units import Progress


@dataclass
class Saves:
    """The saves of one session.

    Args:
        store: where they go.
        callbacks: called after each.
        background: write while training goes on; otherwise every save is waited for.
    """

    store: CheckpointStore
    callbacks: Callbacks
    background: bool = False
    counts: SaveCounts = field(default_factory=SaveCounts)
    _writer: BackgroundWriter = field(default_factory=BackgroundWriter)
    _ordinary: Slot = field(default_factory=Slot)
    _best: Slot = field(default_factory=Slot)

    @contextmanager
    def session(self, at: Callable[[], Progress]) -> Iterator[None]:
        """Wait at the end, however it comes, for the saves being written, and report them."""
        self.counts = SaveCounts()
        try:
            yield
        finally:
            self.settle(at())

    def settle(self, at: Progress) -> None:
        """Wait for the saves being written, and report them."""
        self._writer.close()
        self.tell(at)

    def tell(self, at: Progress) -> None:
        """Report the saves that ended since the last call to the callbacks.

        Raises:
            BaseException: a mistake of the program, not of the disk, that ended a save.
        """
        for outcome in self._writer.outcomes():
            if outcome.saved is not None:
                self._durable(at, outcome.saved)
            elif isinstance(outcome.error, SaveError):
                self._failed(at, outcome.error)
            elif outcome.error is not None:
                raise outcome.error

    def save(
        self, at: Progress, tensors: Tensors, state: Mapping[str, Any], *, final: bool
    ) -> None:
        """Save the whole state; `final` waits until it is durable.

        Raises:
            SaveError: the final save failed.
        """
        if self.background and not final:
            if not self._ordinary.free.is_set():
                self.counts.skipped += 1
                if self.counts.skipped == 1:
                    self.callbacks.on_warning(
                        at,
                        f"the save due at step {at.step} is skipped: the one before it is still "
                        "being written. The disk is slower than train.save_every asks for; "
                        "further ones are counted in the end event",
                    )
                return
            write = partial(self.store.save, at.step)
            if self._writer.submit(self._ordinary, at.step, write, tensors, state):
                return
            self.counts.waited += 1  # no memory for a copy
        self.settle(at)
        try:
            saved = self.store.save(at.step, tensors, state)
        except SaveError as error:
            self._failed(at, error, quiet=final)
            if final:
                raise
        else:
            self._durable(at, saved)

    def save_best(
        self,
        at: Progress,
        model: Callable[[], NamedTensors],
        *,
        progress: Mapping[str, Any],
        metrics: dict[str, float],
    ) -> None:
        """Keep the model apart when its loss is among the lowest. Never skipped."""
        self._best.free.wait()  # the one before it decides what the lowest are
        self.tell(at)
        if not self.store.is_among_best(at.step, metrics):
            return

        def write(tensors: Tensors, _state: Mapping[str, Any]) -> None:
            self.store.save_best(at.step, tensors["model"], progress=progress, metrics=metrics)

        tensors = {"model": model()}
        if self.background and self._writer.submit(self._best, at.step, write, tensors, {}):
            return
        try:
            write(tensors, {})
        except SaveError as error:
            self._failed(at, error)

    def _durable(self, at: Progress, saved: Saved) -> None:
        self.counts.written += 1
        self.callbacks.on_save(at, saved)

    def _failed(self, at: Progress, error: SaveError, *, quiet: bool = False) -> None:
        self.counts.failed += 1
        if not quiet:
            self.callbacks.on_warning(at, str(error))
