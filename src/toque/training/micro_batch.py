"""Micro-batches: measurements of their time and memory, and a fallback if memory runs out."""

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

_BUDGET_SECONDS: Final = 4.0
"""Acceptable delay at the start of a run, in seconds. A guess."""
_MAX_TRIES: Final = 4


def shortest_time(
    measure: Callable[[], float],
    *,
    at_least: int = 2,
    budget_seconds: float = _BUDGET_SECONDS,
    most_seconds: float = math.inf,
) -> float:
    """Measure several times and return the shortest time in seconds.

    A single measurement may be far too long, because it loads kernels or because other programs
    use the cores.

    Args:
        measure: Function that measures once and returns seconds.
        at_least: Minimum number of measurements, at most 4.
        budget_seconds: Total time after which only the minimum number is measured.
        most_seconds: Total time after which the measurements end, even after the first.
    """
    measured: list[float] = []
    for _ in range(_MAX_TRIES):
        measured.append(measure())
        total = sum(measured)
        if total >= most_seconds:
            break
        if len(measured) >= at_least and total >= budget_seconds:
            break
    return min(measured)


class _LimitExceededError(Exception):
    """Exception that ends a forward pass when its activations exceed a limit."""


@dataclass
class Probe:
    """Measurement of forward and backward passes. It does not change weights or keep gradients."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    runtime: Runtime
    worst: Callable[[int], Batch]  # builds the largest batch with a number of rows

    def seconds(self, rows: int) -> float:
        """Measure the forward and backward passes of the largest batch with `rows` rows."""
        return self.seconds_of(self.worst(rows))

    def seconds_of(self, batch: Batch) -> float:
        """Measure the forward and backward passes of `batch` in seconds, including the device."""
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
        """Measure the bytes that a forward pass saves for the backward pass, without the weights.

        The forward pass stops at `limit` bytes, so it usually does not run out of memory.

        Returns:
            The bytes, or None if they exceed `limit` or memory runs out.
        """
        weights = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        count = _SavedBytes(weights, limit)
        self.model.train()
        batch = self.worst(rows).to(self.runtime.device)
        try:
            hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda t: t)
            with hooks, self.runtime.autocast():
                self.loss_fn(self.model, batch)
        except _LimitExceededError:
            return None
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not is_out_of_memory(error):
                raise
            return None
        return count.total


@dataclass
class _SavedBytes:
    """Hook that counts the bytes of the tensors that autograd saves, up to a limit."""

    counted: set[int]
    """Addresses of storages to leave out. It begins with the weights."""
    limit: int
    total: int = 0
    storages: list[UntypedStorage] = field(default_factory=list)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Count a saved tensor, and return the tensor to save.

        Raises:
            _LimitExceededError: The total exceeds the limit.
        """
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self.counted:
            self.counted.add(address)
            # Keep the storage: another storage at a freed address would not be counted.
            self.storages.append(storage)
            self.total += storage.nbytes()
            if self.total > self.limit:
                raise _LimitExceededError
        # Return an alias: an operation that saves its own result would otherwise be part of a
        # reference cycle, which keeps the graph alive until the process ends.
        return tensor.detach()


