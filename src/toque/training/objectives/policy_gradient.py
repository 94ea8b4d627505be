"""Policy gradient with one update per batch of generated texts: grpo and best_of.

An update generates N texts with T tokens in total. Text i has the weight w_i and the negative
log-probability nats_i. The update minimises

    L = sum_i(w_i nats_i) / D + kl sum_t(k3_t) / T

* grpo: w_i is the advantage of the text in its group (Shao et al. 2024, arXiv 2402.03300, section
  4.1.2). The texts come from the weights in training, so the ratio of new and old probabilities is
  1, and clipping never acts. D is N M, with the length limit M (Liu et al. 2025, arXiv 2503.20783).
  D is constant, because a division by the length would favour short bad texts.
* best_of: w_i is 1 for the best text of a prompt and 0 for all other texts (Dong et al. 2023, arXiv
  2304.06767). D is the number of tokens of the best texts.

k3_t is the divergence of token t from the reference. Its sum is divided by T, so `kl` multiplies
the mean divergence per token. It depends neither on M nor on the number of texts. Next to D = N M,
a token with the advantage 1 has the weight 1 / (N M), and its divergence has kl / T. With texts of
mean length T / N, the penalty is therefore M / (T / N) times as strong as in implementations that
divide both sums by N M.
"""

from __future__ import annotations

import copy
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
from toque.training.objectives.measurements import Measurements

_MIN_DEVIATION = 1e-4
"""Added to the standard deviation of a group's rewards, so that tiny differences stay small."""


def advantages(rewards: Floats) -> Floats:
    """Compute how much better each text is than its group, in standard deviations.

    In a group with equal rewards, all are 0.

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


def copy_reference(model: nn.Module) -> nn.Module:
    """Copy a model as the reference of `kl`. The copy shares the frozen weights of an adapter."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    shared = {id(tensor): tensor for tensor in (*frozen, *model.buffers())}
    reference = copy.deepcopy(model, shared)
    return reference.requires_grad_(requires_grad=False).eval()


@dataclass(frozen=True)
class DivergenceLoss:
    """Loss function of weighted texts with a penalty for the divergence from a reference model.

    The trainer divides its sum by the tokens of the update.
    """

    kl: float
    """Weight of the Kullback-Leibler divergence, per token."""
    reference: nn.Module
    """Model in evaluation mode."""
    chunk_rows: int | None = None
    measurements: Measurements = field(default_factory=lambda: Measurements(("kl",)))

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the weighted sum of nats plus the weighted divergence, [] float32."""
        with torch.no_grad():
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
