"""Longer run: the cases in which a run may continue past the length that it was begun with."""

from __future__ import annotations

from typing import Final

from toque.config.cross_checks import share_of
from toque.config.schema import RunConfig
from toque.units import Duration, Progress

_ANY_LENGTH: Final = ("constant", "inverse_sqrt", "cosine_restarts")
"""Schedules whose rate does not depend on the length of the run."""
_COOLDOWN: Final = Duration(20, "%")


def lengthened(old: RunConfig, new: RunConfig, at: Progress) -> str | None:
    """Sentence about continuing to another `train.stop_after`; None where that is not allowed.

    A run that came to its end can continue under every schedule. One that did not can be made
    longer where all it did so far is what the longer run would have done.

    Args:
        old: what the run was begun with.
        new: the same, apart from its length.
        at: where the run is.
    """
    then, now = old.train.stop_after, new.train.stop_after
    if then == now or now.reached(at):
        return None
    if new.curriculum is not None and len(new.curriculum.stages) > 1:
        return None  # stages that are over would begin or end elsewhere
    ended, schedule = then.reached(at), new.optim.schedule
    further = then.unit == now.unit and now.amount > then.amount
    if not ended and not (further and _alike_so_far(new, then, at)):
        return None
    said = f"this run was to last {then} and is at step {at.step:,}: it goes on to {now}"
    if schedule in _ANY_LENGTH or not ended:
        return f"{said}."
    if schedule == "wsd":
        return (
            f"{said}. optim.schedule=wsd has cooled down: the rate is at its peak again from here, "
            f"and cools down before {now}."
        )
    return (
        f"{said}. optim.schedule={schedule} had taken the rate down to its end: from here it is "
        f"what it is at this point of a run of {now}, which is higher."
    )


def _alike_so_far(config: RunConfig, then: Duration, at: Progress) -> bool:
    """True where nothing that was done up to `at` depends on the length of the run."""
    optim = config.optim
    shares = [optim.warmup if optim.warmup.amount else None]
    shares += [optim.cycles.first] if optim.cycles is not None else []
    shares += [optim.averaging.every] if optim.averaging is not None else []
    if any(part is not None and part.unit == "%" for part in shares):
        return False
    if optim.schedule != "wsd":
        return optim.schedule in _ANY_LENGTH
    cooldown = share_of(optim.cooldown or _COOLDOWN, then)
    return cooldown is not None and then.fraction(at) <= 1.0 - cooldown
