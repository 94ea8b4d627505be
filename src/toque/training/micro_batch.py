"""Rows computed at once: as many as fit, and half as many where memory runs out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

import torch
from torch import Tensor, UntypedStorage, nn

from toque.batch import Batch, DecoderBatch, EncoderDecoderBatch
from toque.errors import ConfigError
from toque.hardware.memory import is_out_of_memory, release_memory
from toque.training.bottlenecks import RAN_OUT
from toque.training.callbacks import Callbacks, State
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.data_parallel import DataParallel
from toque.training.resources import Resources
from toque.training.runtime import Runtime
from toque.units import Progress

_BUDGET_SECONDS: Final = 4.0  # guess: a wait nobody minds at the start of a run
_TRIES: Final = 4


def least_of(
    seconds: Callable[[], float],
    *,
    at_least: int = 2,
    budget_seconds: float = _BUDGET_SECONDS,
    most_seconds: float = math.inf,
) -> float:
    """The least of `at_least` measurements, and of more while they take less than the budget.

    Loading kernels, and other programs on the cores, make a single one longer by any factor.
    `most_seconds`: end after the measurement that reaches it, even if it is the first.
    """
    found: list[float] = []
    while len(found) < at_least or (len(found) < _TRIES and sum(found) < budget_seconds):
        found.append(seconds())
        if sum(found) >= most_seconds:
            break
    return min(found)


class _TooMuch(Exception):  # noqa: N818  # control flow, not an error anyone sees
    pass


@dataclass
class Probe:
    """Computes batches forward and backward; gradients are thrown away, weights untouched.

    `worst` makes the worst batch of a number of rows.
    """

    model: nn.Module
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    runtime: Runtime
    worst: Callable[[int], Batch]

    def seconds(self, rows: int) -> float:
        """One forward and backward of `rows` worst rows, the device waited for."""
        return self.seconds_of(self.worst(rows))

    def seconds_of(self, batch: Batch) -> float:
        """One forward and backward of `batch`, which is a batch of the run."""
        device = self.runtime.device
        self.model.train()
        batch = batch.to(device)
        started = time.perf_counter()
        try:
            with self.runtime.autocast():
                loss = self.loss_fn(self.model, batch)
            torch.autograd.backward(loss)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - started
        finally:
            self.model.zero_grad(set_to_none=True)

    def activation_bytes(self, rows: int, limit: int) -> int | None:
        """Bytes that autograd keeps of `rows` rows for backward; None if more than `limit`.

        Forward stops at the limit, so that measuring never runs out of memory.
        """
        weights = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        kept: dict[int, UntypedStorage] = {}
        total = 0

        def note(tensor: Tensor) -> Tensor:
            nonlocal total
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights and storage.data_ptr() not in kept:
                kept[storage.data_ptr()] = storage  # kept alive, or its address would be reused
                total += storage.nbytes()
                if total > limit:
                    raise _TooMuch
            # Not the tensor itself: an operation that saves its own result would then keep itself
            # alive, and with it all that led to it, for as long as the process lives.
            return tensor.detach()

        self.model.train()
        batch = self.worst(rows).to(self.runtime.device)
        try:
            hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
            with hooks, self.runtime.autocast():
                self.loss_fn(self.model, batch)
        except _TooMuch:
            return None
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        return total


@dataclass(frozen=True)
class WorstBatch:
    """Makes worst batches without reading data; every token has loss. Lengths are in tokens."""

    source: int  # a row's source side; 0 for a decoder-only model
    target: int  # its target side, or the whole row
    longest_source: int
    longest_target: int  # of one example: its target, or all of it
    vocab_size: int

    def __call__(self, rows: int) -> Batch:
        """A batch of `rows` rows, without padding.

        >>> WorstBatch(0, 5, 0, 3, 99)(1).segments.tolist()
        [[1, 1, 1, 2, 2]]
        """
        examples = -(-self.target // max(1, self.longest_target))
        if self.source:
            examples = max(examples, -(-self.source // max(1, self.longest_source)))
        ids = tuple(tuple(range(examples)) for _ in range(rows))
        targets, positions = _segments(self.target, examples)
        tokens = (torch.arange(self.target) % self.vocab_size).expand(rows, -1).contiguous()
        segments = targets.expand(rows, -1).contiguous()
        if not self.source:
            places = positions.expand(rows, -1).contiguous()
            return DecoderBatch(tokens.clone(), ids, tokens, segments, places)
        sources, _ = _segments(self.source, examples)
        source = (torch.arange(self.source) % self.vocab_size).expand(rows, -1).contiguous()
        own = sources.expand(rows, -1).contiguous()
        return EncoderDecoderBatch(tokens.clone(), ids, source, own, tokens, segments)


def _segments(length: int, examples: int) -> tuple[Tensor, Tensor]:
    """[length] segment numbers from 1, as equal as can be, and positions within each."""
    at = torch.arange(length)
    numbers = at * examples // length
    starts = -(-numbers * length // examples)
    return (numbers + 1).int(), at - starts


@dataclass
class OomFallback:
    """Rows of a micro-batch in each update. They never change what an update computes.

    `smaller_from` maps a step to the rows from there on, as earlier sessions found out: a step that
    is computed again after a resume is split as it was, so that its bits are the same.
    """

    rows: int
    smaller_from: dict[int, int] = field(default_factory=dict)
    remember: Callable[[dict[int, int]], None] | None = None  # keeps it for later sessions
    callbacks: Callbacks = field(default_factory=Callbacks)
    resources: Resources | None = None  # None where a checkpoint need not hold them

    @classmethod
    def in_run(cls, run: Path, resources: Resources, callbacks: Callbacks, *, rank: int) -> Self:
        """The fallback of a run, which keeps in its folder where memory ran out."""

        def remember(smaller: dict[int, int]) -> None:
            replace(resources, smaller_from=dict(smaller)).save(run, rank=rank)

        rows, smaller = resources.micro_batch_rows, dict(resources.smaller_from)
        return cls(rows, smaller, remember, callbacks, resources)

    def for_checkpoint(self, ranks: Ranks) -> State:
        """The way updates are computed, which decides their last bits; every rank calls it."""
        smaller_from = ranks.all_gather(self.smaller_from)
        if self.resources is None:
            return {}
        return {"resources": self.resources.for_checkpoint(smaller_from)}

    def rows_at(self, step: int) -> int:
        """Rows of a micro-batch in update `step`."""
        return min([self.rows, *(rows for s, rows in self.smaller_from.items() if s <= step)])

    def run(
        self,
        at: Progress,
        forward_backward: Callable[[Sequence[Batch], int], Tensor],
        sharing: DataParallel,
        batch: Batch,
        n_targets: int,
    ) -> Tensor:
        """`forward_backward(micro-batches, n_targets)`, again with smaller ones on out-of-memory.

        It begins by clearing the gradients of a failed attempt. A ConfigError where one row is too
        much, or the other ranks are in the middle of an exchange.
        """
        while True:
            rows = self.rows_at(at.step)
            try:
                return forward_backward(sharing.micro_batches(batch, rows), n_targets)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0]
            # Here the failed attempt's tensors, which the exception held, are freed.
            self._halve(at, rows, reason, again=sharing.may_repeat)

    def _halve(self, at: Progress, rows: int, reason: str, *, again: bool) -> None:
        if rows == 1:
            raise ConfigError(
                f"Step {at.step} does not fit into memory with one row at once: {reason} The last "
                "checkpoint stands. Set train.gradient_checkpointing=true, a smaller "
                "train.row_tokens, or end what else uses the memory, and continue with the same "
                "command."
            )
        release_memory()
        self.smaller_from[at.step] = rows // 2
        if self.remember is not None:
            self.remember(self.smaller_from)
        if not again:
            raise ConfigError(
                f"Step {at.step} {RAN_OUT} with {rows} rows at once ({reason}), while the ranks "
                "were exchanging weights or gradients, so that this one could not begin it again. "
                f"The last checkpoint stands, and the same command continues with {rows // 2} rows "
                "at once."
            )
        self.callbacks.on_warning(
            at,
            f"step {at.step} {RAN_OUT} with {rows} rows at once ({reason}); it is computed "
            f"again with {rows // 2}, and so are the following: the update stays the same",
        )
