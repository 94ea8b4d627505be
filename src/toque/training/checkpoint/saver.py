"""Checkpoint saver: save in the background or block, and report each result.

A save in the background is written by a thread of low priority while training goes on. Training
waits only for the snapshot: a copy of every tensor in CPU memory, taken into buffers that are kept
for the next one. Hashing, writing and fsync release Python's lock, so a thread will do.

A save that is due while the one before it is still being written is skipped and counted. The last
save of a session is written while the loop waits, so that the end, and an interruption, are
durable before anything says so. An error is a warning when training goes on, and never vanishes.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any, Final, final

import psutil
import torch
from torch import Tensor, nn

from toque.training.callbacks import Callbacks
from toque.training.checkpoint.state_tensors import bytes_of, model_tensors
from toque.training.checkpoint.store import CheckpointStore, NamedTensors, SaveError
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.parts import gathered
from toque.training.events import SaveCounts, Saved
from toque.units import Progress

_NICENESS: Final = 10
SHARE_OF_MEMORY: Final = 0.5
"""A snapshot may take so much of the free memory; a larger one is not taken."""

SKIPPED: Final = (
    "the save due at step {step} is skipped: the one before it is still being written. The disk is "
    "slower than train.save_every asks for; further ones are counted in the end event"
)

Tensors = Mapping[str, NamedTensors]
Write = Callable[[Tensors, Mapping[str, Any]], Saved | None]


@final
class Slot:
    """The copies of one kind of save, and the job that wrote them last."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Tensor] = {}
        self.job: Future[Saved | None] | None = None

    @property
    def busy(self) -> bool:
        """Whether the copies are still being written."""
        return self.job is not None and not self.job.done()

    def copied(self, tensors: Tensors) -> dict[str, dict[str, Tensor]]:
        """Copies in CPU memory; those of the call before are overwritten."""
        copies = {
            stem: {name: self._copy((stem, name), t) for name, t in named.items()}
            for stem, named in tensors.items()
        }
        if any(t.is_cuda for named in tensors.values() for t in named.values()):
            torch.cuda.synchronize()  # all copies run together and are waited for once
        return copies

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        kept = self._kept.get(key)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._kept[key] = kept
        kept.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        return kept

    @property
    def bytes(self) -> int:
        """Memory that the copies take."""
        return bytes_of(self._kept)


@final
class BackgroundWriter:
    """Writes one save after another; the thread starts with the first and ends with `close`."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: list[Future[Saved | None]] = []

    def submit(self, slot: Slot, write: Write, tensors: Tensors, state: Mapping[str, Any]) -> bool:
        """Copy everything and return; False, with nothing done, when there is no memory for it.

        Args:
            slot: which must not be busy.
            write: called in the thread with the copies.
            tensors: file stem -> named tensors.
            state: JSON.

        Raises:
            ValueError: the state holds what JSON cannot say.
        """
        started = time.perf_counter()
        needed = sum(map(bytes_of, tensors.values())) - slot.bytes
        if needed > SHARE_OF_MEMORY * psutil.virtual_memory().available:
            return False
        state = json.loads(json.dumps(state, allow_nan=False))
        with torch.no_grad():
            copies = slot.copied(tensors)
        blocked = time.perf_counter() - started

        def job() -> Saved | None:
            saved = write(copies, state)
            return replace(saved, blocked_seconds=blocked) if saved is not None else None

        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "toque-save", initializer=lower_priority)
        slot.job = self._pool.submit(job)
        self._jobs.append(slot.job)
        return True

    def finished(self) -> list[Future[Saved | None]]:
        """Jobs that ended since the last call, in order; never waits.

        The result of a model that was not among the best after all is None.
        """
        ended = list(takewhile(Future.done, self._jobs))
        del self._jobs[: len(ended)]
        return ended

    def close(self) -> None:
        """Wait until all that was handed over is written, or has failed."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def lower_priority() -> None:
    """Let a thread that writes checkpoints give way to those that train."""
    with contextlib.suppress(OSError):  # some systems allow it to nobody
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


@dataclass
class Saves:
    """The saves of one session, of whole tensors, by the first rank.

    Args:
        store: where they go.
        callbacks: called after each.
        ranks: of which the first writes; all of them call `save` and `save_best`.
        background: write while training goes on; otherwise every save is waited for.
    """

    store: CheckpointStore
    callbacks: Callbacks
    ranks: Ranks = field(default_factory=Ranks)
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
        for job in self._writer.finished():
            try:
                saved = job.result()
            except SaveError as error:
                self._failed(at, error)
            else:
                if saved is not None:
                    self._durable(at, saved)

    def save(
        self, at: Progress, tensors: Tensors, state: Mapping[str, Any], *, final: bool
    ) -> None:
        """Save the whole state; `final` waits until it is durable.

        Raises:
            SaveError: the final save failed.
        """
        tensors = gathered(tensors, keep=self.ranks.is_main)
        if not self.ranks.is_main:
            return
        if self.background and not final:
            if self._ordinary.busy:
                self.counts.skipped += 1
                if self.counts.skipped == 1:
                    self.callbacks.on_warning(at, SKIPPED.format(step=at.step))
                return
            write = partial(self.store.save, at.step)
            if self._writer.submit(self._ordinary, write, tensors, state):
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

    def _wants_best(self, at: Progress, metrics: dict[str, float]) -> bool:
        if self._best.job is not None:
            wait([self._best.job])  # the one before it decides what the lowest are
        self.tell(at)
        return self.store.is_among_best(at.step, metrics)

    def save_best(self, at: Progress, model: nn.Module, metrics: dict[str, float]) -> None:
        """Keep the model apart when its loss is among the lowest. Never skipped."""
        writes = self.ranks.is_main
        if not self.ranks.broadcast(writes and self._wants_best(at, metrics)):
            return
        tensors = gathered({"model": model_tensors(model)}, keep=writes)
        if not writes:
            return

        def write(tensors: Tensors, _state: Mapping[str, Any]) -> None:
            model, progress = tensors["model"], asdict(at)
            self.store.save_best(at.step, model, progress=progress, metrics=metrics)

        if self.background and self._writer.submit(self._best, write, tensors, {}):
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
