"""Policy gradient with one update per batch of generated texts: grpo and best_of.

A text i has the weight w_i, and an update minimises sum(w_i nats_i). For grpo the weight is the
advantage of the text in its group (Shao et al. 2024, arXiv 2402.03300, section 4.1.2). The texts
come from the weights in training, so the ratio of new and old probabilities is 1, and clipping
never acts. For best_of the weight is 1 for the best text of a prompt (Dong et al. 2023, arXiv
2304.06767). The batch contains only texts with a weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from toque.batch import IGNORE, Batch
from toque.data.array_types import Floats
from toque.models.forward.example_losses import (
    log_probabilities,
    spread_by_example,
    values_by_example,
    weighted_loss_sum,
)
from toque.models.generation.engine import evaluating
from toque.training.objectives.measurements import Measurements

_MIN_DEVIATION = 1e-4
"""Added to the standard deviation of a group's rewards, so that tiny differences stay small."""


def advantages(rewards: Floats) -> Floats:
    """Compute how much better each text is than its group, in standard deviations.

    They are not divided by the length of the text (Liu et al. 2025, arXiv 2503.20783). In a group
    with equal rewards, all are 0.

    Args:
        rewards: Rewards of the texts of each prompt, [prompts, samples].

    >>> advantages(np.array([[0.0, 1.0], [0.5, 0.5]])).round(3).tolist()
    [[-0.707, 0.707], [0.0, 0.0]]
    """
    difference = rewards - rewards.mean(1, keepdims=True)
    deviation = rewards.std(1, ddof=1, keepdims=True)
    result: Floats = difference / (deviation + _MIN_DEVIATION)
    return result


def with_weights(batch: Batch, weights: Floats) -> Batch:
    """Give every label the weight of its example. `example_ids` are indices into `weights`."""
    by_example = values_by_example(weights.astype(np.float32), batch)
    spread = spread_by_example(by_example, batch)
    return replace(batch, label_weights=spread.masked_fill(batch.labels == IGNORE, 0.0))


@dataclass(frozen=True)
class DivergenceLoss:
    """Loss function of weighted texts with a penalty for the divergence from a reference model."""

    kl: float
    """Weight of the Kullback-Leibler divergence, per token."""
    reference: nn.Module
    chunk_rows: int | None = None
    measurements: Measurements = field(default_factory=lambda: Measurements(("kl",)))

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the weighted sum of nats plus the weighted divergence, [] float32."""
        with evaluating(self.reference), torch.no_grad():
            reference = log_probabilities(self.reference, batch)
        weigh = partial(self._loss_and_weights, batch, reference)
        return weighted_loss_sum(model, batch, weigh, chunk_rows=self.chunk_rows)

    def _loss_and_weights(
        self, batch: Batch, reference: Tensor, nats: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss and the weights of the labels. Add the divergence to `measurements`.

        The divergence is the estimator k3 of Schulman 2020, "Approximating KL divergence". With the
        log-ratio d = log p_reference - log p, it is exp(d) - 1 - d per token.

        Returns:
            The loss, [], and the weight of each label, in the shape of the labels.
        """
        assert batch.label_weights is not None
        log_ratio = (reference + nats).masked_fill(batch.labels == IGNORE, 0.0)
        slope = torch.expm1(log_ratio)
        divergence = (slope - log_ratio).sum()
        self.measurements.add(divergence[None])
        loss = (batch.label_weights * nats).sum() + self.kl * divergence
        return loss, batch.label_weights + self.kl * slope
