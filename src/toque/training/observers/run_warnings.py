"""Run warnings: waits for batches, a held-out loss far above that of training, a replaced store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from toque.data.store.token_store import TokenStore, refuse_replaced
from toque.training.bottlenecks import DATA_ADVICE, DATA_SHARE
from toque.training.callbacks import Callback, RunStart, State, StepInfo
from toque.training.observers.metrics_log import StepWindow
from toque.training.state_values import count_in, flag_in, number_in
from toque.units import Progress

GAP: Final = 0.3
"""Share by which the held-out loss may lie above the training loss."""
_UPDATES: Final = 50
"""Updates judged together, so that a single cold read of the disk is no verdict."""


@dataclass(eq=False)
class DataBound(Callback):
    """Warns when the loop waits for data longer than `DATA_SHARE` of the time.

    Batches are prefetched by a thread, so a loop waits only if they take longer to make than to
    train on. It warns once, and again only after things were better for a while.

    Args:
        warn: takes the warning.
        updates: judged together; the first of a session is left out, as nothing was prefetched.
    """

    warn: Callable[[Progress, str], None]
    updates: int = _UPDATES
    _window: StepWindow | None = None
    _warned: bool = False

    def on_fit_start(self, start: RunStart) -> None:
        """Start a new window."""
        self._window = None

    def on_step(self, info: StepInfo) -> None:
        """Add up, and judge once the window is full."""
        if self._window is None:
            self._window = StepWindow()
            return
        if info.slowed:
            return
        window = self._window
        window.add(info)
        if window.n_steps < self.updates:
            return
        self._window = StepWindow()
        waited = window.waiting_share
        if waited > DATA_SHARE and not self._warned:
            self.warn(
                info.progress,
                f"data-bound {waited:.0%}: of the time of the last {window.n_steps} updates so "
                f"much went into waiting for batches. {DATA_ADVICE}",
            )
        self._warned = waited > DATA_SHARE


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


@dataclass(frozen=True)
class StoreWatch(Callback):
    """Looks before every evaluation and save whether the store is the one the run began with.

    A lock keeps `prepare` away where the file system has locks; this holds elsewhere, too.
    """

    store: TokenStore

    def on_before_evaluate(self, at: Progress) -> None:
        """Refuse, as `on_before_save` does, to continue with a store that was replaced or removed.

        Raises:
            DataError: it was.
        """
        refuse_replaced(self.store)

    on_before_save = on_before_evaluate
