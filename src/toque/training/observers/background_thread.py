"""Background thread for talking to the outside, which may be slow, hang or fail.

Work that fails, or does not fit into the short queue, is counted. Nothing here can stall a run,
stop it, or keep its process from ending.
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
    """Does work one piece at a time, in the order it was offered."""

    name: str  # name of the work in the plural, for sentences: "webhook messages"
    capacity: int  # pieces that may wait
    describe: Callable[[Exception], str]  # gives an error in words that give no secret away
    warn: Callable[[Progress, str], None]  # takes a sentence about what could not be delivered
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
        """Have `work` done soon, or drop it because too much waits."""
        with self._changed:
            if self._closing or len(self._waiting) >= self.capacity:
                self.dropped += 1
                return
            self._waiting.append(work)
            self._changed.notify()
        if self._thread is None:
            # A daemon: a piece of work that hangs must not keep the process alive.
            self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            self._thread.start()

    def warn_of_losses(self, at: Progress) -> None:
        """Warn at the first loss, and each time their number has doubled."""
        lost = self.dropped + self.failed
        if lost > self._reported and (self._closing or lost >= 2 * self._reported):
            self._reported = lost
            why = f" ({self.last_error})" if self.last_error else ""
            self.warn(
                at, f"{lost:,} {self.name} could not be delivered so far{why}; the run goes on"
            )

    def close(self, at: Progress, *, patience_seconds: float) -> None:
        """Wait for the queue, no longer than that; what is left is dropped, and all warned of."""
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
                work, self._busy = self._waiting.popleft(), True
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whatever a tracker's library may raise
                self.last_error = self.describe(error)
                self.failed += 1
            finally:
                self._busy = False