@dataclass(frozen=True)
class WorstBatch:
    """Builder of the largest possible batches, without data. Lengths are in tokens."""

    source: int  # number of source tokens in a row; 0 for a decoder-only model
    target: int  # target tokens of a row; all its tokens for a decoder-only model
    longest_source: int
    longest_target: int
    vocab_size: int

    def __call__(self, rows: int) -> Batch:
        """Build a batch with `rows` rows and no padding, in which every token has a loss.

        >>> WorstBatch(0, 5, 0, 3, 99)(1).segments.tolist()
        [[1, 1, 1, 2, 2]]
        """
        examples = math.ceil(self.target / max(1, self.longest_target))
        if self.source:
            examples = max(
                examples, math.ceil(self.source / max(1, self.longest_source))
            )
        example_ids = tuple(tuple(range(examples)) for _ in range(rows))

        def build_side(length: int) -> list[Tensor]:
            """Return tokens, segments and positions, [rows, length] each."""
            index = torch.arange(length)
            segments = index * examples // length  # lengths differ by at most one
            # First index of each segment: segments * length / examples, rounded up.
            starts = -(-segments * length // examples)
            row = (index % self.vocab_size, (segments + 1).int(), index - starts)
            return [values.expand(rows, -1).contiguous() for values in row]

        tokens, segments, positions = build_side(self.target)
        labels = tokens.clone()
        if not self.source:
            return DecoderBatch(labels, example_ids, tokens, segments, positions)
        source, source_segments, _ = build_side(self.source)
        return EncoderDecoderBatch(
            labels, example_ids, source, source_segments, tokens, segments
        )


@dataclass
class OomFallback:
    """Rows of a micro-batch in each update. They are halved when memory runs out.

    The number of rows affects only the last bits of an update. To be bitwise identical, an update
    that is repeated after a resume uses the same number of rows as before.
    """

    rows: int
    smaller_from: dict[int, int] = field(default_factory=dict)
    """Reduced rows per micro-batch after memory ran out, by the first step that uses them."""
    remember: Callable[[dict[int, int]], None] | None = None  # stores `smaller_from`
    callbacks: Callbacks = field(default_factory=Callbacks)
    resources: Resources | None = None  # choices that checkpoints record

    @classmethod
    def from_resources(
        cls, run: Path, resources: Resources, callbacks: Callbacks, *, rank: int
    ) -> Self:
        """Build the fallback for a run. It records every change in the run folder."""

        def remember(smaller_from: dict[int, int]) -> None:
            replace(resources, smaller_from=dict(smaller_from)).save(run, rank=rank)

        return cls(
            resources.micro_batch_rows,
            dict(resources.smaller_from),
            remember,
            callbacks,
            resources,
        )

    def checkpoint_record(self, ranks: Ranks) -> State:
        """Return the entry of a checkpoint's state with the rows, which affect the last bits.

        All ranks must call it.
        """
        smaller_from = ranks.all_gather(self.smaller_from)
        if self.resources is None:
            return {}
        return {"resources": self.resources.checkpoint_record(smaller_from)}

    def rows_at(self, step: int) -> int:
        """Return the rows of a micro-batch in update `step`."""
        halved = [rows for first, rows in self.smaller_from.items() if first <= step]
        return min([self.rows, *halved])

    def retry_with_fewer_rows(
        self,
        at: Progress,
        forward_backward: Callable[[Sequence[Batch], int], Tensor],
        sharing: DataParallel,
        batch: Batch,
        n_targets: int,
    ) -> Tensor:
        """Call `forward_backward(micro_batches, n_targets)`. If memory runs out, halve the rows.

        `forward_backward` must clear the gradients of a failed attempt.

        Raises:
            ConfigError: One row does not fit, or the ranks were in the middle of an exchange.
        """
        while True:
            rows = self.rows_at(at.step)
            try:
                return forward_backward(sharing.micro_batches(batch, rows), n_targets)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0]
            # Outside the except block, because the exception refers to tensors of the attempt.
            self._halve_rows(at, rows, reason, can_retry=sharing.can_retry)

    def _halve_rows(
        self, at: Progress, rows: int, reason: str, *, can_retry: bool
    ) -> None:
        """Halve the rows from this step on, record them, and warn the user.

        Raises:
            ConfigError: There is only one row, or this rank may not retry the update.
        """
        if rows == 1:
            raise ConfigError(
                f"Step {at.step} does not fit into memory with one row per micro-batch: {reason} "
                "The last checkpoint is unchanged. Set train.gradient_checkpointing=true or a "
                "smaller train.row_tokens, or end other programs that use the memory, and continue "
                "with the same command."
            )
        release_memory()
        self.smaller_from[at.step] = rows // 2
        if self.remember is not None:
            self.remember(self.smaller_from)
        if not can_retry:
            raise ConfigError(
                f"Step {at.step} {RAN_OUT} with {rows} rows per micro-batch ({reason}) while the "
                "ranks exchanged weights or gradients, so this rank could not retry it. The last "
                "checkpoint is unchanged. Rerun the same command to continue with "
                f"{rows // 2} rows per micro-batch."
            )
        self.callbacks.on_warning(
            at,
            f"step {at.step} {RAN_OUT} with {rows} rows per micro-batch ({reason}). It is "
            f"computed again with {rows // 2} rows, and so are the following steps. The updates "
            "do not change",
        )
