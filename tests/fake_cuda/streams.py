"""Streams of a fake card: what each has done, and what it has seen of the others' work.

A stream counts its operations. An event is what its stream had done when it was recorded, and a
stream that waits for an event has seen all that: vector clocks (Mattern 1989). What stands in no
stream's past may be half done.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar


class StreamError(RuntimeError):
    """Work that may begin before what it reads is whole, or memory given away while it is read."""


class Stream:
    """A stand-in for `torch.cuda.Stream`."""

    order: ClassVar[Order]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = self.stream_id = self.cuda_stream = next(self.order.numbers)
        self.device = self.device_index = 0
        self.seen: dict[int, int] = {self.number: 0}

    def work(self) -> int:
        """Count one operation; its number."""
        self.seen[self.number] += 1
        return self.seen[self.number]

    def has_seen(self, stream: Stream, operation: int) -> bool:
        """True if an operation of another stream is over before what comes here from now on."""
        return self.seen.get(stream.number, 0) >= operation

    def record_event(self, event: Event | None = None) -> Event:
        """The event of all that was begun here so far."""
        event = self.order.Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let what comes wait for an event."""
        self.order.log.append(f"stream {self.number} waits for event {event.number}")
        self._have_seen(event.past)

    def wait_stream(self, stream: Stream) -> None:
        """Let what comes wait for all that another stream was given."""
        self._have_seen(stream.seen)

    def _have_seen(self, past: dict[int, int]) -> None:
        for number, operation in past.items():
            self.seen[number] = max(self.seen.get(number, 0), operation)

    def synchronize(self) -> None:
        """Let the host wait."""
        self.order.on_wait("a stream is waited for")

    def query(self) -> bool:
        """True: the fake card is fast."""
        return True

    def is_capturing(self) -> bool:
        """False: it makes no graphs."""
        return False


class Event:
    """A stand-in for `torch.cuda.Event`."""

    order: ClassVar[Order]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = next(self.order.event_numbers)
        self.past: dict[int, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        """Stand for all that a stream was given so far."""
        stream = self.order.current if stream is None else stream
        self.past = dict(stream.seen)
        self.order.log.append(f"event {self.number} on stream {stream.number}")

    def wait(self, stream: Stream | None = None) -> None:
        """Let what a stream is given wait."""
        (self.order.current if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait."""
        self.order.on_wait("an event is waited for")

    def query(self) -> bool:
        """True: the fake card is fast."""
        return True

    def elapsed_time(self, _other: Event) -> float:
        """One millisecond."""
        return 1.0


@dataclass(eq=False)
class Order:
    """The streams of one card, and a log of what was asked of them."""

    on_wait: Callable[[str], None]
    log: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    event_numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        # Classes of this card: torch's are called without saying which card is meant.
        self.Stream: type[Stream] = type("Stream", (Stream,), {"order": self})
        self.Event: type[Event] = type("Event", (Event,), {"order": self})
        self.default = self.Stream()
        self._threads = threading.local()

    @property
    def current(self) -> Stream:
        """The stream that this thread gives work to."""
        found: Stream = getattr(self._threads, "stream", self.default)
        return found

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Inside, this thread gives its work to `stream`."""
        before = self.current
        self._threads.stream = before if stream is None else stream
        try:
            yield
        finally:
            self._threads.stream = before


@dataclass(eq=False)
class Uses:
    """The streams that used one piece of the card's memory."""

    home: Stream  # stream whose allocator gives the memory away again
    written: tuple[Stream, int]
    recorded: set[Stream] = field(default_factory=set)
    readers: dict[Stream, tuple[int, str]] = field(default_factory=dict)
    """Streams besides the home, with their last operation and the place of the first."""

    def read(self, stream: Stream, where: Callable[[], str]) -> None:
        """Note that a stream reads it; a StreamError where it may be half written."""
        by, operation = self.written
        if by is not stream and not stream.has_seen(by, operation):
            raise StreamError(
                f"stream {stream.number} reads what stream {by.number} may still be writing at "
                f"{where()}: no event orders them"
            )
        if stream is not self.home:
            first = self.readers[stream][1] if stream in self.readers else where()
            self.readers[stream] = stream.seen[stream.number], first

    def record(self, stream: Stream) -> None:
        """Have the allocator wait for a stream, as `record_stream` does."""
        self.recorded.add(stream)

    def lost(self) -> list[str]:
        """Readers that neither the allocator nor the home knows to have ended."""
        return [
            f"memory of stream {self.home.number} may be given away while stream {s.number} reads "
            f"it at {where}: record_stream was not called"
            for s, (last, where) in self.readers.items()
            if s not in self.recorded and not self.home.has_seen(s, last)
        ]
