"""Prefetch: a thread, or several, make batches ahead of the loop and copy them to a GPU.

A prefetched batch carries its own cursor, so a checkpoint stores the position of the last batch
trained on, however many are waiting.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, Self, runtime_checkable

import torch

from toque.batch import Batch
from toque.data.loader.batch_stream import Step
from toque.data.loader.epoch_plan import Update
from toque.units import Cursor


class Batches(Protocol):
    """Batches by position; `at` is a pure function."""

    def at(self, cursor: Cursor) -> Step:
        """The update that begins at `cursor`."""
        ...


@runtime_checkable
class SharedBatches(Batches, Protocol):
    """Batches that several threads make at once: planned in turn, read and collated together."""

    readers: int
    """Threads."""

    def planned(self, cursor: Cursor) -> Update:
        """The update that begins at `cursor`, not yet read; one thread at a time."""
        ...

    def collated(self, cursor: Cursor, update: Update) -> Step:
        """Step of what `planned` gave, read and collated; any number of threads may call it."""
        ...


Sent = tuple[Batch, torch.cuda.Event]
"""A batch on the device, and when it will be whole."""
Made = tuple[Step, Batch | Sent]


class DeviceFeed:
    """Sends whole updates to a GPU from page-locked memory, on a stream of its own.

    A reader's thread sends, the loop receives; neither waits for the device.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, batch: Batch) -> Sent:
        """Begin the copy of `batch`."""
        pinned = batch.counted().pin()
        with torch.cuda.stream(self._stream):
            return pinned.to(self._device), self._stream.record_event()

    def receive(self, sent: Sent) -> Batch:
        """The batch, for work that the loop's stream is given from now on."""
        batch, whole = sent
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(whole)
        for tensor in batch.tensors():
            tensor.record_stream(stream)  # its memory is the copying stream's to give away again
        return batch


class Prefetch:
    """Up to `depth` updates ahead of the loop, from `cursor` on.

    Use as a context manager: leaving it ends the threads.

    Args:
        batches: makes them, in several threads where it has more than one reader.
        cursor: of the first one.
        depth: batches that may wait, and one more for each further reader; 0: each is made when it
            is asked for.
        feed: copies them to a GPU, as they are made.
    """

    def __init__(
        self,
        batches: Batches,
        cursor: Cursor,
        *,
        depth: int = 2,
        feed: DeviceFeed | None = None,
    ) -> None:
        shared = batches if isinstance(batches, SharedBatches) and batches.readers > 1 else None
        readers = shared.readers if shared is not None else 1
        self._batches, self._shared = batches, shared
        self._cursor, self._feed = cursor, feed
        self._depth = depth + readers - 1 if depth else 0
        self._ahead: deque[Future[Made]] = deque()
        self._unclaimed: deque[Future[Made]] = deque()
        self._turn = threading.Lock()
        self._threads = ThreadPoolExecutor(readers, thread_name_prefix="toque-prefetch")

    def __enter__(self) -> Self:
        for _ in range(self._depth):
            self._submit()
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def next(self) -> tuple[Step, Batch, float]:
        """The next update, its batch (on the device with a feed), and the seconds waited for it.

        Raises:
            ToqueError: whatever making the batch raised, e.g. DataError for a damaged store.
        """
        self._submit()
        started = time.perf_counter()
        step, made = self._ahead.popleft().result()
        waited = time.perf_counter() - started
        if isinstance(made, tuple):
            assert self._feed is not None
            made = self._feed.receive(made)
        return step, made, waited

    def _submit(self) -> None:
        if self._shared is None:
            self._ahead.append(self._threads.submit(self._make))
            return
        place: Future[Made] = Future()
        self._ahead.append(place)
        self._unclaimed.append(place)
        self._threads.submit(self._fill, self._shared)

    def _make(self) -> Made:
        step = self._batches.at(self._cursor)
        self._cursor = step.cursor
        return self._sent(step)

    def _fill(self, batches: SharedBatches) -> None:
        with self._turn:  # a place and its cursor are taken together, so the order is the plan's
            place, cursor = self._unclaimed.popleft(), self._cursor
            try:
                update = batches.planned(cursor)
                self._cursor = update.next
            except Exception as error:  # noqa: BLE001 - the loop meets it in its turn
                place.set_exception(error)
                return
        try:
            place.set_result(self._sent(batches.collated(cursor, update)))
        except Exception as error:  # noqa: BLE001 - the loop meets it in its turn
            place.set_exception(error)

    def _sent(self, step: Step) -> Made:
        return step, step.batch if self._feed is None else self._feed.send(step.batch)
