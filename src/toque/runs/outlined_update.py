"""Outlined update: bytes and operations of a micro-batch and of the optimizer, from shapes alone.

Under `FakeTensorMode`, the forward and backward passes take almost no memory and time. They still
create and free every tensor in the real order, and the ledger counts the bytes.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from toque.models.forward.example_losses import label_nats
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
from toque.models.generation.engine import evaluating
from toque.models.lora.quantised import quantised_layers

_ATEN: Final = torch.ops.aten
_GPU_BLOCK: Final = 512
"""Bytes of a block in CUDA's caching allocator. Sizes are rounded up to whole blocks."""
_TRIES: Final = 3
_SLOW_SECONDS: Final = 0.2
"""Longer operations are timed twice instead of three times. The first try loads kernels."""


@dataclass(frozen=True)
class _TensorShape:
    """Shape, strides and type of a tensor argument."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def create(self) -> Tensor:
        """Create a tensor of this shape: zeros for integers, otherwise random numbers below 1."""
        last_element = sum(
            (n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)
        )
        n = 1 + last_element if all(self.shape) else 0
        if self.dtype.is_floating_point:
            flat = torch.rand(n).to(self.dtype)
        else:
            flat = torch.zeros(n, dtype=self.dtype)  # 0 is a valid index
        return flat.as_strided(self.shape, self.strides)


@dataclass
class Operations:
    """Operations of an update: the distinct calls, and how often the update runs each of them."""

    calls: dict[str, tuple[Any, list[Any], Any]] = field(default_factory=dict)
    """Function, flat arguments with tensors as `_TensorShape`, and structure of the arguments."""
    runs: Counter[str] = field(default_factory=Counter)

    def add(self, function: Any, args: Any, kwargs: Any) -> None:
        """Count one more call."""
        flat, structure = tree_flatten((args, kwargs))
        shapes = [
            _TensorShape(tuple(argument.shape), argument.stride(), argument.dtype)
            if isinstance(argument, Tensor)
            else argument
            for argument in flat
        ]
        key = repr((str(function), shapes, structure))
        self.calls.setdefault(key, (function, shapes, structure))
        self.runs[key] += 1

    @torch.no_grad()
    def seconds(self) -> float:
        """Time each call on this CPU. Return the total seconds of all calls."""
        with torch.random.fork_rng(devices=[]):
            return sum(
                self.runs[key] * _time_call(*call) for key, call in self.calls.items()
            )


def _time_call(function: Any, shapes: list[Any], structure: Any) -> float:
    """Return the seconds of the fastest of several tries."""
    flat = [
        item.create() if isinstance(item, _TensorShape) else item for item in shapes
    ]
    args, kwargs = tree_unflatten(flat, structure)
    best = float("inf")
    for n in range(_TRIES):
        started = time.perf_counter()
        function(*args, **kwargs)
        best = min(best, time.perf_counter() - started)
        if n and best > _SLOW_SECONDS:
            break
    return best


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the bytes of live tensors, their peak, and the FLOPs of matmuls.

    If `operations` is given, every operation is added to it. Sizes are rounded up to `block` bytes.
    """

    def __init__(self, operations: Operations | None = None, *, block: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block = block
        self.now = 0
        """Bytes of the live tensors."""
        self.peak = 0
        self.flops = 0.0
        self.operations = operations
        self._live: dict[int, tuple[Any, int]] = {}
        """Weak reference and bytes of each live storage."""
        self._has_labels = False

    def add(self, tensor: Tensor) -> None:
        """Count the memory of a tensor until the tensor is freed."""
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
        if func in (_ATEN.index.Tensor, _ATEN.index_put_.default):
            args = (args[0], _select_all(args[1]), *args[2:])
        result = func(*args, **kwargs)
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        packet = func._overloadpacket  # noqa: SLF001  # it has no public name
        if packet is _ATEN.addmm_:
            packet = _ATEN.addmm  # torch has no formula for the in-place operator
        flop_formula = flop_registry.get(packet)
        if flop_formula is not None:
            self.flops += float(flop_formula(*args, **kwargs, out_val=result))
        if self.operations is not None:
            self.operations.add(func, args, kwargs)
        return result

    def _nonzero(self, mask: Tensor) -> Tensor:
        """Return indices without reading the mask.

        The first mask selects the labels: every token has a label. Later masks select rare cases,
        such as probabilities that underflow: none occurs.
        """
        n = 0 if self._has_labels else mask.numel()
        self._has_labels = True
        indices = mask.new_empty((n, mask.dim()), dtype=torch.int64)
        self.add(indices)
        return indices


@dataclass(frozen=True)
class OutlinedUpdate:
    """Memory and work of an update after the first."""

    weights: int
    copies: int
    """Bytes of 16-bit copies of weights, which layers retain between updates."""
    gradients: int
    optimizer: int
    """Bytes of the optimizer's state after the first update."""
    computing: int
    """Peak bytes of forward pass, loss and backward pass, in addition to the parts above.
    """
    kept: int
    """Bytes, included in `computing`, that the forward pass stores for the backward pass."""
    step: int
    """Temporary bytes of the optimizer's step."""
    flops: float
    """FLOPs of the micro-batch's matmuls."""
    extra_flops: float
    """FLOPs, included in `flops`, of the passes before the loss: of the reference and of the nats.
    """
    micro_batch: Operations
    """Operations of a micro-batch, if requested."""
    update: Operations
    """Operations of the optimizer's step, if requested."""


@contextmanager
def outlining() -> Iterator[FakeTensorMode]:
    """Create fake tensors, which have shapes but no content, inside this context."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        causal_mask.cache_clear()  # a later training run must not use a mask without content


@dataclass(frozen=True)
class UpdateOutliner:
    """Outliner of updates on a device. Use it inside `outlining`."""

    where: Where
    precision: str
    """Number format of the matmuls."""
    optimizer: torch.optim.Optimizer | None
    """Optimizer of the run. None if its step needs tensor values, which outlining does not compute.
    """
    state_bytes: int
    """Bytes of the optimizer's state after the first update."""
    accumulates: bool
    """True if gradients of earlier micro-batches already exist."""
    recompute: bool = False
    """True if the backward pass recomputes the blocks."""
    smoothing: float = 0.0
    """Label smoothing of the loss."""
    masked: bool = False
    """True if a GPU uses dense attention with masks."""
    needs_nats: bool = False
    """True if the gradient depends on the nats of the labels, which are computed first."""
    has_reference: bool = False
    """True if a copy of the model also computes the nats of the labels."""
    operations: bool = False
    """True to list the operations, so that they can be timed."""

    def outline(self, model: PreTrainedModel, rows: OutlinedRows) -> OutlinedUpdate:
        """Run a micro-batch and the optimizer's step on shapes.

        The model must have the layers for the device.
        """
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in model.parameters():
            parameter.grad = None
        if self.accumulates:
            _create_gradients(trained)
        buffers = (b for _, layer in quantised_layers(model) for b in layer.buffers())
        stored = [*model.parameters(), *buffers]
        weights = _storage_bytes(stored)
        gradients = sum(parameter.nbytes for parameter in trained)

        block = _GPU_BLOCK if self.where == "cuda" else 1
        micro_batch, update = Operations(), Operations()
        ledger = _Ledger(micro_batch if self.operations else None, block=block)
        before_head, extra_flops = self._run_micro_batch(model, rows, stored, ledger)
        copies = _storage_bytes(
            copy for module in model.modules() for copy in copies_of(module)
        )
        step = self._run_step(trained, update if self.operations else None)

        retained = weights + copies + gradients
        earlier_gradients = gradients if self.accumulates else 0
        return OutlinedUpdate(
            weights=weights,
            copies=copies,
            gradients=gradients,
            optimizer=self.state_bytes,
            computing=max(0, ledger.peak - retained),
            kept=max(0, before_head - weights - copies - earlier_gradients),
            step=step,
            flops=ledger.flops,
            extra_flops=extra_flops,
            micro_batch=micro_batch,
            update=update,
        )

    def _run_micro_batch(
        self,
        model: PreTrainedModel,
        rows: OutlinedRows,
        stored: list[Tensor],
        ledger: _Ledger,
    ) -> tuple[int, float]:
        """Run the forward and backward passes.

        Returns:
            The bytes in use before the output head, and the FLOPs of the passes before the loss.
        """
        is_on_gpu = self.where == "cuda"
        plans = _prepare_attention(model, rows, self.where, masked=self.masked)
        if self.recompute:
            recompute_blocks(model)
        try:
            with ledger, as_on_a_gpu() if is_on_gpu else nullcontext():
                gradients = (t.grad for t in stored if t.grad is not None)
                for tensor in (*stored, *gradients):
                    ledger.add(tensor)
                with _autocast(self.precision):
                    nats: list[Tensor] = []
                    if self.has_reference:
                        with evaluating(model), torch.no_grad():
                            nats.append(_nats(model, *_run_blocks(model, rows, plans)))
                    extra_flops = ledger.flops
                    hidden, labels = _run_blocks(model, rows, plans)
                    before_head = ledger.now
                    before_nats = ledger.flops
                    if self.needs_nats:
                        with torch.no_grad():
                            nats.append(_nats(model, hidden, labels))
                    extra_flops += ledger.flops - before_nats
                    weight, bias = output_head(model)
                    loss = cross_entropy_sum(
                        hidden,
                        weight,
                        labels,
                        bias=bias,
                        smoothing=self.smoothing,
                        n_labels=rows.rows * rows.target if is_on_gpu else None,
                        cap=logit_cap(model),
                    )
                # torch.autograd.backward would leave the context of the GPU's operators.
                torch.autograd.Variable._execution_engine.run_backward(  # noqa: SLF001
                    (loss,), (torch.ones_like(loss),), False, False, (),
                    allow_unreachable=True, accumulate_grad=True,
                )  # fmt: skip
        finally:
            stop_recomputing(model)
        return before_head, extra_flops

    def _run_step(
        self, trained: list[nn.Parameter], operations: Operations | None
    ) -> int:
        """Run the optimizer's step and return its temporary bytes."""
        optimizer = self.optimizer
        if optimizer is None:
            # Such an optimizer computes in float32, one weight at a time.
            return max((4 * p.numel() for p in trained), default=0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3  # no schedule sets it here
        _create_gradients(trained)
        optimizer.step()  # allocates the state

        with _Ledger(operations) as ledger:
            states = optimizer.state.values()
            state = [value for values in states for value in values.values()]
            for tensor in (*trained, *(p.grad for p in trained), *state):
                if isinstance(tensor, Tensor):
                    ledger.add(tensor)
            before = ledger.now
            optimizer.step()
        return int(ledger.peak - before)


def outline_forward(
    model: PreTrainedModel, rows: OutlinedRows, *, where: Where, precision: str
) -> int:
    """Run a forward pass without gradients on shapes. Return its temporary bytes.

    Call it inside `outlining`. The model must have the layers for the device.
    """
    plans = _prepare_attention(model, rows, where)
    is_on_gpu = where == "cuda"
    ledger = _Ledger(block=_GPU_BLOCK if is_on_gpu else 1)
    with (
        evaluating(model),
        torch.no_grad(),
        ledger,
        as_on_a_gpu() if is_on_gpu else nullcontext(),
        _autocast(precision),
    ):
        for parameter in model.parameters():
            ledger.add(parameter)
        before = ledger.now
        _run_blocks(model, rows, plans)
    return ledger.peak - before


def _autocast(precision: str) -> AbstractContextManager[object]:
    """Return the context of matmuls in a number format."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast("cpu", dtype=DTYPES[precision])


def _prepare_attention(
    model: PreTrainedModel, rows: OutlinedRows, where: Where, *, masked: bool = False
) -> tuple[AttentionPlan, AttentionPlan] | None:
    """Choose a GPU's attention and return None, or return the attention plans of a CPU."""
    if where == "cuda":
        use_attention(model, "dense" if masked else "flex")
        return None
    with unset_fake_temporarily():
        return cpu_plans(rows)


def _create_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Create the missing gradients of parameters."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)


def _run_blocks(
    model: PreTrainedModel,
    rows: OutlinedRows,
    plans: tuple[AttentionPlan, AttentionPlan] | None,
) -> tuple[Tensor, Tensor]:
    """Return the input of the output head, and the labels. `plans` are None on a GPU."""
    if plans is None:
        batch = outlined_batch(rows)
        return hidden_states(model, batch), batch.labels
    hidden = outlined_hidden(model, rows, plans)
    return hidden, torch.zeros(hidden.shape[:-1], dtype=torch.int64)


def _nats(model: PreTrainedModel, hidden: Tensor, labels: Tensor) -> Tensor:
    """Compute the nats of the labels from the input of the output head."""
    weight, bias = output_head(model)
    return label_nats(hidden, weight, labels, bias, logit_cap(model))


def _select_all(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Replace masks by indices of as many elements as the masks have."""
    selected: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool:
            selected.append(index)
            continue
        zeros = index.new_zeros(index.numel(), dtype=torch.int64)
        selected += itertools.repeat(zeros, index.dim())
    return selected


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of tensors. Shared storage counts once."""
    return sum({_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # it has no public name
