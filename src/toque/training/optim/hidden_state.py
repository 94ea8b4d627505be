"""Attributes of an optimizer that checkpoints do not store, to detect hidden state."""

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
"""Numbers, texts and tensors by their path, such as "optimizer.steps" or "param_groups[0]['k']"."""
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
        if cls.__module__.partition(".")[0] not in ("torch", "builtins"):
            for name, value in vars(cls).items():
                if not name.startswith("__"):
                    _walk(f"{cls.__name__}.{name}", value, facts, visited)
    return facts


def first_difference(left: Facts, right: Facts) -> str | None:
    """Return the path of the first difference, if there is one."""
    for name in [*left, *(right.keys() - left.keys())]:
        if (
            name not in left
            or name not in right
            or not _is_equal(left[name], right[name])
        ):
            return name
    return None


def _walk(name: str, value: Any, facts: Facts, visited: set[int]) -> None:
    """Add the facts of `value` and its nested objects. An object is visited once."""
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
        for part, inner in _parts(value):
            _walk(f"{name}{part}", inner, facts, visited)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object with their paths from it."""
    if isinstance(value, Mapping):
        yield ".length", len(value)
        for number, (key, inner) in enumerate(value.items()):
            # Each run has other parameter objects, but in the same order.
            yield f"[{number if isinstance(key, Tensor) else repr(key)}]", inner
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield ".length", len(value)
        if not isinstance(value, set | frozenset):
            yield from ((f"[{number}]", inner) for number, inner in enumerate(value))
    elif isinstance(value, MethodType):
        yield "", value.__self__
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        yield from ((f" ({key})", cell.cell_contents) for key, cell in cells)
    else:
        slots = [
            n for cls in type(value).__mro__ for n in getattr(cls, "__slots__", ())
        ]
        names = [*getattr(value, "__dict__", {}), *slots]
        yield from ((f".{key}", getattr(value, key, None)) for key in names)


def _is_equal(left: Any, right: Any) -> bool:
    """Compare two facts. NaN equals NaN."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        return torch.equal(left.nan_to_num(), right.nan_to_num())
    return type(left) is type(right) and (
        left == right or (left != left and right != right)  # noqa: PLR0124
    )
