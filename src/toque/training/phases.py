"""Phases of an update while they happen, and a clock of what a session's time goes into.

Whoever watches puts a context around each phase; without a watcher it costs nothing. On CUDA the
host runs ahead: there a part of the clock is when the host waited, not what the device did.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from torch import Tensor

Phase = Literal["forward", "backward", "clip", "update"]
"""clip begins when an update's gradients are whole: summed over micro-batches and ranks, and not
yet clipped. update is the optimizer's step. forward and backward happen once a micro-batch."""
Watch = Callable[[Phase], AbstractContextManager[Any]]

UNWATCHED: Final[AbstractContextManager[Any]] = nullcontext()
"""Context of a watcher that has no interest in a phase."""


@dataclass
class Phases:
    """The watchers of one training loop; call it with a phase's name for a context around it."""

    watchers: list[Watch] = field(default_factory=list)

    def __call__(self, phase: Phase) -> AbstractContextManager[Any]:
        """The contexts of all watchers around `phase`, entered."""
        if not self.watchers:
            return UNWATCHED
        stack = ExitStack()
        for watch in self.watchers:
            stack.enter_context(watch(phase))
        return stack

    def around(self, phase: Phase, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`function`, each call of which is `phase`."""

        def called(*args: Any) -> Tensor:
            with self(phase):
                return function(*args)

        return called


Part = Literal[
    "starting",  # before the first update of a session
    "data_wait",  # waiting for a batch
    "forward_backward",  # computing the loss and its gradients
    "ranks",  # summing gradients over processes
    "clip",  # the gradient's norm, clipping, the guard against outliers
    "optimizer",  # updating the weights
    "observers",  # records, progress and other callbacks between updates
    "evaluation",  # the held-out loss, and texts written and scored
    "texts",  # what callbacks do at an evaluation: showing and keeping texts
    "saving",  # what the loop waited for checkpoints
    "compiling",  # compiling the model for a shape that is new, whatever needed it
    "profiling",  # updates that a profiler slows, and what it writes after them
]
_OF_UPDATES: Final = ("forward_backward", "ranks", "clip", "optimizer", "observers")


class PartClock:
    """Seconds by part since they were last taken: a session's wall time without a gap.

    Every reading gives the time since the one before to a part. `compiling` tells the seconds since
    its last call in which the model was compiled.

    >>> times = iter([0.0, 1.0, 3.0, 3.5])
    >>> clock = PartClock(now=lambda: next(times))
    >>> clock.lap("data_wait"), clock.lap("optimizer"), clock.lap("data_wait")
    (None, None, None)
    >>> clock.taken()
    {'data_wait': 1.5, 'optimizer': 2.0}
    """

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.perf_counter,
        compiling: Callable[[], float] = float,
    ) -> None:
        self._now, self._compiling = now, compiling
        self._slowed = False  # by an observer: then the update under way is no other's measure
        self._parts: dict[str, float] = {}
        self._at = now()

    def restart(self) -> None:
        """Forget what was counted; time begins now."""
        self._parts, self._slowed = {}, False
        self._compiling()
        self._at = self._now()

    def lap(self, part: Part, *, slowed: bool | None = None) -> None:
        """Give the time since the last reading to `part`.

        `slowed` tells whether an observer slows the update that begins; None changes nothing.
        """
        now, compiling = self._now(), self._compiling()
        if (self._slowed or slowed) and part in _OF_UPDATES:  # to begin profiling takes time, too
            part = "profiling"
        self._slowed = self._slowed if slowed is None else slowed
        self._add(part, now - self._at - compiling)
        if compiling > 0.0:
            self._add("compiling", compiling)
        self._at = now

    def taken(self) -> dict[str, float]:
        """Seconds by part since the last call; the clock continues."""
        taken, self._parts = self._parts, {}
        return taken

    def _add(self, part: Part, seconds: float) -> None:
        self._parts[part] = self._parts.get(part, 0.0) + seconds
