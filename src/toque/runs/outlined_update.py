"""Outlined update: bytes and operations of one micro-batch and of the optimizer, from shapes alone.

Under `FakeTensorMode` a forward and a backward take no memory and no time worth naming, and still
create and free every tensor in the order of a real one. The ledger watches that.

Peak FLOP/s for model FLOPs utilisation are data sheets' for known GPUs, else measured, in the run's
precision at the model's own shapes: both change it several times over. Its origin is recorded, too.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
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

from toque.hardware.cards import card_of_device
from toque.hardware.onednn import onednn_is_faster, product
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
_GPU_BLOCK: Final = 512  # bytes to whose multiple CUDA's caching allocator rounds a tensor
_TRIES: Final = 3
_SLOW_SECONDS: Final = 0.2
"""An operation that takes longer is timed twice, not three times: the first loads kernels."""


@dataclass(frozen=True)
class _Like:
    """Shape, strides and format of a tensor that an operation was given."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """A tensor like it; indices are zero, numbers small and random."""
        ends = ((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        n = 1 + sum(ends) if all(self.shape) else 0
        if self.dtype.is_floating_point:
            flat = torch.rand(n).to(self.dtype)
        else:
            flat = torch.zeros(n, dtype=self.dtype)
        return flat.as_strided(self.shape, self.strides)


@dataclass
class Operations:
    """Operations of an update: each distinct one once with its arguments, and how often it runs."""

    calls: dict[str, tuple[Any, list[Any], Any]] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)

    def add(self, function: Any, args: Any, kwargs: Any) -> None:
        """Count one run."""
        flat, structure = tree_flatten((args, kwargs))
        like = [
            _Like(tuple(a.shape), a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in flat
        ]
        key = repr((str(function), like, structure))
        self.calls.setdefault(key, (function, like, structure))
        self.runs[key] += 1

    @torch.no_grad()
    def seconds(self) -> float:
        """Seconds of all of them on this machine's CPU, by the fastest of a few runs of each."""
        total = 0.0
        with torch.random.fork_rng(devices=[]):
            for key, (function, like, structure) in self.calls.items():
                flat = [a.tensor() if isinstance(a, _Like) else a for a in like]
                args, kwargs = tree_unflatten(flat, structure)
                best = float("inf")
                for n in range(_TRIES):
                    begun = time.perf_counter()
                    function(*args, **kwargs)
                    best = min(best, time.perf_counter() - begun)
                    if n and best > _SLOW_SECONDS:
                        break
                total += self.runs[key] * best
        return total


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of the tensors that live now, the most there were, and FLOPs of products."""

    def __init__(self, operations: Operations | None = None, *, block: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block = block
        self.now = self.peak = 0
        self.flops, self.operations = 0.0, operations
        self._live: dict[int, tuple[Any, int]] = {}
        self._labels_found = False

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor that was there before."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001  # it has no public name
        if key in self._live:
            return
        size = -(-storage.nbytes() // self._block) * self._block
        self._live[key] = (weakref.ref(storage, lambda _: self._freed(key)), size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _freed(self, key: int) -> None:
        self.now -= self._live.pop(key)[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and note what it made."""
        if func is _ATEN.nonzero.default:
            return self._found(args[0])
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self.hold(tensor)
        packet = func._overloadpacket  # noqa: SLF001  # it has no public name
        counted = flop_registry.get(_ATEN.addmm if packet is _ATEN.addmm_ else packet)
        if counted is not None:
            self.flops += float(counted(*args, **(kwargs or {}), out_val=result))
        if self.operations is not None:
            self.operations.add(func, args, kwargs or {})
        return result

    def _found(self, wanted: Tensor) -> Tensor:
        """Indices, which no shape tells: all labels have one, and exceptions after them none."""
        n = 0 if self._labels_found else wanted.numel()
        self._labels_found = True
        found = wanted.new_empty((n, wanted.dim()), dtype=torch.int64)
        self.hold(found)
        return found


