"""Muon over stacks: matrices of one shape are orthogonalised together, in batched products."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

_STACK_ELEMENTS = 1 << 24
"""Of matrices orthogonalised at once, at most, unless one alone has more: 32 MiB in bfloat16."""


class StackedMuon(torch.optim.Muon):
    """`torch.optim.Muon` whose Newton-Schulz iteration takes matrices of one shape together.

    The same update (Jordan et al. 2024, kellerjordan.github.io/posts/muon) to rounding. Torch goes
    matrix by matrix, fifteen small products each: for a model of a million parameters a quarter of
    its update on two CPU cores, lab/decisions.md.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter with a gradient."""
        del closure
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            stacks: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
            for parameter in parameters:
                stacks[tuple(parameter.shape)].append(parameter)
            for shape, alike in stacks.items():
                most = max(1, _STACK_ELEMENTS // math.prod(shape))
                for start in range(0, len(alike), most):
                    self._update(alike[start : start + most], group)

    def _update(self, parameters: Sequence[Tensor], group: dict[str, object]) -> None:
        lr, decay, momentum = (float(group[k]) for k in ("lr", "weight_decay", "momentum"))  # type: ignore[arg-type]
        gradients = [p.grad for p in parameters if p.grad is not None]
        means = [self._mean_of(p) for p in parameters]
        torch._foreach_lerp_(means, gradients, 1.0 - momentum)  # has no public name
        ahead = torch._foreach_lerp(gradients, means, momentum) if group["nesterov"] else means  # noqa: SLF001
        a, b, c = (float(x) for x in group["ns_coefficients"])  # type: ignore[attr-defined]
        turned = orthogonalised(
            torch.stack(list(ahead)),
            coefficients=(a, b, c),
            steps=int(group["ns_steps"]),  # type: ignore[call-overload]
            eps=float(group["eps"]),  # type: ignore[arg-type]
        )
        rows, columns = parameters[0].shape
        scale = -lr * 0.2 * math.sqrt(max(rows, columns))
        for parameter, update in zip(parameters, turned, strict=True):
            parameter.mul_(1.0 - lr * decay).add_(update, alpha=scale)

    def _mean_of(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        held: Tensor = state["momentum_buffer"]
        return held


def orthogonalised(
    matrices: Tensor, *, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """The nearest semi-orthogonal matrix of each, roughly, by Newton and Schulz in bfloat16.

    X = a X + (b A + c A A) X with A = X X', from X of norm 1; singular values come out between
    0.5 and 1.5 (Jordan et al. 2024).

    Args:
        matrices: [B, M, N].
        coefficients: a, b and c.
        steps: Of the iteration.
        eps: The least norm divided by.

    Returns:
        [B, M, N] in bfloat16.
    """
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).to(
        torch.bfloat16, memory_format=torch.contiguous_format
    )
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, inner, x, beta=a)
    return x.mT if tall else x
