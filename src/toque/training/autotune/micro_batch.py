"""Micro-batch size: the largest that fits, found by trying the worst batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, UntypedStorage, nn

from toque.batch import Batch, DecoderBatch, EncoderDecoderBatch
from toque.hardware.memory import is_out_of_memory
from toque.training.runtime import Runtime

_BUDGET_SECONDS: Final = 4.0
"""Guess: a wait nobody minds at the start of a run."""
_TRIES: Final = 4


def least_of(
    seconds: Callable[[], float], *, at_least: int = 2, budget_seconds: float = _BUDGET_SECONDS
) -> float:
    """The least of `at_least` measurements, and of more while they take less than the budget.

    Loading kernels, and other programs on the cores, make a single one longer by any factor.
    """
    found: list[float] = []
    while len(found) < at_least or (len(found) < _TRIES and sum(found) < budget_seconds):
        found.append(seconds())
    return min(found)


class _TooMuch(Exception):  # noqa: N818  # control flow, not an error anyone sees
    pass


@dataclass
class Probe:
    """Computes batches forward and backward; gradients are thrown away, weights untouched.

    Args:
        model: on its device.
        loss_fn: as in the loop.
        runtime: number format and device.
        worst: makes the worst batch of a number of rows.
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

        Counted during forward, which stops at the limit, so that measuring never runs out of
        memory.
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
    """Makes worst batches without reading data; every token has loss.

    Args:
        source: tokens of a row's source side; 0 for a decoder-only model.
        target: tokens of its target side, or of the whole row.
        longest_source: tokens of the longest example's source.
        longest_target: of its target, or of the whole example.
        vocab_size: token ids are below it.
    """

    source: int
    target: int
    longest_source: int
    longest_target: int
    vocab_size: int

    def __call__(self, rows: int) -> Batch:
        """A batch of `rows` rows, without padding.

        >>> WorstBatch(0, 5, 0, 3, 99)(1).segments.tolist()
        [[1, 1, 2, 2, 2]]
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
