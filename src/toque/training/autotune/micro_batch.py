"""How many rows to compute at once, found by computing the worst batch before the first update."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from toque.batch import Batch
from toque.training.autotune.memory import is_out_of_memory
from toque.training.runtime import Runtime

_BUDGET_SECONDS: Final = 4.0
"""Guess: what a person does not mind at the start of a run."""
_WORTH: Final = 0.95
"""Another size must be this much faster: what the clock tells on a shared machine is noise."""
HEADROOM: Final = 0.9
"""Of the free memory; fragments, and other programs, take some."""


class _TooMuch(Exception):  # noqa: N818  # control flow, not an error anyone sees
    pass


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes of an update at one row, by part; weights lie on the device already."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Of one row; at least, when it was found to be too much."""
    logits: int

    @property
    def fixed(self) -> int:
        """What has yet to be allocated whatever the number of rows."""
        return self.gradients + self.optimizer + self.logits


@dataclass
class Probe:
    """Computes batches forward and backward; gradients are thrown away, weights untouched.

    Args:
        model: on its device.
        loss_fn: as in the loop.
        runtime: number format and device.
        worst: makes the batch of so many rows.
    """

    model: nn.Module
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    runtime: Runtime
    worst: Callable[[int], Batch]

    def seconds(self, rows: int) -> float:
        """One forward and backward of `rows` worst rows, the device waited for."""
        return self.seconds_of(self.worst(rows))

    def seconds_of(self, batch: Batch) -> float:
        """The same of a batch of the run's."""
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
        """What autograd keeps of `rows` rows for backward; None when it is more than `limit`.

        Counted while forward runs, which is broken off at the limit, so that nothing is ever
        killed for asking.
        """
        weights = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        kept: dict[int, Tensor] = {}
        total = 0

        def note(tensor: Tensor) -> Tensor:
            nonlocal total
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights and storage.data_ptr() not in kept:
                kept[storage.data_ptr()] = tensor  # held, or its address would come again
                total += storage.nbytes()
                if total > limit:
                    raise _TooMuch
            return tensor

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


def evenly(update_rows: int, at_most: int) -> int:
    """Rows at once so that an update's micro-batches are as equal as can be.

    >>> evenly(30, 16), evenly(30, 40)
    (15, 30)
    """
    at_most = max(1, min(at_most, update_rows))
    pieces = -(-update_rows // at_most)
    return -(-update_rows // pieces)


def fastest_rows(
    seconds: Callable[[int], float],
    *,
    update_rows: int,
    guess: int,
    largest: int,
    budget_seconds: float = _BUDGET_SECONDS,
) -> tuple[int, dict[int, float]]:
    """The number of rows whose update is fastest, looked for around a guess.

    Args:
        seconds: of one micro-batch of so many rows.
        update_rows: rows of an update.
        guess: where to begin.
        largest: what memory allows.
        budget_seconds: no further size is tried when this is spent.

    Returns:
        The rows, and seconds of a micro-batch by the sizes tried.
    """
    tried: dict[int, float] = {}
    spent = 0.0

    def try_out(rows: int) -> float:
        """Seconds a row."""
        nonlocal spent
        if rows not in tried:
            if not tried:
                spent += seconds(rows)  # the first call loads and chooses kernels
            # Twice when that is cheap: the better of the two is nearer the truth.
            runs = [seconds(rows)]
            if spent + 2 * runs[0] < budget_seconds / 2:
                runs.append(seconds(rows))
            tried[rows] = min(runs)
            spent += sum(runs)
        return tried[rows] / rows

    best = evenly(update_rows, min(guess, largest))
    try_out(best)
    for factor in (2.0, 0.5):
        moved = False
        while spent < budget_seconds:
            rows = evenly(update_rows, min(max(1, int(best * factor)), largest))
            if rows in tried or try_out(rows) > _WORTH * (tried[best] / best):
                break
            best, moved = rows, True
        if moved:
            break  # it got better one way; the other way was where it came from
    return best, tried


def largest_rows(
    fits: Callable[[int], int | None], *, update_rows: int, free: Callable[[], int]
) -> int:
    """The largest number of rows that was tried and fitted, on a device of its own memory.

    Args:
        fits: computes so many rows; the peak of what it allocated in bytes, or None.
        update_rows: rows of an update; never more.
        free: bytes the device has to give.

    Returns:
        At least 1; that one row fits is for the caller to know.
    """
    one = fits(1)
    two = fits(2) if update_rows > 1 else None
    if one is None or two is None:
        return 1
    each, room = max(1, two - one), HEADROOM * free() - one
    rows = evenly(update_rows, max(2, 1 + int(room // each)))
    while rows > 2 and fits(rows) is None:
        rows = evenly(update_rows, max(2, int(0.85 * rows)))
    return rows
