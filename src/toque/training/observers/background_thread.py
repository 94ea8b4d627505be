"""Background thread for network services, which may be slow, hang or fail.

Work that fails or does not fit into the short queue is counted. The thread cannot delay a run, stop
it, or keep its process alive.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from toque.units import Progress

Work = Callable[[], None]


@dataclass(eq=False)
class BackgroundThread:
    """Thread that does one piece of work at a time, in the order of `offer`."""

    name: str  # plural name of the work for messages: "webhook messages"
    capacity: int  # pieces of work that may wait
    describe: Callable[[Exception], str]  # describes an error without its secrets
    warn: Callable[[Progress, str], None]
    dropped: int = 0
    failed: int = 0
    last_error: str = ""
    _waiting: deque[Work] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closing: bool = False
    _busy: bool = False
    _thread: threading.Thread | None = None
    _reported: int = 0

    def offer(self, work: Work) -> None:
        """Queue `work`, or drop it if the queue is full."""
        with self._changed:
            if self._closing or len(self._waiting) >= self.capacity:
                self.dropped += 1
                return
            self._waiting.append(work)
            self._changed.notify()
        if self._thread is None:
            # A daemon, because work that hangs must not keep the process alive.
            self._thread = threading.Thread(
                target=self._work, name=self.name, daemon=True
            )
            self._thread.start()

    def warn_of_losses(self, at: Progress) -> None:
        """Warn of the first loss, and again whenever the number of losses has doubled."""
        lost = self.dropped + self.failed
        if lost > self._reported and (self._closing or lost >= 2 * self._reported):
            self._reported = lost
            reason = f" ({self.last_error})" if self.last_error else ""
            self.warn(
                at,
                f"{lost:,} {self.name} could not be delivered so far{reason}. The run continues",
            )

    def close(self, at: Progress, *, patience_seconds: float) -> None:
        """Wait for the queue for `patience_seconds`, drop the rest, and warn of all losses."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(patience_seconds)
        with self._changed:
            self.dropped += len(self._waiting) + self._busy
            self._waiting.clear()
        self.warn_of_losses(at)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closing)
                if not self._waiting:
                    return
                work = self._waiting.popleft()
                self._busy = True
            try:
                work()
            except Exception as error:  # noqa: BLE001 - a tracker's library may raise anything
                self.last_error = self.describe(error)
                self.failed += 1
            finally:
                self._busy = False
