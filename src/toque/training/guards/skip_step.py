"""Skip-step: statistics that tell an outlier from the updates before it.

Off unless `optim.outliers` is set. A single broken batch can undo hours: its gradient, though
clipped, points anywhere, and Adam remembers it for a thousand updates. The rule is that of OLMo's
SkipStepAdamW (six standard deviations over 128 updates); going back to a checkpoint and passing
over the data in between is what PaLM did (Chowdhery et al. 2022, section 5.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, final

import torch
from torch import Tensor

from toque.config.schema_methods import OutliersConfig
from toque.training.state_values import count_in, number_in

_LEAST_SPREAD: Final = 1e-3
"""Least share of the mean: numbers that hardly vary make no outlier of a hair's breadth."""


@final
@dataclass
class SkipStep:
    """Limits for loss and gradient norm, computed on the device.

    Each is its mean over the last `window` updates plus `sigma` standard deviations. There is no
    limit until half of the window has been seen. A value above its limit counts as the limit in
    later means, so that a lasting change of level is accepted in the end.

    Args:
        sigma: standard deviations.
        window: updates compared with.
        roll_back_after: skipped in a row, after which the run goes back to a checkpoint.
    """

    sigma: float = 6.0
    window: int = 128
    roll_back_after: int = 4
    skipped: int = 0
    """Updates not applied, over the whole run."""
    in_a_row: int = 0
    rolled_back_at: int | None = None
    """The step at which the run last went back."""
    _seen: int = 0
    _past: Tensor | None = None
    """[window, 2] float64, a ring buffer; NaN where an update was not finite."""

    @classmethod
    def from_settings(cls, section: OutliersConfig | None) -> Self | None:
        """The limits that the settings ask for."""
        if section is None:
            return None
        return cls(section.sigma, section.window, section.roll_back_after)

    def limits(self, values: Tensor) -> Tensor:
        """[2] limits for an update's `values`, which then enter the window; NaN for no limit.

        Args:
            values: [2] float64, loss and gradient norm.
        """
        if self._past is None:
            self._past = values.new_full((self.window, 2), math.nan)
        past = self._past = self._past.to(values.device)
        n = min(self._seen, self.window)
        limits = torch.full_like(values, math.nan)
        if n >= self.window // 2:
            mean = past[:n].nanmean(0)  # NaN while nothing was finite
            spread = (past[:n] - mean).square().nanmean(0).sqrt()
            limits = mean + self.sigma * torch.maximum(spread, _LEAST_SPREAD * mean.abs())
        past[self._seen % self.window] = torch.where(
            torch.isfinite(values), torch.fmin(values, limits), math.nan
        )
        self._seen += 1
        return limits

    @property
    def exhausted(self) -> bool:
        """True if `roll_back_after` updates in a row were skipped."""
        return self.in_a_row >= self.roll_back_after

    def roll_back(self, step: int, to_step: int | None) -> str | None:
        """Count from 0 again at `step`; or the reason why the run cannot go back to `to_step`."""
        before = self.rolled_back_at
        if to_step is None:
            return "there is no checkpoint to go back to"
        if before is not None and step - before <= self.window:
            return f"it went back to a checkpoint at step {before} already"
        self.rolled_back_at, self.in_a_row = step, 0
        return None

    def state_dict(self) -> dict[str, Any]:
        """JSON that a restart cannot recompute."""
        past = [] if self._past is None else self._past.tolist()
        return {
            "seen": self._seen,
            "past": [[finite_or_none(value) for value in row] for row in past],
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "rolled_back_at": self.rolled_back_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s result.

        Raises:
            ValueError: it is of another window.
        """
        rows = [[_number(value) for value in row] for row in state["past"]]
        if any(len(row) != 2 for row in rows):
            raise ValueError("outliers that are not pairs of loss and gradient norm")
        if rows and len(rows) != self.window:
            raise ValueError(f"outliers over {len(rows)} updates, not {self.window}")
        self._past = torch.tensor(rows, dtype=torch.float64) if rows else None
        self._seen, self.skipped = count_in(state, "seen"), count_in(state, "skipped")
        self.in_a_row = count_in(state, "in_a_row")
        went_back = state["rolled_back_at"] is not None
        self.rolled_back_at = count_in(state, "rolled_back_at") if went_back else None


def _number(value: object) -> float:
    return math.nan if value is None else number_in({"past": value}, "past")


def finite_or_none(value: float) -> float | None:
    """`value` as JSON can write it."""
    return value if math.isfinite(value) else None
