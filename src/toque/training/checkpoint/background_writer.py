"""Background writer: a thread of low priority that writes saves while training goes on.

Training waits only for the snapshot: a copy of every tensor in CPU memory, taken into buffers that
are kept for the next one. Hashing, writing and fsync release Python's lock, so a thread will do.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, final

import psutil
import torch
from torch import Tensor

from toque.training.checkpoint.state_tensors import bytes_of
from toque.training.checkpoint.store import NamedTensors
from toque.training.events import Saved

_NICENESS: Final = 10
_SHARE_OF_MEMORY: Final = 0.5
"""A snapshot may take so much of the free memory; a larger one is not taken."""

Tensors = Mapping[str, NamedTensors]
Write = Callable[[Tensors, Mapping[str, Any]], Saved | None]


@dataclass(frozen=True)
class Outcome:
    """The result of a save handed to the writer."""

    step: int
    saved: Saved | None = None
    """None also for a model that was not among the best after all."""
    error: BaseException | None = None


@dataclass(frozen=True)
class _Job:
    step: int
    write: Write
    tensors: Tensors
    state: Mapping[str, Any]
    blocked_seconds: float


@final
class Slot:
    """The copies of one kind of save, and whether the last of them is still being written."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Tensor] = {}
        self.free = threading.Event()
        self.free.set()

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
        return sum(t.numel() * t.element_size() for t in self._kept.values())


@final
class BackgroundWriter:
    """Writes one save after another; the thread starts with the first and ends with `close`."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Slot, _Job] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(
        self, slot: Slot, step: int, write: Write, tensors: Tensors, state: Mapping[str, Any]
    ) -> bool:
        """Copy everything and return; False, with nothing done, when there is no memory for it.

        Args:
            slot: which must be free.
            step: updates done.
            write: called in the thread with the copies.
            tensors: file stem -> named tensors.
            state: JSON.

        Raises:
            ValueError: the state holds what JSON cannot say.
        """
        started = time.perf_counter()
        needed = sum(map(bytes_of, tensors.values())) - slot.bytes
        if needed > _SHARE_OF_MEMORY * psutil.virtual_memory().available:
            return False
        state = json.loads(json.dumps(state, allow_nan=False))
        with torch.no_grad():
            copies = slot.copied(tensors)
        slot.free.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="toque-save", daemon=True)
            self._thread.start()
        job = _Job(step, write, copies, state, time.perf_counter() - started)
        self._jobs.put((slot, job))
        return True

    def outcomes(self) -> list[Outcome]:
        """Results since the last call; never waits."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._outcomes.get_nowait())
        return found

    def close(self) -> None:
        """Wait until all that was handed over is written, or has failed."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        with contextlib.suppress(OSError):  # some systems allow it to nobody
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (queued := self._jobs.get()) is not None:
            slot, job = queued
            try:
                saved = job.write(job.tensors, job.state)
                if saved is not None:
                    saved = replace(saved, blocked_seconds=job.blocked_seconds)
                outcome = Outcome(job.step, saved)
            except BaseException as error:  # noqa: BLE001  # the loop, which polls, sees to it
                outcome = Outcome(job.step, error=error)
            self._outcomes.put(outcome)
            slot.free.set()
