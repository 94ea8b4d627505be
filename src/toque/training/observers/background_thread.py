"""Background thread for network services, which may be slow, hang or fail.

Jobs that fail or do not fit into the short queue are counted. The thread cannot delay a run, stop
it, or keep its process alive.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from toque.units import Progress

Job = Callable[[], None]


@dataclass(eq=False)
class BackgroundThread:
    """Thread that runs one job at a time, in the order of `offer`."""

    name: str  # plural name of the jobs for messages: "webhook messages"
    capacity: int  # maximum number of waiting jobs
    describe: Callable[[Exception], str]  # describes an error without its secrets
    warn: Callable[[Progress, str], None]
    dropped: int = 0
    failed: int = 0
    last_error: str = ""
    _waiting: deque[Job] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closing: bool = False
    _busy: bool = False
    _thread: threading.Thread | None = None
    _reported: int = 0

    def offer(self, job: Job) -> None:
        """Queue `job`, or drop it if the queue is full."""
        with self._changed:
            if self._closing or len(self._waiting) >= self.capacity:
                self.dropped += 1
                return
            self._waiting.append(job)
            self._changed.notify()
        if self._thread is None:
            # A daemon, because a job that hangs must not keep the process alive.
            self._thread = threading.Thread(
                target=self._run_jobs, name=self.name, daemon=True
            )
            self._thread.start()

    def warn_of_losses(self, at: Progress) -> None:
        """Warn of the first loss, and again when the number of losses has doubled.

        While the thread closes, warn of any loss that was not reported.
        """
        lost = self.dropped + self.failed
        is_due = self._closing or lost >= 2 * self._reported
        if lost > self._reported and is_due:
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
            # A job that still runs may hang, so it counts as dropped.
            self.dropped += len(self._waiting) + self._busy
            self._waiting.clear()
        self.warn_of_losses(at)

    def _run_jobs(self) -> None:
        """Run jobs until the thread closes and its queue is empty."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closing)
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._busy = True
            try:
                job()
            except Exception as error:  # noqa: BLE001 - a tracker's library may raise anything
                self.last_error = self.describe(error)
                self.failed += 1
            finally:
                self._busy = False
