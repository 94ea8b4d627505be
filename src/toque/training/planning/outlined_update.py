"""Outlined update: memory and work of one micro-batch and of the optimizer, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import PreTrainedModel

from toque.models.forward.activation_checkpointing import recompute_blocks, stop_recomputing
from toque.models.forward.bf16_linear import copies_of
from toque.models.forward.cross_entropy import cross_entropy_sum, usual_chunk_rows
from toque.models.forward.grouped_attention import causal_mask
from toque.models.forward.outline import CpuPlans, OutlinedRows, Where, outlined_hidden
from toque.models.forward.packed import output_head
from toque.models.lora.quantised import quantised_layers
from toque.training.optim.factory import build_optimizer, state_bytes
from toque.training.planning.ledger import Ledger

_BY_VALUES: Final = ("adamw8bit", "adafactor")
"""Optimizers whose step reads numbers, which an outline has not."""
_LITTLE: Final = 1e-12
_HALF: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class OutlinedUpdate:
    """Bytes and work of an update's parts; from the second micro-batch on."""

    weights: int
    copies: int
    """16-bit copies of the weights that layers keep from one update to the next."""
    gradients: int
    optimizer: int
    """Its state, once every weight was updated."""
    computing: int
    """The most that forward, loss and backward take beside all of these."""
    kept: int
    """Of that, what forward keeps for backward."""
    step: int
    """What the optimizer's step takes for itself while it runs."""
    products: Mapping[str, float]
    """FLOPs of the micro-batch's matrix products, plain and batched."""

    @property
    def fixed(self) -> int:
        """Bytes that stay from update to update."""
        return self.weights + self.copies + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The most at any moment."""
        return self.fixed + max(self.computing, self.step)


@contextmanager
def outlining() -> Iterator[FakeTensorMode]:
    """A context in which tensors have shapes and no content.

    Tables that the process keeps are made before, or thrown away after, so that none without
    content stays behind for a training that follows.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        causal_mask.cache_clear()


def outline_update(
    model: PreTrainedModel,
    rows: OutlinedRows,
    *,
    where: Where,
    precision: str,
    optimizer: str,
    accumulates: bool,
    recompute: bool = False,
    smoothing: float = 0.0,
    masked: bool = False,
) -> OutlinedUpdate:
    """Run a micro-batch forward and backward, and the optimizer's step, on shapes.

    Args:
        model: an outlined one, its layers those of `where`; inside `outlining`.
        rows: the micro-batch.
        where: the kind of device.
        precision: bf16, fp16 or float32.
        optimizer: its name in the configuration.
        accumulates: whether an update has more micro-batches than one: then the gradients of those
            before are there already.
        recompute: with activation checkpointing.
        smoothing: of labels.
        masked: whether a GPU's attention has dense masks.
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
    with unset_fake_temporarily():
        plans = CpuPlans.of(rows)
    if recompute:
        recompute_blocks(model)
    try:
        with Ledger() as ledger:
            for tensor in held:
                ledger.hold(tensor)
                if tensor.grad is not None:
                    ledger.hold(tensor.grad)
            half = _HALF.get(precision)
            with torch.autocast("cpu", dtype=half) if half is not None else nullcontext():
                hidden = outlined_hidden(model, rows, where, plans, masked=masked)
                kept = ledger.now
                loss = _outlined_loss(model, hidden, where, smoothing)
            torch.autograd.backward(loss)
    finally:
        stop_recomputing(model)
    copies = _copies(model)
    state, step = _step(model, optimizer)
    peak = max(ledger.peak, weights + copies + gradients)
    return OutlinedUpdate(
        weights=weights,
        copies=copies,
        gradients=gradients,
        optimizer=state,
        computing=max(0, peak - weights - copies - gradients),
        kept=max(0, kept - weights - copies - before),
        step=step.peak if step else max((4 * p.numel() for p in trained), default=0),
        products=dict(ledger.products),
    )


def _outlined_loss(
    model: PreTrainedModel, hidden: torch.Tensor, where: Where, smoothing: float
) -> torch.Tensor:
    weight, bias = output_head(model)
    labels = torch.zeros(hidden.shape[:-1], dtype=torch.int64)
    chunk = None
    if where == "cuda":
        # A CPU's way for 16 bits is not a GPU's; with smoothing, however little, it is left.
        smoothing = max(smoothing, _LITTLE)
        chunk = usual_chunk_rows(len(weight), "cuda")
    return cross_entropy_sum(
        hidden, weight, labels, bias=bias, smoothing=smoothing, chunk_rows=chunk
    )


def _step(model: nn.Module, name: str) -> tuple[int, Ledger | None]:
    """Bytes of the optimizer's state, and what its second step does beside it."""
    optimizer = build_optimizer(model, name=name)
    if name in _BY_VALUES:
        return state_bytes(optimizer), None
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    with Ledger() as ledger:
        held = list(model.parameters()) + [
            value for state in optimizer.state.values() for value in state.values()
        ]
        for tensor in (*held, *(p.grad for p in model.parameters())):
            if isinstance(tensor, torch.Tensor):
                ledger.hold(tensor)
        before = ledger.now
        optimizer.step()
    ledger.peak -= before
    return state_bytes(optimizer), ledger


def _copies(model: nn.Module) -> int:
    """Bytes of the 16-bit copies that layers keep (`models.forward.bf16_linear`)."""
    found: dict[int, int] = {}
    for module in model.modules():
        stacked = getattr(vars(module).get("_toque_stacked"), "copy", None)
        own = (copy for p in module.parameters(recurse=False) for copy in copies_of(p))
        for tensor in (stacked, *own):
            if isinstance(tensor, torch.Tensor):
                found[_key(tensor)] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # it has no public name
