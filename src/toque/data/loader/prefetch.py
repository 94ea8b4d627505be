"""Prefetch: a thread makes batches ahead of the loop.

A prefetched batch carries its own cursor, so a checkpoint stores the position of the last batch
trained on, however many are waiting.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
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
        self._batches, self._cursor, self._depth, self._pin = batches, cursor, depth, pin
        self._ahead: deque[Future[tuple[Step, Batch]]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="toque-prefetch")

    def __enter__(self) -> Self:
        self._ahead.extend(self._thread.submit(self._make) for _ in range(self._depth))
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def next(self) -> tuple[Step, Batch, float]:
        """The next update, its batch (in pinned memory if `pin`), and the seconds waited for it.

        Raises:
            ToqueError: whatever making the batch raised, e.g. DataError for a damaged store.
        """
        self._ahead.append(self._thread.submit(self._make))
        started = time.perf_counter()
        step, batch = self._ahead.popleft().result()
        return step, batch, time.perf_counter() - started

    def _make(self) -> tuple[Step, Batch]:
        step = self._batches.at(self._cursor)
        self._cursor = step.cursor
        return step, step.batch.pin() if self._pin else step.batch
