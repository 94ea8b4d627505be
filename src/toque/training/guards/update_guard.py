"""Whether updates are sound: the loop asks before it saves, evaluates or goes on for long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

from torch import Tensor

from toque.batch import Batch
from toque.errors import NonFiniteError
from toque.training.callbacks import Callbacks
from toque.training.guards.nonfinite import NonFiniteGuard
from toque.training.guards.skip_step import Outliers
from toque.training.runtime import Runtime
from toque.units import Progress


@final
@dataclass
class UpdateGuard:
    """Ends the run at what is not a number, or, with `outliers`, leaves it out and goes on.

    Args:
        guard: where no update may be left out.
        outliers: None for not leaving any out.
        runtime: whose loss scale is watched.
        callbacks: told of what was left out.
    """

    guard: NonFiniteGuard
    outliers: Outliers | None
    runtime: Runtime
    callbacks: Callbacks

    def accepts(self, step: int, loss: Tensor, batch: Batch) -> Callable[..., Tensor] | None:
        """`(grad_norm=)` -> [] bool: whether to apply the update; None where all are."""
        if self.outliers is None:
            return None
        return partial(self.outliers.accepts, step=step, loss=loss, batch=batch)

    def add(self, step: int, lr: float, loss: Tensor, grad_norm: Tensor, batch: Batch) -> None:
        """Take note of an update that has been computed."""
        if self.outliers is None:
            self.guard.add(step=step, lr=lr, loss=loss, grad_norm=grad_norm, batch=batch)

    def check(self, at: Progress) -> None:
        """Judge the updates since the last call; waits for the device.

        Raises:
            NonFiniteError: one of them is not finite, or float16 overflows whatever its scale.
        """
        self.guard.check()
        if self.outliers is not None:
            for sentence in self.outliers.told():
                self.callbacks.on_warning(at, sentence)
        if self.runtime.scale_is_hopeless:
            raise NonFiniteError(
                f"Step {at.step} overflows float16 at every loss scale. Use precision bf16 or "
                "float32."
            )
