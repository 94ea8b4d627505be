"""NaN tracer: recompute an update with hooks, and name the module and examples of the first NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from toque.batch import Batch
from toque.models.forward.blocks import compile_disabled
from toque.training.distributed.data_parallel import LossFn
from toque.training.runtime import Runtime


@dataclass(frozen=True)
class NonFiniteOrigin:
    """The first non-finite value of an update, and the examples whose rows hold it, if known."""

    where: str  # in words: "the output of transformer.h.3.mlp"
    example_ids: tuple[int, ...] = ()


def find_nonfinite_origin(
    model: nn.Module,
    loss_fn: LossFn,
    micro_batches: Sequence[Batch],
    runtime: Runtime,
) -> NonFiniteOrigin | None:
    """Recompute an update, seeded by the caller; None when everything is finite this time.

    It looks at the weights, each module's inputs and outputs, the loss, and the gradients as they
    arrive, which are thrown away. On CUDA the model has the weights of a few updates later.
    """
    model.train()
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return NonFiniteOrigin(f"the weight {name} itself")
    for rows in micro_batches:
        watch = _Watch(rows.example_ids)
        with watch.watching(model), compile_disabled(model):
            with runtime.autocast():
                loss = loss_fn(model, rows.to(runtime.device))
            if watch.found is None and not _finite(loss):
                ids = tuple(i for row in rows.example_ids for i in row)
                watch.found = NonFiniteOrigin(
                    "the loss, while every module's output is finite", ids
                )
            if watch.found is None:
                torch.autograd.backward(loss)
        model.zero_grad(set_to_none=True)
        if watch.found is not None:
            return watch.found
    return None


@dataclass
class _Watch:
    """Looks for the first non-finite value of a micro-batch whose rows hold these examples."""

    example_ids: tuple[tuple[int, ...], ...]
    found: NonFiniteOrigin | None = None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        handles: list[Any] = []
        for name, module in model.named_modules():
            # A module's input comes from its owner, between two of its parts.
            owner, _, part = name.rpartition(".")
            given = (
                f"what {owner or 'the model'} hands to its {part}" if part else "the model's input"
            )
            made = f"the output of {name or 'the model'} ({type(module).__name__})"
            before, after = partial(self._input, given), partial(self._output, made)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                where = f"the gradient of {name}, while the loss is finite"
                arrived = partial(self._look, where, by_row=False)
                handles.append(parameter.register_hook(arrived))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _input(self, where: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._look(where, [*args, *kwargs.values()])

    def _output(self, where: str, _module: nn.Module, _args: Any, output: Any) -> None:
        self._look(where, output)

    def _look(self, where: str, values: Any, *, by_row: bool = True) -> None:
        if self.found is not None:
            return
        for tensor in _tensors(values):
            if not _finite(tensor):
                self.found = NonFiniteOrigin(where, self._examples(tensor) if by_row else ())
                return

    def _examples(self, tensor: Tensor) -> tuple[int, ...]:
        if tensor.ndim == 0 or tensor.shape[0] != len(self.example_ids):
            return tuple(i for row in self.example_ids for i in row)
        bad = ~torch.isfinite(tensor).flatten(1).all(1)
        return tuple(i for r in bad.nonzero().flatten().tolist() for i in self.example_ids[r])


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _finite(tensor: Tensor) -> bool:
    # Attention masks and biases use -inf; NaN and +inf are never meant.
    bad = torch.isnan(tensor) | torch.isposinf(tensor)
    return not bool(bad.any())
