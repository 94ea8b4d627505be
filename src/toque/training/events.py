"""Events of the training loop, as callbacks receive them, and the requests they may return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from toque.errors import NonFiniteError
from toque.training.goal import Best
from toque.units import Duration, Progress


@dataclass(frozen=True)
class StepInfo:
    """One update, seen from outside. Counts are over all ranks."""

    before: Progress
    progress: Progress
    loss: Tensor
    """[] nats per target token over the whole update. On CUDA, reading it waits for the device."""
    grad_norm: Tensor
    """[] before clipping."""
    lr: float
    n_targets: int
    n_tokens: int
    n_examples: int
    n_computed: int
    seconds: float
    """Wall seconds of the whole update, waiting for data included."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds since the update before, by what they went into: `part_clock.PARTS`."""
    stage: int | None = None
    """Stage of the curriculum, counted from 1; None without one."""
    slowed: bool = False
    """True if an observer slowed the update, as a profiler does; rates leave it out."""

    @property
    def data_wait_seconds(self) -> float:
        """The part of `seconds` that the update waited for its batch."""
        return self.parts.get("data_wait", 0.0)


@dataclass(frozen=True)
class RunStart:
    """The beginning of a session."""

    progress: Progress
    stop_after: Duration
    notes: tuple[str, ...] = ()
    """Sentences for the user: choices made, checkpoints skipped, leftovers removed."""
    best: Best | None = None
    """Seconds of the sessions before."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is durable."""

    path: Path
    step: int
    bytes: int
    seconds: float
    """Seconds from the first byte until it was durable."""
    blocked_seconds: float | None = None
    """Seconds that training waited for a save in the background; None: all of `seconds`."""


@dataclass
class SaveCounts:
    """The saves of a session, by outcome."""

    written: int = 0
    skipped: int = 0
    """Due while the one before was still being written."""
    waited: int = 0
    """Written while the loop waited, because memory had no room for a copy."""
    failed: int = 0


@dataclass(frozen=True)
class RunEnd:
    """The end of a session."""

    reason: str
    """finished | early_stopping | interrupted | non_finite | what a callback or an error named."""
    progress: Progress
    seconds: float
    """Wall seconds of this session, evaluating and saving included."""
    best: Best | None = None
    error: str | None = None
    saves: SaveCounts = field(default_factory=SaveCounts)
    skipped_updates: int = 0
    """Outliers that were not applied, over the whole run."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds since the last update, as in `StepInfo`."""


def end_reason(error: BaseException | None) -> str | None:
    """`RunEnd.reason` of a session that `error` ended."""
    if isinstance(error, NonFiniteError):
        return "non_finite"
    return type(error).__name__ if error is not None else None


@dataclass(frozen=True)
class Requests:
    """Requests of an observer; only the loop acts on them.

    >>> Requests(save=True) | Requests(stop=True, reason="early_stopping")
    Requests(stop=True, evaluate=False, save=True, reason='early_stopping')
    """

    stop: bool = False
    evaluate: bool = False
    save: bool = False
    reason: str = ""
    """Reason to stop, in one word for logs and exit codes."""

    def __or__(self, other: Requests) -> Requests:
        return Requests(
            stop=self.stop or other.stop,
            evaluate=self.evaluate or other.evaluate,
            save=self.save or other.save,
            reason=self.reason or other.reason,
        )


State = dict[str, Any]
"""JSON."""
