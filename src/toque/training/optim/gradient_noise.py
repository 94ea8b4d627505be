"""Gradient noise: a function of (seed, step, parameter), without a state."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import nn

from toque.keyed_random import key_of
from toque.training.distributed.data_parallel import shard_like

_PURPOSE = 0x6E6F697365
"""Constant part of the key. It makes the noise differ from dropout's random numbers."""


@dataclass(frozen=True)
class GradientNoise:
    """Gaussian noise of variance eta / (1 + step)^gamma on every gradient.

    Source: Neelakantan et al. 2015 (arXiv 1511.06807), eq. 1 and 2, with eta of 0.01, 0.3 or 1 and
    gamma = 0.55. The noise is added to the summed gradient after clipping. So it does not depend on
    micro-batches and ranks, and clipping does not scale it.
    """

    eta: float
    gamma: float
    seed: int

    def deviation(self, step: int) -> float:
        """Return the noise's standard deviation in update `step`, counted from 0.

        >>> round(GradientNoise(eta=0.3, gamma=0.55, seed=0).deviation(1000) ** 2, 4)
        0.0067
        """
        return float((self.eta / (1.0 + step) ** self.gamma) ** 0.5)

    @torch.no_grad()
    def add(self, model: nn.Module, step: int) -> None:
        """Add the noise of update `step` to the gradients of `model`."""
        deviation = self.deviation(step)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            generator = torch.Generator(gradient.device)
            name_hash = zlib.crc32(name.encode())
            generator.manual_seed(key_of(self.seed, _PURPOSE, step, name_hash))
            noise = torch.randn(
                gradient.shape,
                generator=generator,
                device=gradient.device,
                dtype=torch.float32,
            )
            noise = shard_like(gradient, noise.to(gradient.dtype))
            gradient.add_(noise, alpha=deviation)
