"""torch.compile, block by block: one small graph, compiled once, that all layers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


def compile_blocks(model: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> int:
    """Compile every transformer block in place, and nothing between them; returns their number."""
    found = list(blocks(model))
    for block in found:
        block.compile(backend=backend)
    return len(found)


def stop_compiling(model: nn.Module) -> None:
    """Undo `compile_blocks`."""
    for block in blocks(model):
        block._compiled_call_impl = None  # noqa: SLF001  # it has no public name


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """A context without compiled blocks; afterwards they are back, without compiling again."""
    kept = [(block, block._compiled_call_impl) for block in blocks(model)]  # noqa: SLF001
    stop_compiling(model)
    try:
        yield
    finally:
        for block, compiled in kept:
            block._compiled_call_impl = compiled  # noqa: SLF001


def compile_disabled(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which compiled blocks run as written: each new token has another shape."""
    # Asking for the stance loads the compiler, which takes a second: only where one is in use.
    if any(block._compiled_call_impl is not None for block in blocks(model)):  # noqa: SLF001
        stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()


class CompileSeconds:
    """Seconds that compiling took since the last call, as for a shape that is new."""

    def __init__(self) -> None:
        # It loads the compiler, which takes a second: only for a run that compiles.
        from torch._dynamo.utils import calculate_time_spent

        self._spent = calculate_time_spent
        self._told = self._spent()["total_wall_time"]

    def __call__(self) -> float:
        """Seconds since the last call."""
        before, self._told = self._told, self._spent()["total_wall_time"]
        return self._told - before


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Members of the outermost `ModuleList`s: `encoder.block`, `transformer.h`, `layers`."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks(child)
