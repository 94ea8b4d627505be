"""Goal of a run: the metric that says which evaluation is the best, and the best so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Best:
    """The best evaluation of the run."""

    step: int
    loss: float
    metric: str = "loss"
    """The metric by which it is the best."""
    value: float | None = None
    """Value of that metric; None if it is the loss."""

    @property
    def score(self) -> float:
        """The value of `metric`."""
        return self.loss if self.value is None else self.value

    def __str__(self) -> str:
        by = "" if self.metric == "loss" else f"{self.metric.replace('_', ' ')} {self.score:.4f}, "
        return f"{by}loss {self.loss:.4f} at step {self.step:,}"


@dataclass(frozen=True)
class Goal:
    """The metric of the evaluations that says which is best.

    Args:
        metric: its name.
        rises: whether more is better.

    >>> Goal("bleu", rises=True).better(31.0, 30.5), Goal().better(2.0, 2.1, by=0.5)
    (True, False)
    """

    metric: str = "loss"
    rises: bool = False

    def rank(self, metrics: Mapping[str, float]) -> float:
        """A number that is the lower the better; infinity where the metric was not measured."""
        value = metrics.get(self.metric, math.nan)
        return math.inf if not math.isfinite(value) else -value if self.rises else value

    def better(self, value: float, than: float | None, *, by: float = 0.0) -> bool:
        """True if a value is better than another by more than `by`; one not measured never is."""
        if not math.isfinite(value) or than is None:
            return math.isfinite(value)
        return value > than + by if self.rises else value < than - by

    def best(self, so_far: Best | None, step: int, metrics: Mapping[str, float]) -> Best | None:
        """The better one of the best so far and this evaluation."""
        value, loss = (metrics.get(name, math.nan) for name in (self.metric, "loss"))
        known = so_far.score if so_far is not None and so_far.metric == self.metric else None
        if not math.isfinite(loss) or not self.better(value, known):
            return so_far
        return Best(step, loss, self.metric, None if self.metric == "loss" else value)

    def __str__(self) -> str:
        if self.metric == "loss":
            return "lowest held-out loss"
        return f"{'highest' if self.rises else 'lowest'} {self.metric.replace('_', ' ')}"


LOSS: Final = Goal()
"""The held-out loss as a goal."""
