"""Learning rate schedules: functions of progress, without a state.

Let f be the fraction of `stop_after` before the update and w the fraction that is warmup. Let m be
the progress in the unit of warmup, and u one update in that unit:

    warm = min(1, (m + u) / warmup)
    d    = min(1, max(0, f - w) / (1 - w))
    lr   = warm * (min_lr + (peak_lr - min_lr) * decay)

The decay by schedule:

- constant: 1.
- linear: 1 - d.
- cosine: (1 + cos(pi d)) / 2 (Loshchilov & Hutter 2017, arXiv 1608.03983, eq. 5).
- cosine_restarts: (1 + cos(pi t_cur / t_i)) / 2, with the time t_cur since the last restart and the
  length t_i of the current cycle. At each restart the length grows by a factor.
- inverse_sqrt: sqrt(warmup / max(warmup, m)), with a warmup of at least one update (Vaswani et al.
  2017, eq. 3, scaled to start at the peak).
- wsd: 1 until the cooldown, which is the last part of the run, then linear to 0 (Hu et al. 2024,
  arXiv 2404.06395, section 4.1). The linear cooldown is from Hägele et al. 2024 (arXiv 2405.18392).

A run that is shorter than its warmup does not decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from toque.config.schema import OptimConfig
from toque.config.schema_methods import CyclesConfig
from toque.errors import ConfigError
from toque.units import Duration, Progress

LearningRate = Callable[[Progress], float]
_Decay = Callable[[Progress], float]
"""Function from progress to the decay factor, from 1 (peak) to 0 (`min_lr`), without warmup.
"""


def make_schedule(
    optim: OptimConfig,
    stop_after: Duration,
    expected: Mapping[str, float] | None = None,
) -> LearningRate:
    """Build the function from progress to learning rate.

    Args:
        optim: Schedule, peak, warmup and cooldown.
        stop_after: Length of the run.
        expected: Known totals of the run by unit, e.g. {"steps": 1000, "epochs": 3}. They convert
            settings in another unit than `stop_after`. If the warmup's fraction of the run is
            unknown, the decay starts at the first update and is multiplied by the warmup.

    Raises:
        ConfigError: The start of the cooldown is unknown, or the run ends before its warmup.
    """
    length = stop_after.in_minutes()
    totals = {**(expected or {}), length.unit: length.amount}
    warmup = _resolve_percent(optim.warmup.in_minutes(), length)
    one_update = _one_update(warmup, totals)
    decay = _make_decay(optim, warmup, length, totals)

    def lr_at(progress: Progress) -> float:
        warm = 1.0
        if warmup.amount > 0:
            warm = min(1.0, (warmup.measure(progress) + one_update) / warmup.amount)
        return warm * (optim.min_lr + (optim.peak_lr - optim.min_lr) * decay(progress))

    return lr_at


def _make_decay(
    optim: OptimConfig, warmup: Duration, length: Duration, totals: Mapping[str, float]
) -> _Decay:
    """Build the decay of a schedule. Raises the same errors as `make_schedule`."""
    warm_share = _warmup_share(optim, warmup, length, totals)

    def share_since_warmup(progress: Progress) -> float:
        if warm_share >= 1.0:
            return 0.0
        since_warmup = max(0.0, length.fraction(progress) - warm_share)
        return min(1.0, since_warmup / (1.0 - warm_share))

    match optim.schedule:
        case "constant":
            return lambda _progress: 1.0
        case "linear":
            return lambda progress: 1.0 - share_since_warmup(progress)
        case "cosine":
            return lambda progress: _half_cosine(share_since_warmup(progress))
        case "cosine_restarts":
            return _make_restarts(optim, warmup, length, totals)
        case "inverse_sqrt":
            return partial(_inverse_sqrt, warmup)
        case "wsd":
            cooldown_share = _cooldown_share(optim, length, totals, warm_share)

            def decay(progress: Progress) -> float:
                share_left = max(0.0, 1.0 - length.fraction(progress))
                return min(1.0, share_left / cooldown_share)

            return decay


def _half_cosine(share: float) -> float:
    """Decay from 1 to 0 while `share` grows from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * share))