@dataclass(frozen=True)
class OutlinedUpdate:
    """Bytes and work of an update's parts, from the second micro-batch on."""

    weights: int
    copies: int  # 16-bit ones of the weights, which layers keep from one update to the next
    gradients: int
    optimizer: int  # its state, once every weight was updated
    computing: int  # the most that forward, loss and backward take beside all of these
    kept: int  # what forward keeps of that for backward
    step: int  # what the optimizer's step takes for itself while it runs
    flops: float  # of the micro-batch's matrix products
    micro_batch: Operations
    update: Operations


@contextmanager
def outlining() -> Iterator[FakeTensorMode]:
    """A context in which tensors have shapes and no content."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        causal_mask.cache_clear()  # no mask without content stays for a training that follows


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
    """Run a micro-batch forward and backward, and the optimizer's step, on shapes, in `outlining`.

    `model` has the layers of `where`; `optimizer` is None where its step reads numbers, which
    shapes lack, and has `state_bytes` once every weight was updated. With `accumulates` the
    gradients of earlier micro-batches exist already; `operations` are listed, to be timed.
    """
    model.train()
    for parameter in model.parameters():
        parameter.grad = None
        if accumulates and parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    held = [*model.parameters(), *(b for _, q in quantised_layers(model) for b in q.buffers())]
    weights = sum({_key(t): t.untyped_storage().nbytes() for t in held}.values())
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trained)
    before = gradients if accumulates else 0
    computed, updated = Operations(), Operations()
    plans = None
    if where == "cuda":
        use_attention(model, "dense" if masked else "flex")
    else:
        with unset_fake_temporarily():
            plans = cpu_plans(rows)
    if recompute:
        recompute_blocks(model)
    try:
        block = _GPU_BLOCK if where == "cuda" else 1
        with (
            _Ledger(computed if operations else None, block=block) as ledger,
            as_on_a_gpu() if where == "cuda" else nullcontext(),
        ):
            for tensor in held:
                ledger.hold(tensor)
                if tensor.grad is not None:
                    ledger.hold(tensor.grad)
            half = precision != "float32"
            with torch.autocast("cpu", dtype=DTYPES[precision]) if half else nullcontext():
                loss, kept = _outlined_loss(model, rows, plans, smoothing, ledger)
            # Not by torch.autograd.backward, which would leave the GPU's operators behind.
            torch.autograd.Variable._execution_engine.run_backward(  # noqa: SLF001
                (loss,), (torch.ones_like(loss),), False, False, (),
                allow_unreachable=True, accumulate_grad=True,
            )  # fmt: skip
    finally:
        stop_recomputing(model)
    kept_copies = (copy for module in model.modules() for copy in copies_of(module))
    copies = sum({_key(c): c.untyped_storage().nbytes() for c in kept_copies}.values())
    peak = max(ledger.peak, weights + copies + gradients)
    return OutlinedUpdate(
        weights=weights,
        copies=copies,
        gradients=gradients,
        optimizer=state_bytes,
        computing=max(0, peak - weights - copies - gradients),
        kept=max(0, kept - weights - copies - before),
        step=_step_bytes(trained, optimizer, updated if operations else None),
        flops=ledger.flops,
        micro_batch=computed,
        update=updated,
    )


def _outlined_loss(
    model: PreTrainedModel,
    rows: OutlinedRows,
    plans: tuple[AttentionPlan, AttentionPlan] | None,
    smoothing: float,
    ledger: _Ledger,
) -> tuple[Tensor, int]:
    """The loss, and the bytes there are before its head; a CPU has plans."""
    if plans is None:
        batch, n_labels = outlined_batch(rows), rows.rows * rows.target
        hidden, labels = hidden_states(model, batch), batch.labels
    else:
        hidden, n_labels = outlined_hidden(model, rows, plans), None
        labels = torch.zeros(hidden.shape[:-1], dtype=torch.int64)
    kept, (weight, bias) = ledger.now, output_head(model)
    how: Any = {"bias": bias, "smoothing": smoothing, "n_labels": n_labels, "cap": logit_cap(model)}
    return cross_entropy_sum(hidden, weight, labels, **how), kept


def _step_bytes(
    trained: list[nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    operations: Operations | None,
) -> int:
    """Bytes that the optimizer's second step takes beside weights, gradients and state."""
    if optimizer is None:  # such an optimizer computes in float32, one weight after the other
        return max((4 * p.numel() for p in trained), default=0)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    with _Ledger(operations) as ledger:
        state = [value for of in optimizer.state.values() for value in of.values()]
        for tensor in (*trained, *(p.grad for p in trained), *state):
            if isinstance(tensor, Tensor):
                ledger.hold(tensor)
        before = ledger.now
        optimizer.step()
    return int(ledger.peak - before)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # it has no public name


