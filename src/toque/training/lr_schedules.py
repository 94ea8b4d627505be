"""Learning rate schedules: functions of progress, with nothing to step and nothing to save.

With f = the share of `stop_after` that is done before the update, w = the share at which warmup
ends, both in [0, 1], and m = progress in warmup's unit:

    warm = min(1, (m + u) / warmup)         u = one update in that unit
    d    = min(1, max(0, f - w) / (1 - w))
    lr   = warm * (min_lr + (peak_lr - min_lr) * decay)

and decay by name:

    constant         1
    linear           1 - d
    cosine           (1 + cos(pi d)) / 2
    cosine_restarts  (1 + cos(pi t_cur / t_i)) / 2, t_cur since the last restart, t_i the cycle's
                     length, which grows by a factor at each restart
    inverse_sqrt     sqrt(warmup / max(warmup, m))
    wsd              1 until the cooldown, the last share c of the run, then falling linearly to 0

In steps these are the textbook's: peak * (step + 1) / warmup, then the decay over
(step - warmup) / (total - warmup), ending at min_lr. Cosine and restarts: Loshchilov & Hutter 2017
(arXiv 1608.03983), eq. 5; inverse square root: Vaswani et al. 2017, eq. 3, scaled so that it begins
at the peak; warmup-stable-decay: Hu et al. 2024 (arXiv 2404.06395), section 4.1, with the linear
cooldown of Hagele et al. 2024 (arXiv 2405.18392). A run shorter than its warmup never decays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from toque.config.schema import OptimConfig
from toque.config.schema_methods import CyclesConfig
from toque.errors import ConfigError
from toque.units import Duration, Progress

LearningRate = Callable[[Progress], float]


@dataclass(frozen=True)
class _Run:
    """Constants of a run that a decay depends on."""

    warmup: Duration
    stop_after: Duration
    warm_share: float
    totals: Mapping[str, float]

    def since_warmup(self, progress: Progress) -> float:
        """Share of what comes after warmup that is done, in [0, 1]."""
        if self.warm_share >= 1.0:
            return 0.0
        beyond = self.stop_after.fraction(progress) - self.warm_share
        return min(1.0, max(0.0, beyond) / (1.0 - self.warm_share))


def make_schedule(
    optim: OptimConfig, stop_after: Duration, expected: Mapping[str, float] | None = None
) -> LearningRate:
    """A learning rate for every progress.

    Args:
        optim: names the schedule, its rates and its durations.
        stop_after: the whole run.
        expected: the whole run's totals by unit, as estimated before it, e.g. {"steps": 1000,
            "epochs": 3}. Needed only to place what is given in another unit than `stop_after`:
            without it the decay runs from the beginning and warmup multiplies it.

    Raises:
        ConfigError: the cooldown cannot be placed.
    """
    totals, stop_after = dict(expected or {}), stop_after.in_minutes()
    warmup = _in_units(optim.warmup.in_minutes(), stop_after)
    run = _Run(warmup, stop_after, _share(warmup, stop_after, totals), totals)
    decay, one_update = _decay(optim, run), _one_update(warmup, totals)

    def lr_at(progress: Progress) -> float:
        warm = 1.0
        if warmup.amount > 0:
            warm = min(1.0, (warmup.measure(progress) + one_update) / warmup.amount)
        return warm * (optim.min_lr + (optim.peak_lr - optim.min_lr) * decay(progress))

    return lr_at


def cycle_at(elapsed: float, first: float, growth: int) -> tuple[float, float]:
    """Time since the last restart, and the length of the cycle it lies in.

    >>> cycle_at(2500.0, 1000.0, 2)
    (1500.0, 2000.0)
    """
    if growth == 1:
        return elapsed % first, first
    # Cycles before it: the largest n with first * (growth^n - 1) / (growth - 1) <= elapsed.
    n = int(math.log(elapsed * (growth - 1) / first + 1.0, growth))
    length = first * float(growth) ** n
    began = first * (float(growth) ** n - 1.0) / (growth - 1)
    if elapsed - began >= length:  # the logarithm of a whole power came out a hair too small
        began, length = began + length, length * growth
    elif elapsed < began:  # or too large
        length /= growth
        began -= length
    return elapsed - began, length


def _decay(optim: OptimConfig, run: _Run) -> LearningRate:
    match optim.schedule:
        case "constant":
            return lambda _p: 1.0
        case "linear":
            return lambda p: 1.0 - run.since_warmup(p)
        case "cosine":
            return lambda p: _half_wave(run.since_warmup(p))
        case "cosine_restarts":
            return _restarting(run, optim.cycles or CyclesConfig())
        case "inverse_sqrt":
            return lambda p: math.sqrt(
                max(run.warmup.amount, 1.0) / max(run.warmup.amount, 1.0, run.warmup.measure(p))
            )
        case "wsd":
            return _cooling(run, (optim.cooldown or Duration(20, "%")).in_minutes())


def _half_wave(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


def _restarting(run: _Run, cycles: CyclesConfig) -> LearningRate:
    first = _in_units(cycles.first, run.stop_after).in_minutes()
    began = _converted(run.warmup, first, run.totals)

    def decay(progress: Progress) -> float:
        elapsed = max(0.0, first.measure(progress) - began)
        since, length = cycle_at(elapsed, first.amount, cycles.growth)
        return _half_wave(since / length)

    return decay


def _cooling(run: _Run, cooldown: Duration) -> LearningRate:
    share = _share(_in_units(cooldown, run.stop_after), run.stop_after, run.totals)
    if not 0.0 < share <= 1.0:
        raise ConfigError(
            f'optim.cooldown is "{cooldown}" and the run lasts "{run.stop_after}", so when it '
            'begins cannot be said. Give it in the same unit or as a share, e.g. "20 %".'
        )
    share = min(share, 1.0 - run.warm_share) or 1.0
    return lambda p: min(1.0, max(0.0, 1.0 - run.stop_after.fraction(p)) / share)


def _converted(warmup: Duration, into: Duration, totals: Mapping[str, float]) -> float:
    """`warmup` in the unit of `into`; 0 where the two cannot be compared."""
    if warmup.unit == into.unit:
        return warmup.amount
    mine, theirs = totals.get(warmup.unit, 0.0), totals.get(into.unit, 0.0)
    return warmup.amount / mine * theirs if mine > 0 else 0.0


def _in_units(part: Duration, stop_after: Duration) -> Duration:
    if part.unit != "%":
        return part
    return Duration(stop_after.amount * part.amount / 100.0, stop_after.unit)


def _share(part: Duration, stop_after: Duration, totals: Mapping[str, float]) -> float:
    whole = stop_after.amount if part.unit == stop_after.unit else totals.get(part.unit, 0.0)
    return min(1.0, part.amount / whole) if whole > 0 else 0.0


def _one_update(warmup: Duration, totals: Mapping[str, float]) -> float:
    """An update in warmup's unit, so that the first update already learns; 0 when unknown."""
    if warmup.unit == "steps":
        return 1.0
    if totals.get("steps", 0.0) > 0:
        return totals.get(warmup.unit, 0.0) / totals["steps"]
    return 0.0