def _inverse_sqrt(warmup: Duration, progress: Progress) -> float:
    elapsed = warmup.measure(progress)
    mean_update = elapsed / max(1, progress.step)
    warm_until = max(warmup.amount, mean_update)
    return math.sqrt(warm_until / elapsed) if elapsed > warm_until else 1.0


def _make_restarts(
    optim: OptimConfig, warmup: Duration, length: Duration, totals: Mapping[str, float]
) -> _Decay:
    """Build the decay of cosine_restarts. The first cycle begins after warmup."""
    cycles = optim.cycles or CyclesConfig()
    first = _resolve_percent(cycles.first, length).in_minutes()
    began = warmup.amount
    if warmup.unit != first.unit:
        began = _share_of_run(warmup, totals) * totals.get(first.unit, 0.0)

    def decay(progress: Progress) -> float:
        elapsed = max(0.0, first.measure(progress) - began)
        since_restart, cycle = cycle_at(elapsed, first.amount, cycles.growth)
        return _half_cosine(since_restart / cycle)

    return decay


def cycle_at(elapsed: float, first: float, growth: int) -> tuple[float, float]:
    """Return the time since the last restart and the length of the current cycle.

    >>> cycle_at(2500.0, 1000.0, 2)
    (1500.0, 2000.0)
    """
    if growth == 1:
        return elapsed % first, first
    began, length = 0.0, first
    while elapsed - began >= length:
        began += length
        length *= growth
    return elapsed - began, length


def _warmup_share(
    optim: OptimConfig, warmup: Duration, length: Duration, totals: Mapping[str, float]
) -> float:
    """Return the fraction of the run that is warmup, or 0 if it is unknown."""
    share = _share_of_run(warmup, totals)
    # The configuration has already checked settings in equal units.
    if share >= 1.0 and warmup.unit != length.unit:
        raise ConfigError(
            f'optim.warmup is "{optim.warmup}", but the run lasts "{length}" and would end before '
            'its warmup. Use a shorter warmup, e.g. "5 %".'
        )
    return min(1.0, share)


def _one_update(warmup: Duration, totals: Mapping[str, float]) -> float:
    """Return the mean length of an update in the unit of warmup, or 0 if it is unknown.

    Warmup adds this length to the progress, so that the first learning rate is not 0.
    """
    if warmup.unit == "steps":
        return 1.0
    steps = totals.get("steps", 0.0)
    return totals.get(warmup.unit, 0.0) / steps if steps > 0 else 0.0


def _cooldown_share(
    optim: OptimConfig, length: Duration, totals: Mapping[str, float], warm_share: float
) -> float:
    """Return the cooldown of wsd as a fraction of the run, at most the fraction after warmup."""
    cooldown = (optim.cooldown or Duration(20, "%")).in_minutes()
    share = _share_of_run(_resolve_percent(cooldown, length), totals)
    if share == 0.0:
        raise ConfigError(
            f'optim.cooldown is "{cooldown}", but the run lasts "{length}", so the start of the '
            "cooldown is unknown. Set optim.cooldown in the same unit or as a percentage, "
            'e.g. "20 %".'
        )
    if share + warm_share > 1.0 and optim.cooldown is not None:
        raise ConfigError(
            f'optim.cooldown is "{cooldown}" and optim.warmup is "{optim.warmup}", but the run '
            f'lasts only "{length}". Use a shorter cooldown, e.g. "20 %".'
        )
    # If warmup takes the entire run, nothing is left for the decay. 1 avoids a division by zero.
    return min(share, 1.0 - warm_share) or 1.0


def _resolve_percent(part: Duration, length: Duration) -> Duration:
    """Convert a duration in "%" to the unit of the run."""
    if part.unit != "%":
        return part
    return Duration(length.amount * part.amount / 100.0, length.unit)


def _share_of_run(part: Duration, totals: Mapping[str, float]) -> float:
    """Return `part` as a fraction of the run, or 0 if it is unknown."""
    total = totals.get(part.unit, 0.0)
    return part.amount / total if total > 0 else 0.0
