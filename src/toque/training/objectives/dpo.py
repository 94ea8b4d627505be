"""Direct preference optimisation, DPO (Rafailov et al. 2023, arXiv 2305.18290).

A pair is two examples with the same prompt: the chosen answer and the rejected one. They are
neighbours in the same packed row. Letters: R rows, P most pairs in a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from toque.batch import IGNORE, Batch
from toque.config.schema_methods import ObjectiveConfig
from toque.models.forward.example_losses import (
    spread_by_example,
    sum_by_example,
    values_by_example,
    weighted_loss_sum,
)
from toque.training.objectives.measurements import Measurements

MEASURED = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
"""Names of the measurements, as in other trainers."""


@dataclass(frozen=True)
class PairLosses:
    """Losses of pairs, and values that explain them."""

    losses: Tensor  # [...]
    weights: Tensor  # derivatives of the losses by the nats of both answers, [..., 2]
    measured: Tensor  # [..., MEASURED]


def pair_losses(
    nats: Tensor, reference: Tensor, n_labels: Tensor, settings: ObjectiveConfig
) -> PairLosses:
    """Compute the losses of pairs from the negative log-probabilities of their answers.

    With the log-probability ratios r = reference - nats of both answers, the margin is
    m = beta (r_chosen - r_rejected), and the loss is -log sigmoid(m) (Rafailov et al. 2023,
    equation 7). With the label smoothing e, it is -(1 - e) log sigmoid(m) - e log sigmoid(-m)
    (Mitchell 2023). `sft_weight` adds that multiple of the chosen answer's nats per token (Pang et
    al. 2024, arXiv 2404.19733, equation 1). With `length_normalised`, r is divided by the number of
    tokens.

    Args:
        nats: Sums over the tokens of an answer, [..., 2]: chosen and rejected.
        reference: The same sums of the reference model, [..., 2].
        n_labels: Tokens of the answers, [..., 2], at least 1.
        settings: Section `objective` of the configuration.
    """
    smoothing = settings.label_smoothing
    scale = torch.full_like(nats, settings.beta)
    if settings.length_normalised:
        scale /= n_labels
    rewards = scale * (reference - nats)
    chosen, rejected = rewards.unbind(-1)
    margin = chosen - rejected

    losses = -(1.0 - smoothing) * F.logsigmoid(margin)
    losses -= smoothing * F.logsigmoid(-margin)
    slope = torch.sigmoid(-margin) - smoothing  # minus the derivative by the margin
    weights = scale * torch.stack([slope, -slope], -1)
    if settings.sft_weight:
        per_token = settings.sft_weight / n_labels[..., 0]
        losses += per_token * nats[..., 0]
        weights[..., 0] += per_token

    is_right = (margin > 0).to(nats.dtype)
    logps = (-nats).unbind(-1)
    measured = torch.stack([chosen, rejected, margin, is_right, *logps], -1)
    return PairLosses(losses, weights, measured)


@dataclass(frozen=True)
class PreferenceLoss:
    """Loss function of DPO: the sum over the pairs of a batch."""

    settings: ObjectiveConfig
    reference: NDArray[np.float32]
    """Nats of each example under the reference model, [store rows]."""
    chunk_rows: int | None = None
    measurements: Measurements = field(default_factory=lambda: Measurements(MEASURED))

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the summed loss of the batch's pairs, [] float32."""
        weigh = partial(self._loss_and_weights, batch)
        return weighted_loss_sum(model, batch, weigh, chunk_rows=self.chunk_rows)

    def _loss_and_weights(self, batch: Batch, nats: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss and the weights of the labels. Add the pairs to `measurements`.

        Args:
            batch: Batch with L labels per row.
            nats: Negative log-probability of each label, [R, L].

        Returns:
            The loss, [], and the weight of each label, [R, L].
        """
        is_labelled = (batch.labels != IGNORE).to(nats.dtype)
        n_labels = _by_pair(sum_by_example(is_labelled, batch))
        is_pair = n_labels[..., 0] > 0  # rows with fewer pairs end with zeros
        answer_nats = _by_pair(sum_by_example(nats, batch))
        reference_nats = _by_pair(values_by_example(self.reference, batch).to(nats))
        pairs = pair_losses(
            answer_nats, reference_nats, n_labels.clamp(min=1.0), self.settings
        )

        measured = pairs.measured * is_pair[..., None]
        self.measurements.add(measured.sum((0, 1)))
        loss = (pairs.losses * is_pair).sum()
        answer_weights = (pairs.weights * is_pair[..., None]).flatten(1)
        return loss, spread_by_example(answer_weights, batch) * is_labelled


def _by_pair(values: Tensor) -> Tensor:
    """Group values of examples [R, 2 P] by pair, [R, P, 2]."""
    return values.view(len(values), values.shape[1] // 2, 2)
