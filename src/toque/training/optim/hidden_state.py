"""Hidden state of an optimizer: attributes that checkpoints do not store."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

Facts = dict[str, Any]
"""Numbers, strings and tensors of a state, by path, e.g. "schedule.steps" or
"param_groups[0]['k']".
"""
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_SAVED: Final = ("state", "param_groups", "defaults")
GENERATORS: Final[Mapping[str, Callable[[], Any]]] = {
    "random": random.getstate,
    "numpy.random": lambda: repr(np.random.get_state()),  # noqa: NPY002
}
"""Random number generators that checkpoints do not store."""


def hidden_state(optimizer: torch.optim.Optimizer) -> Facts:
    """Collect the state of an optimizer that checkpoints do not store.

    It includes nested objects, class attributes, and the generators of Python and NumPy.
    """
    facts: Facts = {name: read_state() for name, read_state in GENERATORS.items()}
    visited: set[int] = {id(optimizer)}
    for name, value in vars(optimizer).items():
        if name not in _SAVED:
            _walk(name, value, facts, visited)

    # State under another key than a parameter is not saved.
    state: Mapping[Any, Any] = optimizer.state
    for key, value in state.items():
        if not isinstance(key, Tensor):
            _walk(f"state[{key!r}]", value, facts, visited)
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", "lr"):
                _walk(f"param_groups[{number}][{key!r}]", value, facts, visited)

    for cls in type(optimizer).__mro__:
        package = cls.__module__.partition(".")[0]
        if package in ("torch", "builtins"):
            continue
        for name, value in vars(cls).items():
            if not name.startswith("__"):
                _walk(f"{cls.__name__}.{name}", value, facts, visited)
    return facts


def first_difference(left: Facts, right: Facts) -> str | None:
    """Return the path of the first fact that differs, if there is one."""
    for name in [*left, *(right.keys() - left.keys())]:
        is_in_both = name in left and name in right
        if not is_in_both or not _is_equal(left[name], right[name]):
            return name
    return None


def _walk(name: str, value: Any, facts: Facts, visited: set[int]) -> None:
    """Add `value` and its nested objects to `facts`. Each object is visited only once."""
    if isinstance(value, _PLAIN):
        facts[name] = value
        return
    if isinstance(value, nn.Parameter) or id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, Tensor):
        facts[name] = value.detach().clone()
    elif isinstance(value, np.ndarray | np.generic):
        facts[name] = repr(value.tolist())
    elif isinstance(value, torch.Generator):
        facts[name] = value.get_state()
    elif isinstance(value, random.Random):
        facts[name] = value.getstate()
    elif isinstance(value, np.random.Generator):
        facts[name] = repr(value.bit_generator.state)
    elif not isinstance(value, ModuleType | type):
        for suffix, part in _iterate_parts(value):
            _walk(f"{name}{suffix}", part, facts, visited)


def _iterate_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object with the suffixes of their paths."""
    if isinstance(value, Mapping):
        yield ".length", len(value)
        for number, (key, item) in enumerate(value.items()):
            # Each run has other parameter objects, but in the same order.
            label = number if isinstance(key, Tensor) else repr(key)
            yield f"[{label}]", item
    elif isinstance(value, set | frozenset):
        yield ".length", len(value)  # the items have no reproducible order
    elif isinstance(value, list | tuple | deque):
        yield ".length", len(value)
        for number, item in enumerate(value):
            yield f"[{number}]", item
    elif isinstance(value, MethodType):
        yield "", value.__self__
    elif isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        for variable, cell in zip(value.__code__.co_freevars, cells, strict=False):
            yield f" ({variable})", cell.cell_contents
    else:
        names = list(getattr(value, "__dict__", {}))
        for cls in type(value).__mro__:
            names.extend(getattr(cls, "__slots__", ()))
        for name in names:
            yield f".{name}", getattr(value, name, None)


def _is_equal(left: Any, right: Any) -> bool:
    """Check whether two facts are equal. NaN equals NaN."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        return torch.equal(left.nan_to_num(), right.nan_to_num())
    if type(left) is not type(right):
        return False
    are_nan = left != left and right != right  # noqa: PLR0124
    return bool(left == right or are_nan)
