"""Prefetch: a thread makes batches ahead of the loop.

A prefetched batch carries its own cursor, so a checkpoint stores the position of the last batch
trained on, however many are waiting.
"""

from __future__ import annotations

import queue
import threading
import time
from types import TracebackType
from typing import Protocol, Self

from toque.batch import Batch
from toque.data.loader.batch_stream import Step
from toque.units import Cursor


class Batches(Protocol):
    """Batches by position; `at` is a pure function."""

    def at(self, cursor: Cursor) -> Step:
        """The update that begins at `cursor`."""
        ...


class Prefetch:
    """Up to `depth` updates ahead of the loop, from `cursor` on.

    Use as a context manager: leaving it ends the thread.

    Args:
        batches: makes them.
        cursor: of the first one.
        depth: batches that may wait.
        pin: put batches in page-locked memory, from which copies to CUDA do not block.
    """

    def __init__(
        self, batches: Batches, cursor: Cursor, *, depth: int = 2, pin: bool = False
    ) -> None:
        self._batches, self._cursor, self._pin = batches, cursor, pin
        self._ready: queue.Queue[tuple[Step, Batch] | BaseException] = queue.Queue(depth)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="toque-prefetch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.set()
        while self._thread.is_alive():
            self._drain()  # the thread may be waiting for room
            self._thread.join(timeout=0.05)

    def next(self) -> tuple[Step, Batch, float]:
        """The next update, its batch (in pinned memory if `pin`), and the seconds waited for it.

        Raises:
            ToqueError: whatever making the batch raised, e.g. DataError for a damaged store.
        """
        started = time.perf_counter()
        item = self._ready.get()
        waited = time.perf_counter() - started
        if isinstance(item, BaseException):
            raise item
        return *item, waited

    def _work(self) -> None:
        try:
            while not self._closing.is_set():
                step = self._batches.at(self._cursor)
                self._cursor = step.cursor
                self._ready.put((step, step.batch.pin() if self._pin else step.batch))
        except Exception as error:  # noqa: BLE001 - raised again by `next`, in the loop's thread
            self._ready.put(error)

    def _drain(self) -> None:
        while True:
            try:
                self._ready.get_nowait()
            except queue.Empty:
                return
