"""Muon for the matrices inside the model, AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn

from toque.training.optim.stacked_muon import StackedMuon


@final
class MuonWithAdamW(torch.optim.Optimizer):
    """`StackedMuon` and fused `torch.optim.AdamW` behind one list of groups and one state.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), with G the gradient, in the size
    of Liu et al. 2025 (arXiv 2502.16982, eq. 4), so that one learning rate serves both halves:

        M = 0.95 M + 0.05 G;  U = 0.05 G + 0.95 M  (Nesterov)
        W = W (1 - lr decay) - lr 0.2 sqrt(max(m, n)) orthogonalised(U)

    Embeddings, the output head and vectors have no meaning as matrices and take AdamW.

    Args:
        matrices: parameter groups of 2-D weights, at least one.
        rest: parameter groups for AdamW, at least one.
    """

    def __init__(self, matrices: list[dict[str, Any]], rest: list[dict[str, Any]]) -> None:
        self.muon = StackedMuon(matrices, lr=0.0, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(rest, lr=0.0, fused=True)
        # The same dictionaries, so that a learning rate or a state set here is set there.
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})
        self.muon.state = self.adamw.state = self.state

    def half_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """The optimizer that updates `parameter`."""
        own = (p for group in self.muon.param_groups for p in group["params"])
        return self.muon if any(parameter is p for p in own) else self.adamw

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of both halves."""
        self.muon.step()
        self.adamw.step()
