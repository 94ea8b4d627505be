"""What our own optimizers share: an update that the device itself can call off."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class SkippableOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer that skips an update when `found_inf` says so, without asking the device.

    Torch's fused kernels read `found_inf` the same way. State is tensors only, and a resumed run
    continues to the same bits.
    """

    found_inf: Tensor | None = None
    """[] float, 1 where the gradients are not finite: nothing may change then."""

    @abstractmethod
    def state_shapes(self, parameter: nn.Parameter) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors it keeps for `parameter`, for reading a checkpoint."""

    @abstractmethod
    def update_parameter(
        self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], gate: Tensor
    ) -> Tensor:
        """Renew the parameter's state; what to subtract, before the learning rate.

        Args:
            parameter: as before the update.
            gradient: finite, of the parameter's shape, in float32.
            group: its options.
            gate: [] float32, 1, or 0 when the state must stay what it was.
        """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; decay is decoupled (AdamW's)."""
        for group, parameter, gradient in self._with_gradients():
            gate = self._gate(parameter.device)
            clean = torch.where(gate > 0, gradient.float(), 0.0)
            change = self.update_parameter(parameter, clean, group, gate)
            # State that was never filled may give NaN here, which no factor of 0 would remove.
            change = torch.where(gate > 0, change, 0.0)
            parameter.mul_(1.0 - gate * (group["lr"] * group["weight_decay"]))
            parameter.add_(change.to(parameter.dtype), alpha=-group["lr"])

    def _with_gradients(self) -> Iterator[tuple[dict[str, Any], nn.Parameter, Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter, parameter.grad

    def _gate(self, device: torch.device) -> Tensor:
        if self.found_inf is None:
            return torch.ones((), device=device)
        return (1.0 - self.found_inf).to(device)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """The parameter's state, zeros before its first update."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            for name, shape in self.state_shapes(parameter).items():  # type: ignore[arg-type]
                state[name] = torch.zeros(
                    shape, dtype=self.state_dtype(name), device=parameter.device
                )
        return state

    def state_dtype(self, name: str) -> torch.dtype:
        """Number format of a state entry."""
        return torch.float32
