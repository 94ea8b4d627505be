"""Learning rate schedules. They are functions of progress without a state.

Let f be the share of `stop_after` before the update and w the share at which warmup ends. Let m be
the progress in the unit of warmup, and u one update in that unit:

    warm = min(1, (m + u) / warmup)
    d    = min(1, max(0, f - w) / (1 - w))
    lr   = warm * (min_lr + (peak_lr - min_lr) * decay)

The decay by schedule:

- constant: 1.
- linear: 1 - d.
- cosine: (1 + cos(pi d)) / 2 (Loshchilov & Hutter 2017, arXiv 1608.03983, eq. 5).
- cosine_restarts: (1 + cos(pi t_cur / t_i)) / 2, with t_cur since the last restart and t_i the
  length of the cycle. It grows by a factor at each restart.
- inverse_sqrt: sqrt(warmup / max(warmup, m)), with a warmup of at least one update (Vaswani et al.
  2017, eq. 3, scaled to start at the peak).
- wsd: 1 until the cooldown, which is the last part of the run, then linearly to 0 (Hu et al. 2024,
  arXiv 2404.06395, section 4.1). The linear cooldown is by Hagele et al. 2024 (arXiv 2405.18392).

A run that is shorter than its warmup does not decay.
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
    optim: OptimConfig,
    stop_after: Duration,
    expected: Mapping[str, float] | None = None,
) -> LearningRate:
    """Build the function from progress to learning rate.

    Args:
        optim: The settings of the schedule.
        stop_after: The length of the run.
        expected: Known totals of the run by unit, e.g. {"steps": 1000, "epochs": 3}. They convert
            settings in another unit than `stop_after`. Without them the decay starts immediately,
            and warmup multiplies it.

    Raises:
        ConfigError: The start of the cooldown is unknown, or the run ends before its warmup.
    """
    length = stop_after.in_minutes()
    totals = {**(expected or {}), length.unit: length.amount}
    warmup = _resolve_percent(optim.warmup.in_minutes(), length)
    warm_share = _warmup_share(optim, warmup, length, totals)
    one_update = _one_update(warmup, totals)
    cycles = optim.cycles or CyclesConfig()
    first_cycle, first_cycle_began = _first_cycle(cycles, warmup, length, totals)
    cooldown_share = _cooldown_share(optim, length, totals, warm_share)

    def share_since_warmup(progress: Progress) -> float:
        if warm_share >= 1.0:
            return 0.0
        return min(
            1.0, max(0.0, length.fraction(progress) - warm_share) / (1.0 - warm_share)
        )

    def decay(progress: Progress) -> float:
        match optim.schedule:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - share_since_warmup(progress)
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * share_since_warmup(progress)))
            case "cosine_restarts":
                elapsed = max(0.0, first_cycle.measure(progress) - first_cycle_began)
                since, cycle_length = cycle_at(
                    elapsed, first_cycle.amount, cycles.growth
                )
                return 0.5 * (1.0 + math.cos(math.pi * (since / cycle_length)))
            case "inverse_sqrt":
                elapsed = warmup.measure(progress)
                warm_until = max(warmup.amount, elapsed / max(1, progress.step))
                return math.sqrt(warm_until / elapsed) if elapsed > warm_until else 1.0
            case "wsd":
                return min(
                    1.0, max(0.0, 1.0 - length.fraction(progress)) / cooldown_share
                )

    def lr_at(progress: Progress) -> float:
        warm = 1.0
        if warmup.amount > 0:
            warm = min(1.0, (warmup.measure(progress) + one_update) / warmup.amount)
        return warm * (optim.min_lr + (optim.peak_lr - optim.min_lr) * decay(progress))

    return lr_at


def cycle_at(elapsed: float, first: float, growth: int) -> tuple[float, float]:
    """Return the time since the last restart and the length of the current cycle.

    >>> cycle_at(2500.0, 1000.0, 2)
    (1500.0, 2000.0)
    """
    if growth == 1:
        return elapsed % first, first
    # The lengths of the n previous cycles are a geometric series.
    n = int(math.log(elapsed * (growth - 1) / first + 1.0, growth))
    length = first * float(growth) ** n
    began = first * (float(growth) ** n - 1.0) / (growth - 1)
    # The logarithm of an exact power may be rounded down or up.
    if elapsed - began >= length:
        began += length
        length *= growth
    elif elapsed < began:
        length /= growth
        began -= length
    return elapsed - began, length


def _warmup_share(
    optim: OptimConfig, warmup: Duration, length: Duration, totals: Mapping[str, float]
) -> float:
    share = _share_of_run(warmup, totals)
    if (
        share >= 1.0 and warmup.unit != length.unit
    ):  # the configuration checks equal units
        raise ConfigError(
            f'optim.warmup is "{optim.warmup}", but the run lasts "{length}" and would end before '
            'its warmup. Use a shorter warmup, e.g. "5 %".'
        )
    return min(1.0, share)


def _one_update(warmup: Duration, totals: Mapping[str, float]) -> float:
    """Return the length of an update in the unit of warmup, or 0 if it is unknown.

    It is added to the progress, so that the learning rate of the first update is not 0.
    """
    if warmup.unit == "steps":
        return 1.0
    steps = totals.get("steps", 0.0)
    return totals.get(warmup.unit, 0.0) / steps if steps > 0 else 0.0


def _first_cycle(
    cycles: CyclesConfig,
    warmup: Duration,
    length: Duration,
    totals: Mapping[str, float],
) -> tuple[Duration, float]:
    """Return the length of the first cycle and its start in the same unit, or 0 if unknown."""
    first_cycle = _resolve_percent(cycles.first, length).in_minutes()
    if warmup.unit == first_cycle.unit:
        return first_cycle, warmup.amount
    return first_cycle, _share_of_run(warmup, totals) * totals.get(
        first_cycle.unit, 0.0
    )


def _cooldown_share(
    optim: OptimConfig, length: Duration, totals: Mapping[str, float], warm_share: float
) -> float:
    if optim.schedule != "wsd":
        return 1.0
    cooldown = (optim.cooldown or Duration(20, "%")).in_minutes()
    share = _share_of_run(_resolve_percent(cooldown, length), totals)
    if share == 0.0:
        raise ConfigError(
            f'optim.cooldown is "{cooldown}", but the run lasts "{length}", so the start of the '
            'cooldown is unknown. Set optim.cooldown in the same unit or as a share, e.g. "20 %".'
        )
    if share + warm_share > 1.0 and optim.cooldown is not None:
        raise ConfigError(
            f'optim.cooldown is "{cooldown}" and optim.warmup is "{optim.warmup}", but the run '
            f'lasts only "{length}". Use a shorter cooldown, e.g. "20 %".'
        )
    return min(share, 1.0 - warm_share) or 1.0


def _resolve_percent(part: Duration, length: Duration) -> Duration:
    if part.unit != "%":
        return part
    return Duration(length.amount * part.amount / 100.0, length.unit)


def _share_of_run(part: Duration, totals: Mapping[str, float]) -> float:
    """Return `part` as a share of the run, or 0 if it is unknown."""
    total = totals.get(part.unit, 0.0)
    return part.amount / total if total > 0 else 0.0
