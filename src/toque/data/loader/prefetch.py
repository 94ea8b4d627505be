"""Prefetch: a thread, or several, make batches ahead of the loop and copy them to a GPU.

A prefetched batch carries its own cursor, so a checkpoint stores the position of the last batch
trained on, however many are waiting.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, Self

import torch

from toque.batch import Batch
from toque.data.loader.batch_stream import Step
from toque.data.loader.epoch_plan import Update
from toque.units import Cursor


class Batches(Protocol):
    """Batches by position, planned in turn and made by several threads; a `BatchStream` is one."""

    @property
    def readers(self) -> int:
        """Threads that may collate at once."""
        ...

    def planned(self, cursor: Cursor, /) -> Update:
        """The update that begins at `cursor`, not yet read; one thread at a time."""
        ...

    def collated(self, cursor: Cursor, update: Update, /) -> Step:
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
        self._batches, self._cursor, self._feed = batches, cursor, feed
        self._depth = depth + batches.readers - 1 if depth else 0
        self._ahead: deque[Future[Made]] = deque()
        # Updates are planned one after the other, so their order is the plan's; readers wait.
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="toque-prefetch")
        self._readers = ThreadPoolExecutor(batches.readers, thread_name_prefix="toque-prefetch")

    def __enter__(self) -> Self:
        for _ in range(self._depth):
            self._submit()
        return self

    def __exit__(self, *_: object) -> None:
        self._planner.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)

    def next(self) -> tuple[Step, Batch]:
        """The next update, and its batch, on the device with a feed; waits for it.

        Raises:
            ToqueError: whatever making the batch raised, e.g. DataError for a damaged store.
        """
        self._submit()
        step, made = self._ahead.popleft().result()
        if isinstance(made, tuple):
            assert self._feed is not None
            made = self._feed.receive(made)
        return step, made

    def _submit(self) -> None:
        planned = self._planner.submit(self._plan)
        self._ahead.append(self._readers.submit(self._make, planned))

    def _plan(self) -> tuple[Cursor, Update]:
        cursor, update = self._cursor, self._batches.planned(self._cursor)
        self._cursor = update.cursor
        return cursor, update

    def _make(self, planned: Future[tuple[Cursor, Update]]) -> Made:
        step = self._batches.collated(*planned.result())
        return step, step.batch if self._feed is None else self._feed.send(step.batch)
