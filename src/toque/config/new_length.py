"""Continuation of a run with a new length, `train.stop_after`."""

from __future__ import annotations

from toque.config.cross_checks import share_of
from toque.config.schema import RunConfig
from toque.units import Duration, Progress

_ANY_LENGTH = ("constant", "inverse_sqrt", "cosine_restarts")
"""Schedules that do not depend on the length of the run."""
_COOLDOWN = Duration(20, "%")
"""Default of `optim.cooldown`."""


def can_change_length(
    old: RunConfig, new: RunConfig, progress: Progress, *, total_seconds: float = 0.0
) -> bool:
    """Return whether a run can continue with a new `train.stop_after`.

    A run that has reached its old length can continue with every schedule. Another run can only
    continue if its updates so far equal the updates of the longer run.

    Args:
        old: Configuration of the run.
        new: Same configuration with another length.
        progress: Progress of the run.
        total_seconds: Time of the entire command so far, which `progress` does not include.
    """
    old_length, new_length = old.train.stop_after, new.train.stop_after
    if old_length == new_length or new_length.reached(progress):
        return False
    if new_length.total and (new_length.seconds or 0.0) <= total_seconds:
        return False
    if new.curriculum is not None and len(new.curriculum.stages) > 1:
        return False  # the bounds of earlier stages would move
    if _has_reached(old_length, progress, total_seconds):
        return True
    has_same_unit = old_length.unit == new_length.unit
    is_longer = has_same_unit and new_length.amount > old_length.amount
    return is_longer and _is_independent_of_length(new, old_length, progress)


def describe_new_length(
    old: RunConfig, new: RunConfig, progress: Progress, *, total_seconds: float = 0.0
) -> str:
    """Describe how a run continues with a new length. See `can_change_length`."""
    old_length, new_length = old.train.stop_after, new.train.stop_after
    schedule = new.optim.schedule
    description = (
        f"this run was planned for {old_length} and is at step {progress.step:,}: it continues to "
        f"{new_length}"
    )
    has_ended = _has_reached(old_length, progress, total_seconds)
    if schedule in _ANY_LENGTH or not has_ended:
        return f"{description}."
    if schedule == "wsd":
        return (
            f"{description}. The learning rate has cooled down (optim.schedule=wsd). It returns to "
            f"its peak, and cools down again before {new_length}."
        )
    return (
        f"{description}. The learning rate has reached its minimum (optim.schedule={schedule}). It "
        f"rises to its value at this point of a run of {new_length}."
    )


def _has_reached(length: Duration, progress: Progress, total_seconds: float) -> bool:
    """Return whether a run has reached its length, which may limit the entire command."""
    if length.total:
        return total_seconds >= (length.seconds or 0.0)
    return length.reached(progress)


def _is_independent_of_length(
    config: RunConfig, length: Duration, progress: Progress
) -> bool:
    """Return whether the schedule up to `progress` is the same for a run longer than `length`."""
    optim = config.optim
    if optim.warmup.amount and optim.warmup.unit == "%":
        return False
    if optim.cycles is not None and optim.cycles.first.unit == "%":
        return False
    if optim.schedule != "wsd":
        return optim.schedule in _ANY_LENGTH
    cooldown = share_of(optim.cooldown or _COOLDOWN, length)
    return cooldown is not None and length.fraction(progress) <= 1.0 - cooldown
