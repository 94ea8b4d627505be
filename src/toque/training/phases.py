"""Phases of an update, which observers can wrap, and a clock that divides a session's time.

An observer puts a context around each phase. Without observers a phase costs nothing. On CUDA the
host runs ahead of the device, so the clock measures the time of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from torch import Tensor

Phase = Literal["forward", "backward", "clip", "update"]
"""Phase of an update. forward and backward happen once per micro-batch. clip begins when the
gradients of all micro-batches and ranks are summed. update is the optimizer's step."""
Watch = Callable[[Phase], AbstractContextManager[Any]]

UNWATCHED: Final[AbstractContextManager[Any]] = nullcontext()
"""Context of a phase that an observer ignores."""


@dataclass
class Phases:
    """Observers of the phases. Call the object with the name of a phase to enter the phase."""

    watchers: list[Watch] = field(default_factory=list)

    def __call__(self, phase: Phase) -> AbstractContextManager[Any]:
        """Enter the contexts of all observers, and return a context that leaves them."""
        if not self.watchers:
            return UNWATCHED
        stack = ExitStack()
        for watch in self.watchers:
            stack.enter_context(watch(phase))
        return stack

    def around(
        self, phase: Phase, function: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        """Wrap a function so that each call of it runs inside `phase`."""

        def call(*args: Any) -> Tensor:
            with self(phase):
                return function(*args)

        return call


Part = Literal[
    "starting",  # before the first update of a session
    "data_wait",  # waiting for a batch
    "rollouts",  # generating and scoring the texts of an update
    "forward_backward",  # computing the loss and its gradients
    "ranks",  # summing gradients over ranks
    "clip",  # gradient norm, clipping and the check for outliers
    "optimizer",  # updating the weights
    "observers",  # callbacks between updates, such as logs and progress
    "evaluation",  # held-out loss, and generating and scoring texts
    "texts",  # callbacks of an evaluation, such as showing texts
    "saving",  # waiting for checkpoints
    "compiling",  # compiling the model for a new shape, during any other part
    "profiling",  # updates that a profiler slows, and writing its files
]
_UPDATE_PARTS: Final = ("forward_backward", "ranks", "clip", "optimizer", "observers")


class PartClock:
    """Clock that assigns all wall time of a session to parts.

    `compiling` returns the seconds of torch.compile since its last call.

    >>> times = iter([0.0, 1.0, 3.0, 3.5])
    >>> clock = PartClock(now=lambda: next(times))
    >>> clock.lap("data_wait"), clock.lap("optimizer"), clock.lap("data_wait")
    (None, None, None)
    >>> clock.take_parts()
    {'data_wait': 1.5, 'optimizer': 2.0}
    """

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.perf_counter,
        compiling: Callable[[], float] = float,
    ) -> None:
        self._now = now
        self._compiling = compiling
        self._slowed = False  # an observer slows the current update
        self._parts: dict[str, float] = {}
        self._at = now()

    def restart(self) -> None:
        """Clear the parts and start at the current time."""
        self._parts = {}
        self._slowed = False
        self._compiling()
        self._at = self._now()

    def lap(self, part: Part, *, slowed: bool | None = None) -> None:
        """Add the time since the last call to `part`.

        Args:
            part: Part of the session that ends now.
            slowed: Whether an observer slows the next update. None means no change.
        """
        now = self._now()
        compiling = self._compiling()
        # Starting a profiler takes time too, so the lap before a slowed update counts.
        if (self._slowed or slowed) and part in _UPDATE_PARTS:
            part = "profiling"
        if slowed is not None:
            self._slowed = slowed
        self._add(part, now - self._at - compiling)
        if compiling > 0.0:
            self._add("compiling", compiling)
        self._at = now

    def take_parts(self) -> dict[str, float]:
        """Return the seconds per part since the last call, and start again at zero."""
        parts = self._parts
        self._parts = {}
        return parts

    def _add(self, part: Part, seconds: float) -> None:
        self._parts[part] = self._parts.get(part, 0.0) + seconds
