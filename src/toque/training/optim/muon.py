"""Muon for the matrices inside the model, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from toque.training.optim.skippable import SkippableOptimizer

_MOMENTUM: Final = 0.95
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_ITERATIONS: Final = 5
"""Jordan et al. 2024, kellerjordan.github.io/posts/muon: the values all implementations share."""
_RMS: Final = 0.2
"""Liu et al. 2025, arXiv 2502.16982, eq. 4: the usual size of AdamW's updates."""
_TINY: Final = 1e-7


def orthogonalised(matrix: Tensor) -> Tensor:
    """U V^T of `matrix` = U S V^T, singular values left between about 0.7 and 1.2.

    Five Newton-Schulz steps X <- a X + (b A + c A^2) X with A = X X^T, after scaling to norm 1
    (Jordan et al. 2024). In bfloat16 on CUDA, where that is enough and fastest.

    Args:
        matrix: [m, n]; a stack [..., m, n] is orthogonalised matrix by matrix.

    Returns:
        The same shape, float32.
    """
    a, b, c = _COEFFICIENTS
    x = matrix.to(torch.bfloat16 if matrix.device.type == "cuda" else torch.float32)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_TINY)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    found: Tensor = (x if wide else x.mT).float()
    return found


@final
class MuonWithAdamW(SkippableOptimizer):
    """Jordan et al. 2024 with the size of Liu et al. 2025, so that one learning rate serves all.

        M = 0.95 M + 0.05 G;  U = 0.05 G + 0.95 M  (Nesterov)
        W = W - lr 0.2 sqrt(max(m, n)) orthogonalised(U)

    Decay is decoupled as in AdamW. Tables (embeddings, the output head) and vectors have no
    meaning as matrices and take fused AdamW, whose state this one holds.

    Args:
        matrices: parameter groups of 2-D weights.
        rest: parameter groups for AdamW.
        betas: of AdamW.
        eps: of AdamW.
    """

    def __init__(
        self,
        matrices: Iterable[dict[str, Any]],
        rest: Iterable[dict[str, Any]],
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        own, others = list(matrices), list(rest)
        super().__init__([*own, *others], {"lr": 0.0, "weight_decay": 0.0})
        # The very same dictionaries: a learning rate that is set here is set there.
        self._own, shared = self.param_groups[: len(own)], self.param_groups[len(own) :]
        self._adamw = None
        if shared:
            self._adamw = torch.optim.AdamW(shared, lr=0.0, betas=betas, eps=eps, fused=True)
            self._adamw.param_groups = shared
            for group in shared:
                group.update({k: v for k, v in self._adamw.defaults.items() if k not in group})
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Both halves."""
        if self._adamw is not None:
            if self.found_inf is not None:
                self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
            self._adamw.step()
            self._adamw.__dict__.pop("found_inf", None)
        everything = self.param_groups
        try:
            self.param_groups = self._own
            super().step()
        finally:
            self.param_groups = everything

    def state_shapes(self, parameter: nn.Parameter) -> dict[str, tuple[int, ...]]:
        """See the base."""
        shape = tuple(parameter.shape)
        if any(parameter is p for group in self._own for p in group["params"]):
            return {"momentum": shape}
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}

    def update_parameter(
        self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], gate: Tensor
    ) -> Tensor:
        """See the base; formulas stand at the class."""
        momentum = self._state_of(parameter)["momentum"]
        momentum.lerp_(gradient, (1.0 - _MOMENTUM) * gate)
        direction = orthogonalised(gradient.lerp(momentum, _MOMENTUM))
        return direction.mul_(_RMS * math.sqrt(max(parameter.shape)))
