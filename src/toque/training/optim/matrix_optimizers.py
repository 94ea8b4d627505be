"""Optimizers for matrices (Muon, AdamW in 8 bits), combined with AdamW for other parameters."""

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
    """Build `torch.optim.Muon` (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    With the gradient G of a weight W of shape [rows, columns] and the momentum m:

        M = m M + (1 - m) G
        U = (1 - m) G + m M    (Nesterov)
        W = W (1 - lr decay) - lr 0.2 sqrt(max(rows, columns)) orthogonalised(U)

    The scale is from Liu et al. 2025 (arXiv 2502.16982, eq. 4), so that AdamW's learning rates also
    work for Muon.
    """
    first = next((p for group in matrices for p in group["params"]), None)
    muon_class = torch.optim.Muon
    if first is not None and not has_fast_bf16(first.device):
        muon_class = _Float32Muon
    return muon_class(
        matrices, lr=0.0, momentum=momentum, adjust_lr_fn="match_rms_adamw"
    )


@final
class _Float32Muon(torch.optim.Muon):
    """`torch.optim.Muon` in float32, for processors that only emulate bf16.

    On a CPU with AVX2 it was 45 times as fast as torch's Muon (lab/notes.md, 2026-11-26).
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
    """Move a matrix's singular values close to 1 by Newton-Schulz steps (Jordan et al. 2024).

    A step is X = a X + (b A + c A A) X with A = X X^T.
    """
    a, b, c = group["ns_coefficients"]
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix  # X X^T is smaller for a wide matrix
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def adamw_8bit(matrices: Groups, **arguments: Any) -> torch.optim.Optimizer:
    """Build bitsandbytes' AdamW with 8-bit averages (Dettmers et al. 2022, arXiv 2110.02861).

    Tensors with fewer than 4,096 weights have averages in float32. `arguments` may contain betas
    and eps.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    silence_bitsandbytes()
    otherwise = ", or use adafactor, which has an even smaller state"
    with needing("quant", "optim.name=adamw8bit", otherwise=otherwise):
        from bitsandbytes import optim
    untyped: Any = optim
    # The constructor computes tables of 8-bit codes, even for a fake model.
    with unset_fake_temporarily():
        optimizer: torch.optim.Optimizer = untyped.AdamW8bit(
            matrices, lr=0.0, **arguments
        )
    return optimizer


@final
class WithAdamW(torch.optim.Optimizer):
    """Optimizer for matrices and fused AdamW for other parameters, combined into one optimizer.

    Muon and 8-bit averages do not suit vectors, embeddings and the output head: these are not
    linear maps between hidden states, and the rows of embeddings are used rarely and unevenly.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, rest: Groups, **arguments: Any
    ) -> None:
        self.inner = inner
        self.adamw = torch.optim.AdamW(rest, lr=0.0, fused=True, **arguments)
        # The three optimizers share their groups and their state.
        super().__init__([*self.inner.param_groups, *self.adamw.param_groups], {})
        self.inner.state = self.adamw.state = self.state

    def part_for(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """Return the optimizer that updates `parameter`."""
        for group in self.inner.param_groups:
            if any(parameter is p for p in group["params"]):
                return self.inner
        return self.adamw

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update with both optimizers."""
        del closure
        self.inner.step()
        self.adamw.step()
