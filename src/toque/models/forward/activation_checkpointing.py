"""Activation checkpointing, block by block (Chen et al. 2016): far less memory, a second forward.

Not transformers' own, because packed attention is chosen by the model's config while a forward
runs (`varlen_attention.py`), and the recomputation in backward must choose as forward did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from toque.models.forward.compile import blocks
from toque.models.forward.varlen_attention import attending_by, configs_of


def recompute_blocks(model: nn.Module, *, offload: bool = False) -> int:
    """Keep only the inputs of every transformer block, in place; returns their number.

    Backward recomputes the rest (Chen et al. 2016, arXiv 1604.06174), to the same bits: dropout
    repeats its draws. With `offload` these inputs wait in the machine's memory. Compile first, if
    at all: a compiled block is wrapped as such.
    """
    found, configs = list(blocks(model)), configs_of(model)
    for block in found:
        compiled = block._compiled_call_impl  # noqa: SLF001  # it has no public name
        if compiled is not None:
            block._compiled_call_impl = _recomputed(configs, block, compiled, offload=offload)  # noqa: SLF001
        else:
            block.forward = _recomputed(configs, block, block.forward, offload=offload)
    return len(found)


def stop_recomputing(model: nn.Module) -> None:
    """Undo `recompute_blocks`."""
    for block in blocks(model):
        if hasattr(vars(block).get("forward"), "_toque_original"):
            del block.forward
        compiled = block._compiled_call_impl  # noqa: SLF001
        block._compiled_call_impl = getattr(compiled, "_toque_original", compiled)  # noqa: SLF001


def _recomputed(
    configs: Sequence[PretrainedConfig],
    block: nn.Module,
    original: Callable[..., Any],
    *,
    offload: bool,
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return original(*args, **kwargs)
        chosen = configs[0]._attn_implementation  # noqa: SLF001  # one for all parts

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return nullcontext(), attending_by(configs, chosen)

        # All that a block reads waits there: for a T5 also the bias and the encoder's states.
        with save_on_cpu(pin_memory=args[0].is_cuda) if offload else nullcontext():
            return checkpoint(original, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    forward._toque_original = original  # type: ignore[attr-defined]  # noqa: SLF001
    return forward
