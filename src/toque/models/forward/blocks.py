"""Transformer blocks, one at a time: compilation and activation checkpointing.

Equal blocks share one small compiled graph. transformers' own activation checkpointing does not
work here: the model's config selects packed attention during a forward (`varlen_attention.py`), and
the recomputation in the backward pass must select the same attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from toque.models.forward.keyed_dropout import key_compiled_code, reuse_masks
from toque.models.forward.varlen_attention import PLAN, attending_by, configs_of


def compile_blocks(
    model: nn.Module, *, backend: str | Callable[..., Any] = "inductor"
) -> int:
    """Compile every transformer block in place. Return the number of blocks."""
    all_blocks = list(blocks(model))
    key_compiled_code(model)
    for block in all_blocks:
        block.compile(backend=backend)
    return len(all_blocks)


def stop_compiling(model: nn.Module) -> None:
    """Undo `compile_blocks`."""
    for block in blocks(model):
        block._compiled_call_impl = None  # noqa: SLF001  # it has no public name


def is_compiled(model: nn.Module) -> bool:
    """True if a block of the model is compiled."""
    return any(block._compiled_call_impl is not None for block in blocks(model))  # noqa: SLF001


def compile_disabled(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context that runs blocks uncompiled, because every new token has another shape."""
    # Setting the stance loads the compiler, which takes a second.
    if not is_compiled(model):
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


class CompileSeconds:
    """Meter of compilation time: each call returns the seconds since the last call."""

    def __init__(self) -> None:
        # This import loads the compiler, which takes a second.
        from torch._dynamo.utils import calculate_time_spent

        self._spent = calculate_time_spent
        self._reported = self._spent()["total_wall_time"]

    def __call__(self) -> float:
        """Return the seconds of compilation since the last call."""
        before = self._reported
        self._reported = self._spent()["total_wall_time"]
        return self._reported - before


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the transformer blocks: members of the outermost `ModuleList`s, such as `layers`."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks(child)


def recompute_blocks(model: nn.Module, *, offload: bool = False) -> int:
    """Save only the inputs of every transformer block, in place. Return the number of blocks.

    The backward pass recomputes all activations inside a block, bitwise identical (Chen et al.
    2016, arXiv 1604.06174). Call `compile_blocks` first, if at all.

    Args:
        model: Model to change.
        offload: Save the inputs in CPU memory.
    """
    configs = configs_of(model)
    all_blocks = list(blocks(model))
    for block in all_blocks:
        compiled = block._compiled_call_impl  # noqa: SLF001  # it has no public name
        original = block.forward if compiled is None else compiled
        checkpointed = _checkpointed(configs, block, original, offload=offload)
        if compiled is None:
            block.forward = checkpointed
        else:
            block._compiled_call_impl = checkpointed  # noqa: SLF001
    return len(all_blocks)


def stop_recomputing(model: nn.Module) -> None:
    """Undo `recompute_blocks`."""
    for block in blocks(model):
        if hasattr(vars(block).get("forward"), "_toque_original"):
            del block.forward
        compiled = block._compiled_call_impl  # noqa: SLF001
        block._compiled_call_impl = getattr(compiled, "_toque_original", compiled)  # noqa: SLF001


@contextmanager
def _recomputing(
    block: nn.Module, attention: AbstractContextManager[None]
) -> Iterator[None]:
    """Context in which a block repeats its last forward: the same dropout masks and attention."""
    reuse_masks(block)
    with attention:
        yield


def _checkpointed(
    configs: Sequence[PretrainedConfig],
    block: nn.Module,
    original: Callable[..., Any],
    *,
    offload: bool,
) -> Callable[..., Any]:
    """Wrap a block's forward, which saves only its inputs while the block is trained."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return original(*args, **kwargs)
        name = configs[0]._attn_implementation  # noqa: SLF001  # the same for all parts
        plan = PLAN.get()

        def contexts() -> tuple[
            AbstractContextManager[Any], AbstractContextManager[Any]
        ]:
            attention = attending_by(configs, name, plan)
            return nullcontext(), _recomputing(block, attention)

        # All inputs are offloaded: a T5 block's include the bias and the encoder's states.
        saving = save_on_cpu(pin_memory=args[0].is_cuda) if offload else nullcontext()
        with saving:
            return checkpoint(
                original, *args, use_reentrant=False, context_fn=contexts, **kwargs
            )

    forward._toque_original = original  # type: ignore[attr-defined]  # noqa: SLF001
    return forward
