"""Optimizers of matrices beside AdamW for all other parameters: Muon, and AdamW in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from toque.errors import needing
from toque.hardware.onednn import has_fast_bf16
from toque.models.lora.quantised import silence_bitsandbytes

Groups = list[dict[str, Any]]


def muon(matrices: Groups, *, momentum: float = 0.95) -> torch.optim.Optimizer:
    """`torch.optim.Muon` of 2-D weights (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    With G the gradient, in the size of Liu et al. 2025 (arXiv 2502.16982, eq. 4), so that AdamW's
    learning rate serves it too:

        M = m M + (1 - m) G;  U = (1 - m) G + m M  (Nesterov, m the momentum)
        W = W (1 - lr decay) - lr 0.2 sqrt(max(m, n)) orthogonalised(U)
    """
    first = next((p for group in matrices for p in group["params"]), None)
    kind = torch.optim.Muon if first is None or has_fast_bf16(first.device) else _Float32Muon
    return kind(matrices, lr=0.0, momentum=momentum, adjust_lr_fn="match_rms_adamw")


@final
class _Float32Muon(torch.optim.Muon):
    """`torch.optim.Muon` in float32, for processors that only emulate its bf16 products.

    On AVX2 the bf16 products of a model 256 wide and 6 deep take 12.3 s an update, these 0.27 s
    (lab/notes.md, 2026-11-26).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update."""
        del closure
        for group in self.param_groups:
            lr, momentum = float(group["lr"]), group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                average = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                update = _orthogonalised(p.grad.lerp(average, momentum), group)
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(update, alpha=-lr * 0.2 * math.sqrt(max(p.shape)))


def _orthogonalised(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The matrix [m, n] with singular values near 1, by Newton-Schulz (Jordan et al. 2024)."""
    a, b, c = group["ns_coefficients"]
    # The smaller side's products are fewer.
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x


def adamw_8bit(matrices: Groups, **given: Any) -> torch.optim.Optimizer:
    """Bitsandbytes' AdamW, whose averages take a byte a weight (Dettmers et al. 2022, 2110.02861).

    Tensors below 4,096 weights keep float32 averages. `given`: betas and eps that are not usual.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    silence_bitsandbytes()
    otherwise = ", or take adafactor, whose state is smaller still"
    with needing("quant", "optim.name=adamw8bit", otherwise=otherwise):
        from bitsandbytes import optim
    found: Any = optim  # it has no types
    with unset_fake_temporarily():  # it makes tables of numbers, which an outline has not
        optimizer: torch.optim.Optimizer = found.AdamW8bit(matrices, lr=0.0, **given)
    return optimizer


@final
class WithAdamW(torch.optim.Optimizer):
    """An optimizer of matrices and fused AdamW of the rest behind one list of groups and one state.

    Embeddings, the output head and vectors have no meaning as matrices, and their rows are seldom
    and unevenly used, so that neither Muon nor 8 bits suit them.
    """

    def __init__(self, inner: torch.optim.Optimizer, rest: Groups, **given: Any) -> None:
        self.inner = inner
        self.adamw = torch.optim.AdamW(rest, lr=0.0, fused=True, **given)
        # The same dictionaries, so that a learning rate or a state set here is set there.
        super().__init__([*self.inner.param_groups, *self.adamw.param_groups], {})
        self.inner.state = self.adamw.state = self.state

    def half_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """The optimizer that updates `parameter`."""
        own = (p for group in self.inner.param_groups for p in group["params"])
        return self.inner if any(parameter is p for p in own) else self.adamw

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update of both halves."""
        del closure
        self.inner.step()
        self.adamw.step()
