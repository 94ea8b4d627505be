"""torch.compile, block by block: one small graph that all layers share, compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def compile_blocks(model: nn.Module) -> int:
    """Compile every transformer block in place; parameter names and checkpoints stay as they are.

    A block is a member of an outermost `ModuleList`: `encoder.block`, `transformer.h`, `layers`.
    What lies between blocks (embeddings, masks, the head) stays eager.

    Returns:
        The number of blocks.
    """
    blocks = list(_blocks(model))
    for block in blocks:
        block.compile()
    return len(blocks)


def eagerly(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which compiled blocks run as they were written.

    For generation: every new token has another shape, and each would be compiled for itself.
    """
    # Asking for the stance loads the compiler, which takes a second: only where one is in use.
    if any(block._compiled_call_impl is not None for block in _blocks(model)):  # noqa: SLF001
        stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)
