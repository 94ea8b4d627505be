"""Outlined update: bytes and operations of a micro-batch and of the optimizer, from shapes alone.

Under `FakeTensorMode`, a forward and a backward pass take almost no memory and time. They still
create and free every tensor in the real order, and the ledger counts the bytes.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from toque.models.families import DTYPES
from toque.models.forward.attention import use_attention
from toque.models.forward.blocks import recompute_blocks, stop_recomputing
from toque.models.forward.cpu_linear import copies_of
from toque.models.forward.grouped_attention import AttentionPlan, causal_mask
from toque.models.forward.loss import cross_entropy_sum
from toque.models.forward.outline import (
    OutlinedRows,
    Where,
    as_on_a_gpu,
    cpu_plans,
    outlined_batch,
    outlined_hidden,
)
from toque.models.forward.packed import hidden_states, logit_cap, output_head
from toque.models.lora.quantised import quantised_layers

_ATEN: Final = torch.ops.aten
_GPU_BLOCK: Final = 512
"""Bytes of a block in CUDA's caching allocator. Sizes are rounded up to whole blocks."""
_TRIES: Final = 3
_SLOW_SECONDS: Final = 0.2
"""Longer operations are timed twice instead of three times. The first run loads kernels."""


@dataclass(frozen=True)
class _Like:
    """Shape, strides and type of a tensor argument."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """Create such a tensor, with zeros as indices and random numbers from 0 to 1."""
        ends = (
            (n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)
        )
        n = 1 + sum(ends) if all(self.shape) else 0
        if self.dtype.is_floating_point:
            flat = torch.rand(n).to(self.dtype)
        else:
            flat = torch.zeros(n, dtype=self.dtype)
        return flat.as_strided(self.shape, self.strides)


@dataclass
class Operations:
    """Operations of an update: each distinct call with its arguments, and its number of runs."""

    calls: dict[str, tuple[Any, list[Any], Any]] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)

    def add(self, function: Any, args: Any, kwargs: Any) -> None:
        """Count a run of a call."""
        flat, structure = tree_flatten((args, kwargs))
        like = [
            _Like(tuple(a.shape), a.stride(), a.dtype) if isinstance(a, Tensor) else a
            for a in flat
        ]
        key = repr((str(function), like, structure))
        self.calls.setdefault(key, (function, like, structure))
        self.runs[key] += 1

    @torch.no_grad()
    def seconds(self) -> float:
        """Measure the seconds of all runs on this CPU, by the fastest of a few tries per call."""
        total = 0.0
        with torch.random.fork_rng(devices=[]):
            for key, (function, like, structure) in self.calls.items():
                flat = [a.tensor() if isinstance(a, _Like) else a for a in like]
                args, kwargs = tree_unflatten(flat, structure)
                best = float("inf")
                for n in range(_TRIES):
                    started = time.perf_counter()
                    function(*args, **kwargs)
                    best = min(best, time.perf_counter() - started)
                    if n and best > _SLOW_SECONDS:
                        break
                total += self.runs[key] * best
        return total


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the bytes of live tensors, their peak, and the FLOPs of matmuls."""

    def __init__(self, operations: Operations | None = None, *, block: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block = block
        self.now = 0
        self.peak = 0
        self.flops = 0.0
        self.operations = operations
        self._live: dict[int, tuple[Any, int]] = {}
        self._has_labels = False

    def add(self, tensor: Tensor) -> None:
        """Count the memory of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        key = _key(tensor)
        if key in self._live:
            return
        size = -(-storage.nbytes() // self._block) * self._block
        self._live[key] = (weakref.ref(storage, lambda _: self._free(key)), size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _free(self, key: int) -> None:
        self.now -= self._live.pop(key)[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and count its results."""
        kwargs = kwargs or {}
        if func is _ATEN.nonzero.default:
            return self._nonzero(args[0])
        result = func(*args, **kwargs)
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        packet = func._overloadpacket  # noqa: SLF001  # it has no public name
        flop_formula = flop_registry.get(
            _ATEN.addmm if packet is _ATEN.addmm_ else packet
        )
        if flop_formula is not None:
            self.flops += float(flop_formula(*args, **kwargs, out_val=result))
        if self.operations is not None:
            self.operations.add(func, args, kwargs)
        return result

    def _nonzero(self, mask: Tensor) -> Tensor:
        """Return indices as if the first mask (of labels) were all true and later masks false."""
        n = 0 if self._has_labels else mask.numel()
        self._has_labels = True
        indices = mask.new_empty((n, mask.dim()), dtype=torch.int64)
        self.add(indices)
        return indices


@dataclass(frozen=True)
class OutlinedUpdate:
    """Bytes and work of an update's parts, from the second micro-batch on."""

    weights: int
    copies: int
    """Bytes of 16-bit copies of weights, which layers retain between updates."""
    gradients: int
    optimizer: int
    """Bytes of the optimizer's state after the first update."""
    computing: int
    """Peak of the forward pass, loss and backward pass, in addition to the parts above."""
    kept: int
    """Part of `computing` that the forward pass keeps for the backward pass."""
    step: int
    """Temporary bytes of the optimizer's step."""
    flops: float
    """FLOPs of the micro-batch's matmuls."""
    micro_batch: Operations
    update: Operations


@contextmanager
def outlining() -> Iterator[FakeTensorMode]:
    """Make tensors in this context have shapes but no content."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        causal_mask.cache_clear()  # a later training run must not use a mask without content


def outline_update(
    model: PreTrainedModel,
    rows: OutlinedRows,
    *,
    where: Where,
    precision: str,
    optimizer: torch.optim.Optimizer | None,
    state_bytes: int,
    accumulates: bool,
    recompute: bool = False,
    smoothing: float = 0.0,
    masked: bool = False,
    operations: bool = False,
) -> OutlinedUpdate:
    """Run a micro-batch and the optimizer's step on shapes. Call it inside `outlining`.

    Args:
        model: Model with the layers for `where`.
        rows: Rows of the micro-batch.
        where: Device: "cpu" or "cuda".
        precision: Type of the matmuls.
        optimizer: The optimizer. None if its step reads values, which outlined tensors lack.
        state_bytes: Bytes of the optimizer's state after the first update.
        accumulates: Whether gradients of earlier micro-batches already exist.
        recompute: Whether the backward pass recomputes the blocks.
        smoothing: Label smoothing.
        masked: Whether a GPU uses dense attention with masks.
        operations: Whether to list the operations, so that they can be timed.
    """
    model.train()
    for parameter in model.parameters():
        parameter.grad = None
        if accumulates and parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    buffers = (b for _, layer in quantised_layers(model) for b in layer.buffers())
    stored = [*model.parameters(), *buffers]
    weights = _storage_bytes(stored)
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trained)

    plans = None
    if where == "cuda":
        use_attention(model, "dense" if masked else "flex")
    else:
        with unset_fake_temporarily():
            plans = cpu_plans(rows)
    if recompute:
        recompute_blocks(model)

    micro_batch = Operations()
    update = Operations()
    block = _GPU_BLOCK if where == "cuda" else 1
    try:
        with (
            _Ledger(micro_batch if operations else None, block=block) as ledger,
            as_on_a_gpu() if where == "cuda" else nullcontext(),
        ):
            for tensor in stored:
                ledger.add(tensor)
                if tensor.grad is not None:
                    ledger.add(tensor.grad)
            is_half = precision != "float32"
            with (
                torch.autocast("cpu", dtype=DTYPES[precision])
                if is_half
                else nullcontext()
            ):
                loss, before_head = _outlined_loss(
                    model, rows, plans, smoothing, ledger
                )
            # torch.autograd.backward would leave the context of the GPU's operators.
            torch.autograd.Variable._execution_engine.run_backward(  # noqa: SLF001
                (loss,), (torch.ones_like(loss),), False, False, (),
                allow_unreachable=True, accumulate_grad=True,
            )  # fmt: skip
    finally:
        stop_recomputing(model)

    copies = _storage_bytes(
        copy for module in model.modules() for copy in copies_of(module)
    )
    retained = weights + copies + gradients
    earlier_gradients = gradients if accumulates else 0
    return OutlinedUpdate(
        weights=weights,
        copies=copies,
        gradients=gradients,
        optimizer=state_bytes,
        computing=max(0, ledger.peak - retained),
        kept=max(0, before_head - weights - copies - earlier_gradients),
        step=_step_bytes(trained, optimizer, update if operations else None),
        flops=ledger.flops,
        micro_batch=micro_batch,
        update=update,
    )


def _outlined_loss(
    model: PreTrainedModel,
    rows: OutlinedRows,
    plans: tuple[AttentionPlan, AttentionPlan] | None,
    smoothing: float,
    ledger: _Ledger,
) -> tuple[Tensor, int]:
    """Return the loss and the bytes in use before the output head. `plans` are for a CPU only."""
    if plans is None:
        batch = outlined_batch(rows)
        hidden = hidden_states(model, batch)
        labels = batch.labels
    else:
        hidden = outlined_hidden(model, rows, plans)
        labels = torch.zeros(hidden.shape[:-1], dtype=torch.int64)
    before_head = ledger.now
    weight, bias = output_head(model)
    loss = cross_entropy_sum(
        hidden,
        weight,
        labels,
        bias=bias,
        smoothing=smoothing,
        n_labels=rows.rows * rows.target if plans is None else None,
        cap=logit_cap(model),
    )
    return loss, before_head


def _step_bytes(
    trained: list[nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    operations: Operations | None,
) -> int:
    """Measure the temporary bytes of the optimizer's second step. The first allocates its state."""
    if optimizer is None:  # such an optimizer computes in float32, one weight at a time
        return max((4 * p.numel() for p in trained), default=0)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    with _Ledger(operations) as ledger:
        state = [
            value for values in optimizer.state.values() for value in values.values()
        ]
        for tensor in (*trained, *(p.grad for p in trained), *state):
            if isinstance(tensor, Tensor):
                ledger.add(tensor)
        before = ledger.now
        optimizer.step()
    return int(ledger.peak - before)


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of tensors. Shared storage counts once."""
    return sum({_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # it has no public name
