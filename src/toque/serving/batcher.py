"""Continuous batching of requests: one thread computes, and everything that is asked joins it.

Requests wait in one queue, first come, first served. Before every step the thread fills free rows
from it; a row that ended, or whose client went away, is free at the next step. Models and adapters
take their steps in turn. What is computed goes back to the event loop for all requests together: at
once when a text begins or ends, else every TELL_SECONDS.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, TypeVar

from transformers import PreTrainedModel

from toque.models.generation.base import PREFILL_TOKENS
from toque.models.generation.live_rows import LiveRows, NewToken, Order
from toque.models.generation.packed_products import Packs, with_fast_products
from toque.models.lora.files import use_adapter
from toque.serving.errors import RequestError, failed, queue_full
from toque.serving.served import ServedModel, ServedModels

T = TypeVar("T")
_log = logging.getLogger("toque.serving")

TELL_SECONDS = 0.1
"""Between two pieces of a text that go to its client. An event costs about a millisecond of both
cores, the client's work on the same machine included; who reads along does not see the difference.
"""


class Ticket:
    """A request's place in the batch, and what was written for it so far; made by `submit`."""

    def __init__(self, served: ServedModel, orders: Sequence[Order]) -> None:
        self.served, self.orders = served, tuple(orders)
        self._news: list[NewToken] = []
        self._error: RequestError | None = None
        self._arrived = asyncio.Event()
        self.has_begun = False
        """Whether any of its tokens has been written; the batch's own."""

    async def news(self) -> AsyncIterator[list[NewToken]]:
        """What has been written since the last time, again and again.

        A reader that is slower than the batch gets several tokens of an order at once.

        Raises:
            RequestError: the batch could not go on.
        """
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            if self._error is not None:
                raise self._error
            news, self._news = self._news, []
            yield news

    def take(self, news: Sequence[NewToken], error: RequestError | None = None) -> None:
        """Add what a step wrote; called by the event loop alone."""
        self._news += news
        self._error = error
        self._arrived.set()


class _Lane:
    """The rows of one served model, whose adapter is active while they begin."""

    def __init__(self, served: ServedModel, rows: int, packs: Packs) -> None:
        self.served, self._n_rows, self._packs = served, rows, packs
        self.tickets: dict[Order, Ticket] = {}
        self._rows: LiveRows | None = self._begun()

    def _begun(self) -> LiveRows:
        codec = self.served.codec
        return LiveRows(
            with_fast_products(self.served.model, self._packs),
            rows=self._n_rows,
            columns=self.served.columns,
            eos_id=codec.eos_id,
            pad_id=codec.pad_id,
        )

    def admit(self, orders: Sequence[Order]) -> None:
        """Begin rows; where a failure took what there was, anew."""
        self._rows = self._rows or self._begun()
        self._rows.admit(orders)

    def step(self) -> list[NewToken]:
        """The next token of every row."""
        return [] if self._rows is None else self._rows.step()

    def drop(self, orders: Iterable[Order]) -> None:
        """Free the rows of orders that nobody waits for any more."""
        for order in orders:
            del self.tickets[order]
            if self._rows is not None:
                self._rows.drop(order)

    def give_up(self) -> set[Ticket]:
        """Leave rows that may be in any state; returns who waited for them."""
        tickets = set(self.tickets.values())
        self.tickets, self._rows = {}, None
        return tickets


