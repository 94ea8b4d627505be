"""Phases of an update, told while they happen: forward, backward, clip and update.

The loop names them; whoever watches puts a context around each, to time it, to look at memory or
gradients at its edges, or to mark it in a trace. Without a watcher a phase costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final, Literal, ParamSpec, TypeVar

Phase = Literal["forward", "backward", "clip", "update"]
"""clip begins when an update's gradients are whole: summed over micro-batches and ranks, and not
yet clipped. update is the optimizer's step. forward and backward happen once a micro-batch."""
Watch = Callable[[Phase], AbstractContextManager[Any]]

UNWATCHED: Final[AbstractContextManager[Any]] = nullcontext()
"""Context of a watcher that has no interest in a phase."""
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass
class Phases:
    """The watchers of one training loop; call it with a phase's name for a context around it."""

    watchers: list[Watch] = field(default_factory=list)

    def __call__(self, phase: Phase) -> AbstractContextManager[Any]:
        """The contexts of all watchers around `phase`, entered."""
        if not self.watchers:
            return UNWATCHED
        stack = ExitStack()
        for watch in self.watchers:
            stack.enter_context(watch(phase))
        return stack

    def around(
        self, phase: Phase, function: Callable[_Arguments, _Result]
    ) -> Callable[_Arguments, _Result]:
        """`function`, each call of which is `phase`."""

        @wraps(function)
        def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            with self(phase):
                return function(*args, **kwargs)

        return called
