"""Transformer blocks, one by one: compiled, and recomputed in backward.

Compiled they share one small graph. Activation checkpointing is not transformers' own, because
packed attention is chosen by the model's config while a forward runs (`varlen_attention.py`), and
the recomputation in backward must choose as forward did.
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

from toque.models.forward.keyed_dropout import draw_again, key_compiled_code
from toque.models.forward.varlen_attention import PLAN, attending_by, configs_of


def compile_blocks(model: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> int:
    """Compile every transformer block in place, and nothing between them; returns their number."""
    found = list(blocks(model))
    key_compiled_code(model)
    for block in found:
        block.compile(backend=backend)
    return len(found)


def stop_compiling(model: nn.Module) -> None:
    """Undo `compile_blocks`."""
    for block in blocks(model):
        block._compiled_call_impl = None  # noqa: SLF001  # it has no public name


def is_compiled(model: nn.Module) -> bool:
    """True if any of a model's blocks is."""
    return any(block._compiled_call_impl is not None for block in blocks(model))  # noqa: SLF001


def compile_disabled(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which compiled blocks run as written: each new token has another shape."""
    # asking for the stance loads the compiler, which takes a second: only where one is in use.
    if is_compiled(model):
        stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()


class CompileSeconds:
    """Seconds that compiling took since the last call, as for a shape that is new."""

    def __init__(self) -> None:
        # it loads the compiler, which takes a second: only for a run that compiles.
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


def recompute_blocks(model: nn.Module, *, offload: bool = False) -> int:
    """Keep only the inputs of every transformer block, in place; returns their number.

    Backward recomputes the rest (Chen et al. 2016, arXiv 1604.06174), to the same bits; inputs that
    `offload` wait in the machine's memory. Compile first: a compiled block is wrapped as such.
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


@contextmanager
def _attending_again(block: nn.Module, attending: AbstractContextManager[None]) -> Iterator[None]:
    """A context in which a block computes what it computed before."""
    draw_again(block)
    with attending:
        yield


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
        plan = PLAN.get()

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return nullcontext(), _attending_again(block, attending_by(configs, chosen, plan))

        # all that a block reads waits there: for a T5 also the bias and the encoder's states.
        with save_on_cpu(pin_memory=args[0].is_cuda) if offload else nullcontext():
            return checkpoint(original, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    forward._toque_original = original  # type: ignore[attr-defined]  # noqa: SLF001
    return forward
