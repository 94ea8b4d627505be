"""Overfitting warning, when the held-out loss lies far above the training loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from toque.training.callbacks import Callback
from toque.training.events import State, StepInfo
from toque.training.state_values import count_in, flag_in, number_in
from toque.units import Progress

GAP: Final = 0.3
"""Share by which the held-out loss may lie above the training loss."""


@dataclass(eq=False)
class Overfitting(Callback):
    """Warns when held-out loss lies more than `GAP` above the training loss.

    Training loss is nats per target token over all updates since the last evaluation, with dropout
    and label smoothing. Both raise it, so they never cause a warning but may hide a small gap. It
    warns once, and again only after the gap has been smaller.

    Args:
        warn: takes the warning.
    """

    warn: Callable[[Progress, str], None]
    _nats: Tensor | float = 0.0
    _targets: int = 0
    _warned: bool = False

    def on_step(self, info: StepInfo) -> None:
        """Add up; on CUDA without waiting for the device."""
        self._nats = self._nats + info.loss.detach().double() * info.n_targets
        self._targets += info.n_targets

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Compare."""
        held_out, targets = metrics.get("loss"), self._targets
        if held_out is None or not targets:
            return
        trained = float(torch.as_tensor(self._nats)) / targets
        self._nats, self._targets = 0.0, 0
        above = held_out / trained - 1.0 if trained > 0 else 0.0
        if above > GAP and not self._warned:
            self.warn(
                at,
                f"the held-out loss ({held_out:.4f}) is {above:.0%} above the training loss "
                f"({trained:.4f}): the model learns its examples by heart. More data, fewer epochs "
                "(train.early_stopping), dropout, or a smaller model or adapter helps",
            )
        self._warned = above > GAP

    def state_dict(self) -> State:
        """The sums, so that a continued run compares the same updates."""
        nats = float(torch.as_tensor(self._nats))
        return {"nats": nats, "targets": self._targets, "warned": self._warned}

    def load_state_dict(self, state: State) -> None:
        """Restore them."""
        self._nats, self._targets = number_in(state, "nats"), count_in(state, "targets")
        self._warned = flag_in(state, "warned")
