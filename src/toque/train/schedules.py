"""Learning rate as a function of progress: nothing to step, nothing to save.

With f = the share of `stop_after` that is done before the update, and w = the share at which warmup
ends, both in [0, 1]:

    warm  = min(1, (m + u) / warmup)         m = progress in warmup's unit, u = one update in it
    d     = min(1, max(0, f - w) / (1 - w))
    decay = 1 (constant), 1 - d (linear), (1 + cos(pi d)) / 2 (cosine)
    lr    = warm * (min_lr + (peak_lr - min_lr) * decay)

In steps this is the textbook's: peak * (step + 1) / warmup, then the decay over
(step - warmup) / (total - warmup), ending at min_lr. Cosine: Loshchilov & Hutter 2017, eq. 5.
A run shorter than its warmup never decays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from toque.errors import ConfigError
from toque.units import Duration, Progress

LearningRate = Callable[[Progress], float]

_DECAYS: Final[dict[str, Callable[[float], float]]] = {
    "constant": lambda _d: 1.0,
    "linear": lambda d: 1.0 - d,
    "cosine": lambda d: 0.5 * (1.0 + math.cos(math.pi * d)),
}
SCHEDULES: Final = tuple(_DECAYS)


def make_schedule(
    name: str,
    *,
    peak_lr: float,
    min_lr: float = 0.0,
    warmup: Duration,
    stop_after: Duration,
    expected: Mapping[str, float] | None = None,
) -> LearningRate:
    """A learning rate for every progress.

    Args:
        name: "constant", "linear" or "cosine".
        peak_lr: the highest rate, reached when warmup ends.
        min_lr: the rate at the end of the decay.
        warmup: time from zero to `peak_lr`; "%" is a share of `stop_after`; 0 for none.
        stop_after: the whole run.
        expected: the whole run's totals by unit, as estimated before it, e.g. {"steps": 1000,
            "epochs": 3}. Needed only to place a warmup given in another unit than `stop_after`:
            without it the decay runs from the beginning and warmup multiplies it.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in _DECAYS:
        raise ConfigError(f"{name!r} is no learning rate schedule. Use {', '.join(SCHEDULES)}.")
    decay, totals = _DECAYS[name], dict(expected or {})
    warmup = _in_units(warmup, stop_after)
    warm_share = _share(warmup, stop_after, totals)
    one_update = _one_update(warmup, totals)

    def lr_at(progress: Progress) -> float:
        warm = 1.0
        if warmup.amount > 0:
            warm = min(1.0, (warmup.measure(progress) + one_update) / warmup.amount)
        done = 0.0
        if name != "constant" and warm_share < 1.0:
            beyond = stop_after.fraction(progress) - warm_share
            done = min(1.0, max(0.0, beyond) / (1.0 - warm_share))
        return warm * (min_lr + (peak_lr - min_lr) * decay(done))

    return lr_at


def _in_units(warmup: Duration, stop_after: Duration) -> Duration:
    if warmup.unit != "%":
        return warmup
    return Duration(stop_after.amount * warmup.amount / 100.0, stop_after.unit)


def _share(warmup: Duration, stop_after: Duration, totals: Mapping[str, float]) -> float:
    whole = stop_after.amount if warmup.unit == stop_after.unit else totals.get(warmup.unit, 0.0)
    return min(1.0, warmup.amount / whole) if whole > 0 else 0.0


def _one_update(warmup: Duration, totals: Mapping[str, float]) -> float:
    """An update in warmup's unit, so that the first update already learns; 0 when unknown."""
    if warmup.unit == "steps":
        return 1.0
    if totals.get("steps", 0.0) > 0:
        return totals.get(warmup.unit, 0.0) / totals["steps"]
    return 0.0
