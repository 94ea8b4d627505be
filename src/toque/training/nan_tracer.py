"""NaN tracer: recomputes an update, and names the module and examples of its first NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor, nn

from toque.batch import Batch
from toque.models.forward.blocks import compile_disabled
from toque.training.distributed.data_parallel import LossFn
from toque.training.runtime import Runtime


@dataclass(frozen=True)
class NonFiniteOrigin:
    """First value of an update that is not finite."""

    where: str  # a description such as "the output of transformer.h.3.mlp"
    example_ids: tuple[int, ...] = ()
    """Examples in the value's rows, if the value has rows."""


def find_nonfinite_origin(
    model: nn.Module,
    loss_fn: LossFn,
    micro_batches: Sequence[Batch],
    runtime: Runtime,
) -> NonFiniteOrigin | None:
    """Recompute an update and find its first value that is not finite, if there is one.

    The search covers weights, inputs and outputs of modules, the loss and gradients. Gradients are
    discarded afterwards. The caller must seed the random numbers. On CUDA the weights may be a few
    updates newer than the failed update.
    """
    model.train()
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            return NonFiniteOrigin(f"the weight {name}")
    for micro_batch in micro_batches:
        search = _Search(micro_batch.example_ids)
        with search.hooks(model), compile_disabled(model):
            with runtime.autocast():
                loss = loss_fn(model, micro_batch.to(runtime.device))
            search.check("the loss, although every module's output is finite", loss)
            if search.origin is None:
                torch.autograd.backward(loss)
        model.zero_grad(set_to_none=True)
        if search.origin is not None:
            return search.origin
    return None


@dataclass
class _Search:
    """Search for the first value of a micro-batch that is not finite."""

    example_ids: tuple[tuple[int, ...], ...]  # examples of each row
    origin: NonFiniteOrigin | None = None

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Check the modules' inputs and outputs, and the gradients, inside the context."""
        handles = [*self._hook_modules(model), *self._hook_gradients(model)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook_modules(self, model: nn.Module) -> Iterator[Any]:
        for name, module in model.named_modules():
            # The parent module computes a module's input, between two of its parts.
            parent, _, child = name.rpartition(".")
            source = "the model's input"
            if child:
                source = f"the input that {parent or 'the model'} passes to its {child}"
            output = f"the output of {name or 'the model'} ({type(module).__name__})"
            check_input = partial(self._check_input, source)
            check_output = partial(self._check_output, output)
            yield module.register_forward_pre_hook(check_input, with_kwargs=True)
            yield module.register_forward_hook(check_output)

    def _hook_gradients(self, model: nn.Module) -> Iterator[Any]:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                where = f"the gradient of {name}, although the loss is finite"
                check_gradient = partial(self.check, where, has_rows=False)
                yield parameter.register_hook(check_gradient)  # type: ignore[no-untyped-call]

    def _check_input(
        self, where: str, _module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        self.check(where, [*args, *kwargs.values()])

    def _check_output(
        self, where: str, _module: nn.Module, _args: Any, output: Any
    ) -> None:
        self.check(where, output)

    def check(self, where: str, values: Any, *, has_rows: bool = True) -> None:
        """Set the origin if a tensor in `values` is not finite and no origin is set.

        If the tensor `has_rows`, the origin includes the examples of its bad rows.
        """
        if self.origin is not None:
            return
        for tensor in _tensors_in(values):
            if not _is_finite(tensor):
                examples = self._examples_of(tensor) if has_rows else ()
                self.origin = NonFiniteOrigin(where, examples)
                return

    def _examples_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the examples of rows that are not finite, or all if the rows are unknown."""
        bad_rows = self.example_ids
        if tensor.ndim > 0 and tensor.shape[0] == len(self.example_ids):
            is_bad = ~torch.isfinite(tensor).flatten(1).all(1)
            bad_rows = tuple(compress(self.example_ids, is_bad.tolist()))
        return tuple(chain.from_iterable(bad_rows))


def _tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in nested lists, tuples and dicts."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, dict):
        yield from _tensors_in(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors_in(value)


def _is_finite(tensor: Tensor) -> bool:
    # -inf is allowed, because attention masks and biases contain it.
    is_bad = torch.isnan(tensor) | torch.isposinf(tensor)
    return not bool(is_bad.any())
