"""State values: what a checkpoint's JSON and tensors must be to belong to this run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from toque.errors import CheckpointError
from toque.training.distributed.data_parallel import is_sharded, local_part

MOST: Final = 1 << 53
"""No count of a run comes near; above it floats no longer tell whole numbers apart."""


def count_in(state: Mapping[str, Any], name: str, *, most: int = MOST) -> int:
    """A whole number from 0 to `most`; KeyError and ValueError as `number_in`."""
    value = state[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{name} is {value!r:.60}, not a whole number from 0 to {most:,}")
    return value


def number_in(state: Mapping[str, Any], name: str, *, least: float = -math.inf) -> float:
    """A finite number of at least `least`; KeyError where it is missing, else ValueError."""
    value = state[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not max(least, -1e300) <= value <= 1e300:
        raise ValueError(f"{name} is {value!r:.60}, not a finite number of at least {least:g}")
    return float(value)


def flag_in(state: Mapping[str, Any], name: str) -> bool:
    """True or false; KeyError and TypeError as `object_in`."""
    value = state[name]
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r:.60}, not true or false")
    return value


def object_in(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object of its own; KeyError where it is missing, else TypeError."""
    value = state[name]
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {value!r:.60}, not an object")
    return value


def impossible_weights(stored: Tensor, own: Tensor) -> str | None:
    """Why no training can have made `stored` of `own`, the same tensor of this run; None if it can.

    An update that is not finite is never applied. And no update makes every number of a tensor
    exactly zero that was not: so it is for tensors that begin at zero (biases, LoRA's B) alone.
    """
    if not stored.is_floating_point():
        return None
    if not all_finite(stored):
        return "holds numbers that are not finite"
    if is_sharded(stored):
        return None  # of a slice zeros may be its share: a padding token's row
    if stored.numel() > 1 and not bool(stored.any()) and bool(own.any()):
        return "is all zero"
    return None


def all_finite(stored: Tensor) -> bool:
    """True if every number is finite; of a DTensor every one on this rank."""
    return bool(torch.isfinite(local_part(stored)).all())


def refuse(wrong: Iterable[str], *, where: str, what: str) -> None:
    """Raise a CheckpointError that names the first few differences, where there are any."""
    found = sorted(wrong)
    if not found:
        return
    shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
    raise CheckpointError(
        f"{where} does not fit {what}: {shown}. It belongs to another model or configuration; "
        "start a new run folder, or restore the configuration it was made with."
    )
