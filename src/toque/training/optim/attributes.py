"""Attributes of an optimizer that a checkpoint does not hold, to find one that counts there."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

Facts = dict[str, Any]
"""Numbers, texts and tensors by where they are: "optimizer.steps", "param_groups[0]['k']"."""
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_SAVED: Final = ("state", "param_groups", "defaults")


def facts_outside(optimizer: torch.optim.Optimizer) -> Facts:
    """All that an optimizer keeps beside the state of its parameters, nested objects included."""
    facts: Facts = {}
    visited: set[int] = {id(optimizer)}
    beside = {key: value for key, value in vars(optimizer).items() if key not in _SAVED}
    for name, value in beside.items():
        _walk(name, value, facts, visited)
    # Another key than a parameter is a state that no parameter has.
    state: Mapping[Any, Any] = optimizer.state
    for key, value in state.items():
        if not isinstance(key, Tensor):
            _walk(f"state[{key!r}]", value, facts, visited)
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", "lr"):
                _walk(f"param_groups[{number}][{key!r}]", value, facts, visited)
    return facts


def facts_of_class(optimizer: torch.optim.Optimizer) -> Facts:
    """All that the classes of an optimizer keep, which every object of them shares."""
    facts: Facts = {}
    for kind in type(optimizer).__mro__:
        if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
            for name, value in vars(kind).items():
                if not name.startswith("__"):
                    _walk(f"{kind.__name__}.{name}", value, facts, set())
    return facts


def first_difference(left: Facts, right: Facts) -> str | None:
    """Where facts differ; None if nowhere."""
    for name in [*left, *(right.keys() - left.keys())]:
        if name not in left or name not in right or not _equal(left[name], right[name]):
            return name
    return None


def random_state() -> Facts:
    """The state of the generators of Python and NumPy, which no checkpoint holds."""
    return {"random": random.getstate(), "numpy.random": repr(np.random.get_state())}  # noqa: NPY002


def _walk(name: str, value: Any, facts: Facts, visited: set[int]) -> None:
    """Add what `value` holds, each object once."""
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
    """Yield the parts of an object, each with its suffix to the object's name."""
    if isinstance(value, Mapping):
        yield ".length", len(value)
        for number, (key, inner) in enumerate(value.items()):
            # A parameter is another object in every run, and its place is the same.
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
        slots = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())]
        names = [*getattr(value, "__dict__", {}), *slots]
        yield from ((f".{key}", getattr(value, key, None)) for key in names)


def _equal(left: Any, right: Any) -> bool:
    """True if two facts are the same; NaN is NaN."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        same = left.shape == right.shape and left.dtype == right.dtype
        return same and bool(torch.equal(left.nan_to_num(), right.nan_to_num()))
    return type(left) is type(right) and (left == right or (left != left and right != right))  # noqa: PLR0124
