"""Out of memory: halve the micro-batch and compute the update again; later ones stay small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from torch import Tensor

from toque.batch import Batch
from toque.errors import ConfigError
from toque.hardware.memory import is_out_of_memory, release_memory
from toque.training.autotune.resources import Resources
from toque.training.bottlenecks import RAN_OUT
from toque.training.callbacks import Callbacks, State
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.sharing import Sharing
from toque.units import Progress


@dataclass
class OomFallback:
    """Rows of a micro-batch in each update. They never change what an update computes.

    Args:
        rows: at the beginning.
        smaller_from: step -> rows from there on, as earlier sessions found out. A step that is
            computed again after a resume is split as it was, so that its bits are the same.
        remember: keeps `smaller_from` for later sessions.
        callbacks: take the warnings.
        resources: of which `rows` are; None where a checkpoint need not hold them.
    """

    rows: int
    smaller_from: dict[int, int] = field(default_factory=dict)
    remember: Callable[[dict[int, int]], None] | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)
    resources: Resources | None = None

    @classmethod
    def in_run(cls, run: Path, resources: Resources, callbacks: Callbacks, *, rank: int) -> Self:
        """The fallback of a run, which keeps in its folder where memory ran out."""

        def remember(smaller: dict[int, int]) -> None:
            replace(resources, smaller_from=dict(smaller)).save(run, rank=rank)

        rows, smaller = resources.micro_batch_rows, dict(resources.smaller_from)
        return cls(rows, smaller, remember, callbacks, resources)

    def for_checkpoint(self, ranks: Ranks) -> State:
        """The way updates are computed, for a checkpoint: it decides dropout masks and last bits.

        A collective: every rank calls it.
        """
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
        sharing: Sharing,
        batch: Batch,
        n_targets: int,
    ) -> Tensor:
        """`forward_backward(micro-batches, n_targets)`, again with smaller ones on out-of-memory.

        Args:
            at: progress before the update.
            forward_backward: begins by clearing the gradients of a failed attempt.
            sharing: makes the micro-batches, and knows whether this rank may begin again.
            batch: this rank's of the update.
            n_targets: passed on.

        Raises:
            ConfigError: one row is too much, or the other ranks are in the middle of an exchange.
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
