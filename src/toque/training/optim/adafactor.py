"""Adafactor: second moments of a matrix as one vector for its rows and one for its columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

from toque.training.optim.skippable import SkippableOptimizer

_EPS = 1e-30
_CLIP = 1.0
_DECAY = -0.8
"""Shazeer & Stern 2018, table 6: eps1, d and the exponent of beta2's schedule."""


@final
class Adafactor(SkippableOptimizer):
    """Shazeer & Stern 2018, algorithms 4 and 5, with the learning rate given from outside.

    With G the gradient, t the update's number and beta = 1 - t ** -0.8:

        R = beta R + (1 - beta) mean_columns(G^2 + 1e-30),  C likewise over rows
        U = G / sqrt(R C / mean(R));   U = U / max(1, rms(U));   W = W - lr U

    No momentum and no scaling by the parameter's size, so `lr` means what it means for Adam.
    State of an [m, n] matrix is m + n numbers where Adam keeps 2 m n.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})

    def state_shapes(self, parameter: nn.Parameter) -> dict[str, tuple[int, ...]]:
        """See the base."""
        shape = tuple(parameter.shape)
        if len(shape) < 2:
            return {"step": (), "square": shape}
        return {"step": (), "row_square": shape[:-1], "column_square": (*shape[:-2], shape[-1])}

    def update_parameter(
        self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], gate: Tensor
    ) -> Tensor:
        """See the base; formulas stand at the class."""
        state = self._state_of(parameter)
        state["step"] += gate
        weight = state["step"].clamp(min=1.0).pow(_DECAY) * gate  # 1 - beta
        square = gradient.square().add_(_EPS)
        if gradient.ndim < 2:
            state["square"].lerp_(square, weight)
            change = gradient * state["square"].rsqrt()
        else:
            rows, columns = state["row_square"], state["column_square"]
            rows.lerp_(square.mean(-1), weight)
            columns.lerp_(square.mean(-2), weight)
            scale = (rows / rows.mean(-1, keepdim=True)).rsqrt_()
            change = gradient * scale[..., None] * columns.rsqrt()[..., None, :]
        size = torch.linalg.vector_norm(change) / change.numel() ** 0.5
        clipped: Tensor = change / (size / _CLIP).clamp(min=1.0)
        return clipped
