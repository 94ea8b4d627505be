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
    inverse_sqrt     sqrt(warmup / max(warmup, m)), the warmup of an update or more
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

from toque.config.schema import OptimConfig
from toque.config.schema_methods import CyclesConfig
from toque.errors import ConfigError
from toque.units import Duration, Progress

LearningRate = Callable[[Progress], float]


def make_schedule(
    optim: OptimConfig, stop_after: Duration, expected: Mapping[str, float] | None = None
) -> LearningRate:
    """A learning rate for every progress.

    Raises a ConfigError where the cooldown cannot be placed, or the run ends before its warmup.

    `expected` holds the whole run's totals by unit, e.g. {"steps": 1000, "epochs": 3}, to place
    what is given in another unit than `stop_after`: without it the decay runs from the beginning
    and warmup multiplies it.
    """
    totals, whole = dict(expected or {}), stop_after.in_minutes()
    warmup = _in_units(optim.warmup.in_minutes(), whole)
    warm_share = _warm_share(optim, warmup, whole, totals)
    one_update = _one_update(warmup, totals)

    def since_warmup(progress: Progress) -> float:  # the share that is done, in [0, 1]
        if warm_share >= 1.0:
            return 0.0
        return min(1.0, max(0.0, whole.fraction(progress) - warm_share) / (1.0 - warm_share))

    cycles = optim.cycles or CyclesConfig()
    first, first_began = _first_cycle(cycles, warmup, whole, totals)
    cooling = _cooling_share(optim, whole, totals, warm_share) if optim.schedule == "wsd" else 1.0

    def decay(progress: Progress) -> float:
        match optim.schedule:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - since_warmup(progress)
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * since_warmup(progress)))
            case "cosine_restarts":
                elapsed = max(0.0, first.measure(progress) - first_began)
                since, length = cycle_at(elapsed, first.amount, cycles.growth)
                return 0.5 * (1.0 + math.cos(math.pi * (since / length)))
            case "inverse_sqrt":
                elapsed = warmup.measure(progress)
                began = max(warmup.amount, elapsed / max(1, progress.step))  # an update or more
                return math.sqrt(began / elapsed) if elapsed > began else 1.0
            case "wsd":
                return min(1.0, max(0.0, 1.0 - whole.fraction(progress)) / cooling)

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


def _warm_share(
    optim: OptimConfig, warmup: Duration, whole: Duration, totals: Mapping[str, float]
) -> float:
    share = _share(warmup, whole, totals)
    if share >= 1.0 and warmup.unit != whole.unit:  # in the same unit the configuration says it
        raise ConfigError(
            f'optim.warmup is "{optim.warmup}" and the run lasts "{whole}", so it would end before '
            'its learning rate is reached. Warm up for less, e.g. "5 %".'
        )
    return min(1.0, share)


def _one_update(warmup: Duration, totals: Mapping[str, float]) -> float:
    """An update in warmup's unit, so that the first update already learns; 0 when unknown."""
    if warmup.unit == "steps":
        return 1.0
    steps = totals.get("steps", 0.0)
    return totals.get(warmup.unit, 0.0) / steps if steps > 0 else 0.0


def _first_cycle(
    cycles: CyclesConfig, warmup: Duration, whole: Duration, totals: Mapping[str, float]
) -> tuple[Duration, float]:
    """The first cycle's length, and where it begins in its unit; 0 where that cannot be told."""
    first = _in_units(cycles.first, whole).in_minutes()
    if warmup.unit == first.unit:
        return first, warmup.amount
    mine, theirs = totals.get(warmup.unit, 0.0), totals.get(first.unit, 0.0)
    return first, warmup.amount / mine * theirs if mine > 0 else 0.0


def _cooling_share(
    optim: OptimConfig, whole: Duration, totals: Mapping[str, float], warm_share: float
) -> float:
    cooldown = (optim.cooldown or Duration(20, "%")).in_minutes()
    share = _share(_in_units(cooldown, whole), whole, totals)
    if share == 0.0:
        raise ConfigError(
            f'optim.cooldown is "{cooldown}" and the run lasts "{whole}", so when it begins '
            'cannot be said. Give it in the same unit or as a share, e.g. "20 %".'
        )
    if share + warm_share > 1.0 and optim.cooldown is not None:
        raise ConfigError(
            f'optim.cooldown is "{cooldown}", optim.warmup "{optim.warmup}" and the run lasts '
            f'"{whole}", less than both together. Cool down for less, e.g. "20 %".'
        )
    return min(share, 1.0 - warm_share) or 1.0


def _in_units(part: Duration, whole: Duration) -> Duration:
    return Duration(whole.amount * part.amount / 100.0, whole.unit) if part.unit == "%" else part


def _share(part: Duration, whole: Duration, totals: Mapping[str, float]) -> float:
    """How much of the whole a part is; 0 where that cannot be told."""
    amount = whole.amount if part.unit == whole.unit else totals.get(part.unit, 0.0)
    return part.amount / amount if amount > 0 else 0.0
