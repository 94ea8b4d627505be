"""Activation checkpointing, block by block: half the arithmetic of forward again, far less memory.

Ours and not the stock one, because packed attention is chosen by the model's config while a
forward runs (`segments.py`): what backward computes again must choose as forward did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from toque.models.forward.compile import blocks


def recompute_blocks(model: nn.Module) -> int:
    """Keep only the inputs of every transformer block; backward computes the rest again.

    Chen et al. 2016, arXiv 1604.06174. Losses and gradients are the same to the bit: dropout
    draws again what it drew. Compile first, if at all: what is there then is wrapped.

    Returns:
        The number of blocks.
    """
    found = list(blocks(model))
    for block in found:
        compiled = block._compiled_call_impl  # noqa: SLF001  # it has no public name
        if compiled is not None:
            block._compiled_call_impl = _recomputed(model, block, compiled)  # noqa: SLF001
        else:
            block.forward = _recomputed(model, block, block.forward)
    return len(found)


def stop_recomputing(model: nn.Module) -> None:
    """Undo `recompute_blocks`."""
    for block in blocks(model):
        for name in ("forward", "_compiled_call_impl"):
            wrapper = vars(block).get(name)
            original = getattr(wrapper, "_toque_original", None)
            if original is None:
                continue
            if name == "forward":
                del block.forward
            else:
                block._compiled_call_impl = original  # noqa: SLF001


def _recomputed(
    model: nn.Module, block: nn.Module, original: Callable[..., Any]
) -> Callable[..., Any]:
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return original(*args, **kwargs)
        chosen = {key: c._attn_implementation for key, c in configs.items()}  # noqa: SLF001

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return nullcontext(), _attending_as(configs, chosen)

        return checkpoint(original, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    forward._toque_original = original  # type: ignore[attr-defined]  # noqa: SLF001
    return forward


@contextmanager
def _attending_as(configs: dict[int, Any], chosen: dict[int, str]) -> Iterator[None]:
    before = {key: c._attn_implementation for key, c in configs.items()}  # noqa: SLF001
    try:
        for key, config in configs.items():
            config._attn_implementation = chosen[key]  # noqa: SLF001
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]  # noqa: SLF001