_KINDS: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_MEASURE_SECONDS: Final = 0.2
_ROUNDS: Final = 2  # fewest rounds of each shape: the first loads and chooses kernels
_FEW_TOKENS, _MANY_TOKENS = 512, 4096
_FLOPS_OF_A_ROUND: Final = 2e10
"""Fewer tokens for large matrices, such as the output head's, so that a round stays short."""
Products = Mapping[tuple[int, int], float]
"""FLOPs spent in products with matrices, by their (in, out), as `models.flops.products_of` has."""


@dataclass(frozen=True)
class Peak:
    """Floating-point operations per second, and where the figure comes from."""

    flops_per_second: float
    origin: str

    @property
    def too_low(self) -> str:
        """Sentence in place of a use over 100 %: what is wrong with the peak, and what to do."""
        if self.origin.startswith("measured"):
            return (
                f"the updates are faster than the peak speed of this machine ({self.origin}), so "
                "other programs probably slowed its measurement; the next session measures it "
                "again, so end them first"
            )
        return (
            f"the updates are faster than the peak speed of this machine ({self.origin}), which "
            "is that of a slower device"
        )

    def of_ranks(self, ranks: int) -> Peak:
        """Peak of all ranks together, each on a device of its own."""
        if ranks == 1:
            return self
        rate = self.flops_per_second
        return Peak(rate * ranks, f"{ranks} ranks of {rate:.3g}; {self.origin}")


def peak_of(device: torch.device, dtype: torch.dtype, products: Products) -> Peak:
    """The peak of dense products: stated for known GPUs in 16 bits, otherwise measured in 0.2 s."""
    if device.type == "cuda" and dtype in {torch.bfloat16, torch.float16}:
        name = torch.cuda.get_device_name(device)
        card = card_of_device(name)
        rate = card.flops_per_second.get(_KINDS[dtype]) if card is not None else None
        if rate is not None:
            return Peak(rate, f"stated for {name}, dense 16-bit")
    return measure_peak(device, dtype, products)


def measure_peak(
    device: torch.device, dtype: torch.dtype, products: Products, *, seconds: float | None = None
) -> Peak:
    """The rate of `products` one after another, forward and both gradients, each at its best.

    All are tried for `seconds` together, a fifth of one by default, and each for two rounds.
    """
    share = (_MEASURE_SECONDS if seconds is None else seconds) / len(products)
    needed = sum(
        flops / _rate(shape, device, dtype, seconds=share) for shape, flops in products.items()
    )
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    kind = str(dtype).removeprefix("torch.")
    origin = f"measured in {kind}, products of {len(products)} shapes{threads}"
    return Peak(sum(products.values()) / needed, origin)


def _rate(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, *, seconds: float
) -> float:
    """FLOP/s of one layer's products: y = x W', and the gradients of x and W."""
    n_in, n_out = shape
    of_a_token = 6 * n_in * n_out
    n = int(min(_MANY_TOKENS, max(_FEW_TOKENS, _FLOPS_OF_A_ROUND / of_a_token)))
    x = torch.randn(n, n_in, dtype=dtype, device=device)
    w = torch.randn(n_out, n_in, dtype=dtype, device=device)
    dy = torch.randn(n, n_out, dtype=dtype, device=device)
    by_onednn = device.type == "cpu" and dtype == torch.float32 and onednn_is_faster()
    best, rounds, end = float("inf"), 0, time.perf_counter() + seconds
    while rounds < _ROUNDS or time.perf_counter() < end:
        begun = time.perf_counter()
        if by_onednn:
            _ = product(x, w), product(dy, w.t()), product(dy.t(), x.t())
        else:
            _ = x @ w.t(), dy @ w, dy.t() @ x
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best, rounds = min(best, time.perf_counter() - begun), rounds + 1
    return n * of_a_token / best