class Batcher:
    """Writes for all requests in one thread, between `start` and `close`.

    Args:
        models: What may be asked.
        rows: The most orders that are written at a time, over all models.
        queue: The most orders that may wait beside them.
    """

    def __init__(self, models: ServedModels, *, rows: int, queue: int) -> None:
        self.rows, self.queue = rows, queue
        self._active: dict[PreTrainedModel, str | None] = {}
        self._lanes: dict[str, _Lane] = {}
        packs: Packs = {}
        for name, served in models.items():
            self._activate(served)
            self._lanes[name] = _Lane(served, rows, packs)
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Ticket, Order]] = deque()
        self._left: list[Order] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._closing = False
        self._untold: dict[Ticket, list[NewToken]] = {}
        self._told_at = 0.0
        self._thread = threading.Thread(target=self._run, name="toque-batch", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def n_waiting(self) -> int:
        """Orders in the queue."""
        return len(self._waiting)

    @property
    def n_live(self) -> int:
        """Orders being written."""
        return sum(len(lane.tickets) for lane in self._lanes.values())

    def start(self) -> None:
        """Begin to compute; results go to the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """End the thread after the step it is in; what is unfinished is left."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def submit(self, served: ServedModel, orders: Sequence[Order]) -> Ticket:
        """Queue the orders of one request.

        Raises:
            RequestError: 429, the queue has no room for them.
        """
        ticket = Ticket(served, orders)
        with self._changed:
            free = self.rows - self.n_live + self.queue - len(self._waiting)
            if len(orders) > free:
                raise queue_full()
            self._waiting.extend((ticket, order) for order in orders)
            self._changed.notify()
        return ticket

    def cancel(self, orders: Sequence[Order]) -> None:
        """Free the places of orders; nothing where they have ended."""
        with self._changed:
            self._left += orders
            self._changed.notify()

    async def run(self, served: ServedModel, work: Callable[[], T]) -> T:
        """Call `work` between two steps, with the model's adapter active: nothing else computes."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            try:
                self._activate(served)
                value = work()
            except Exception as error:  # noqa: BLE001  # goes to the one who waits
                loop.call_soon_threadsafe(_settle, result.set_exception, result, error)
            else:
                loop.call_soon_threadsafe(_settle, result.set_result, result, value)

        with self._changed:
            self._calls.append(call)
            self._changed.notify()
        return await result

    def _run(self) -> None:
        while self._taken():
            for lane in self._lanes.values():
                if lane.tickets:
                    self._step(lane)

    def _taken(self) -> bool:
        """Wait for something to do, and take it in; False when the thread is to end."""
        with self._changed:
            while not (self._closing or self._waiting or self._calls or self._left or self.n_live):
                self._changed.wait()
            if self._closing:
                return False
            left, self._left = set(self._left), []
            self._waiting = deque(place for place in self._waiting if place[1] not in left)
            calls, self._calls = self._calls, deque()
            joining = self._joining(left)
        for call in calls:
            call()
        for lane in self._lanes.values():
            try:
                lane.drop(left & lane.tickets.keys())
            except Exception:  # noqa: BLE001  # whatever it is, the other requests go on
                self._fail(lane)
        for name, places in joining.items():
            self._admit(self._lanes[name], places)
        return True

    def _joining(self, left: set[Order]) -> dict[str, list[tuple[Ticket, Order]]]:
        """Take from the queue what has room now, at most one prefill's worth of prompt tokens."""
        leaving = sum(len(left & lane.tickets.keys()) for lane in self._lanes.values())
        free, tokens = self.rows - self.n_live + leaving, 0
        joining: dict[str, list[tuple[Ticket, Order]]] = {}
        while self._waiting and free and tokens < PREFILL_TOKENS:
            place = self._waiting.popleft()
            joining.setdefault(place[0].served.name, []).append(place)
            free, tokens = free - 1, tokens + len(place[1].prompt)
        return joining

    def _admit(self, lane: _Lane, places: Sequence[tuple[Ticket, Order]]) -> None:
        lane.tickets |= {order: ticket for ticket, order in places}
        try:
            self._activate(lane.served)
            lane.admit([order for _, order in places])
        except Exception:  # noqa: BLE001  # whatever it is, the other requests go on
            self._fail(lane)

    def _step(self, lane: _Lane) -> None:
        try:
            self._activate(lane.served)
            news = lane.step()
        except Exception:  # noqa: BLE001  # whatever it is, the other requests go on
            self._fail(lane)
            return
        urgent = False
        for new in news:
            ticket = lane.tickets[new.order]
            self._untold.setdefault(ticket, []).append(new)
            urgent |= new.end is not None or not ticket.has_begun
            ticket.has_begun = True
            if new.end is not None:
                del lane.tickets[new.order]
        if urgent or time.monotonic() - self._told_at >= TELL_SECONDS:
            self._deliver()

    def _deliver(self) -> None:
        """Hand over what has been written since the last time."""
        news, self._untold, self._told_at = self._untold, {}, time.monotonic()
        if news:
            self._tell(_deliver, news)

    def _fail(self, lane: _Lane) -> None:
        """Give up what is written in a lane; who asks next begins it anew."""
        _log.exception("writing with %s failed", lane.served.name)
        tickets = lane.give_up()
        with self._changed:
            self._waiting = deque(place for place in self._waiting if place[0] not in tickets)
        self._deliver()
        self._tell(_refuse, tickets)

    def _tell(self, callback: Callable[[Any], None], value: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(callback, value)

    def _activate(self, served: ServedModel) -> None:
        """Make a model's adapter the active one of its base, where the base has any."""
        if not hasattr(served.model, "peft_config"):
            return
        if self._active.get(served.model, "") != served.adapter:
            use_adapter(served.model, served.adapter)
            self._active[served.model] = served.adapter


def _settle(setter: Callable[[T], None], result: asyncio.Future[Any], value: T) -> None:
    if not result.cancelled():
        setter(value)


def _deliver(news: dict[Ticket, list[NewToken]]) -> None:
    for ticket, own in news.items():
        ticket.take(own)


def _refuse(tickets: set[Ticket]) -> None:
    for ticket in tickets:
        ticket.take([], failed())
