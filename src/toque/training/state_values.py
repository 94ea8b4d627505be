"""Checks of the values in a checkpoint's JSON and tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from toque.errors import CheckpointError
from toque.training.distributed.data_parallel import is_sharded, local_part

_Kind = TypeVar("_Kind")
MAX_COUNT: Final = 1 << 53
"""Largest allowed count. A float represents every whole number up to it exactly."""
_MAX_MAGNITUDE: Final = 1e300
"""Largest allowed number. Conversions of much larger whole numbers to float overflow."""
_MAX_DIFFERENCES: Final = 5
"""Maximum number of differences in a message."""


def count_in(state: Mapping[str, Any], name: str, *, maximum: int = MAX_COUNT) -> int:
    """Return the whole number stored under `name`, from 0 to `maximum`.

    Raises:
        KeyError: The value is missing.
        ValueError: The value is anything else.
    """
    value = state[name]
    # bool is a subclass of int, so compare the type itself.
    if type(value) is not int or not 0 <= value <= maximum:
        raise ValueError(
            f"{name} is {value!r:.60}, not a whole number from 0 to {maximum:,}"
        )
    return value


def number_in(
    state: Mapping[str, Any], name: str, *, least: float = -math.inf
) -> float:
    """Return the number stored under `name`, which must be finite and at least `least`.

    Raises:
        KeyError: The value is missing.
        ValueError: The value is anything else.
    """
    value = state[name]
    least_allowed = max(least, -_MAX_MAGNITUDE)
    # bool is a subclass of int. The comparison is also false for NaN.
    is_number = type(value) in (int, float)
    if not is_number or not least_allowed <= value <= _MAX_MAGNITUDE:
        raise ValueError(
            f"{name} is {value!r:.60}, not a finite number of at least {least:g}"
        )
    return float(value)


def optional_number_in(state: Mapping[str, Any], name: str) -> float | None:
    """Return the finite number stored under `name`, or None if it is null.

    Raises the same errors as `number_in`.
    """
    return None if state[name] is None else number_in(state, name)


def flag_in(state: Mapping[str, Any], name: str) -> bool:
    """Return the boolean stored under `name`.

    Raises:
        KeyError: The value is missing.
        TypeError: The value is not a boolean.
    """
    return _typed_value(state, name, bool, "true or false")


def object_in(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the JSON object stored under `name`.

    Raises:
        KeyError: The value is missing.
        TypeError: The value is not an object.
    """
    return _typed_value(state, name, dict, "an object")


def _typed_value(
    state: Mapping[str, Any], name: str, kind: type[_Kind], description: str
) -> _Kind:
    value = state[name]
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r:.60}, not {description}")
    return value


def find_impossible_weights(stored: Tensor, initial: Tensor) -> str | None:
    """Describe why training from `initial` cannot result in the weights `stored`, if so.

    An update that is not finite is never applied. An update never makes a whole tensor zero, so
    only tensors that are zero initially (biases, LoRA's B) may be zero.
    """
    if not stored.is_floating_point():
        return None
    if not all_finite(stored):
        return "has numbers that are not finite"
    if is_sharded(stored):
        return None  # a rank's part may be the zero row of a padding token
    if stored.numel() > 1 and not bool(stored.any()) and bool(initial.any()):
        return "is all zero"
    return None


def all_finite(tensor: Tensor) -> bool:
    """Check that all values of `tensor`, or of this rank's part if it is sharded, are finite."""
    return bool(torch.isfinite(local_part(tensor)).all())


def refuse_differences(differences: Iterable[str], *, where: str, what: str) -> None:
    """Raise a CheckpointError that lists the first differences, if there are any.

    Args:
        differences: Descriptions of the differences.
        where: The checkpoint, for the message.
        what: The part of the run that it should fit, for the message.
    """
    lines = sorted(differences)
    if not lines:
        return
    text = "; ".join(lines[:_MAX_DIFFERENCES])
    n_more = len(lines) - _MAX_DIFFERENCES
    if n_more > 0:
        text += f"; and {n_more} more"
    raise CheckpointError(
        f"{where} does not fit {what}: {text}. It belongs to another model or configuration. "
        "Start a new run folder, or restore the configuration of the checkpoint."
    )
