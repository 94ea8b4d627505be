"""Rows computed at once, step by step, and fewer of them where memory runs out."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toque.errors import ConfigError
from toque.training.autotune.memory import is_out_of_memory


@dataclass
class OomFallback:
    """How many rows each update computes at once. It never changes what an update computes.

    Args:
        rows: at the beginning.
        smaller_from: step -> rows from there on, as earlier sessions found out. A step that is
            computed again after a resume is split as it was, so that its bits are the same.
        remember: keeps `smaller_from` for later sessions.
    """

    rows: int
    smaller_from: dict[int, int] = field(default_factory=dict)
    remember: Callable[[dict[int, int]], None] | None = None

    def at(self, step: int) -> int:
        """Rows at once in update `step`."""
        return min([self.rows, *(rows for s, rows in self.smaller_from.items() if s <= step)])

    def computed(
        self, step: int, compute: Callable[[int], Tensor], *, say: Callable[[str], None]
    ) -> Tensor:
        """`compute(rows at once)`, begun again with fewer rows each time memory runs out.

        Args:
            step: the update.
            compute: from the beginning of the update, forgetting any earlier try.
            say: takes a sentence for the user.

        Raises:
            ConfigError: one row is too much.
        """
        while True:
            rows = self.at(step)
            try:
                return compute(rows)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0]
            # Here the failed try's tensors, which the exception held, are gone.
            self._fewer(step, rows, reason, say)

    def _fewer(self, step: int, rows: int, reason: str, say: Callable[[str], None]) -> None:
        if rows == 1:
            raise ConfigError(
                f"Step {step} does not fit into memory with one row at once: {reason} The last "
                "checkpoint stands. Set train.gradient_checkpointing=true, a smaller "
                "train.row_tokens, or end what else uses the memory, and continue with the same "
                "command."
            )
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.smaller_from[step] = rows // 2
        if self.remember is not None:
            self.remember(self.smaller_from)
        say(
            f"step {step} ran out of memory with {rows} rows at once ({reason}); it is computed "
            f"again with {rows // 2}, and so are the following: the update stays the same"
        )
