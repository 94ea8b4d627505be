"""Objectives: the loss that an update minimises, as a sum over its batch, divided once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import nn

from toque.batch import Batch
from toque.config.schema_methods import ObjectiveConfig
from toque.models.forward.loss import loss_sum
from toque.training.distributed.data_parallel import LossFn
from toque.training.objectives.dpo import PreferenceLoss
from toque.training.objectives.measurements import Measurements
from toque.training.objectives.policy_gradient import DivergenceLoss


def count_targets(batch: Batch) -> int:
    """Count the tokens with loss."""
    return batch.n_targets


def count_pairs(batch: Batch) -> int:
    """Count the preference pairs."""
    return sum(map(len, batch.example_ids)) // 2


@dataclass(frozen=True)
class Objective:
    """Loss function of a batch, and its measurements."""

    loss_fn: LossFn
    """Sum over the batch, []."""
    count: Callable[[Batch], int] = count_targets
    """Divisor of the sum."""
    measurements: Measurements = field(default_factory=Measurements)


def imitation(*, smoothing: float = 0.0, chunk_rows: int | None = None) -> Objective:
    """Return the objective sft: the cross-entropy of the targets in nats."""
    return Objective(partial(loss_sum, smoothing=smoothing, chunk_rows=chunk_rows))


def near_reference(
    settings: ObjectiveConfig, reference: nn.Module, *, chunk_rows: int | None = None
) -> Objective:
    """Return the objective of grpo and best_of with `kl`: stay near the model `reference`."""
    loss_fn = DivergenceLoss(settings.kl, reference, chunk_rows)
    return Objective(loss_fn, measurements=loss_fn.measurements)


def preference(
    settings: ObjectiveConfig,
    reference: NDArray[np.float32],
    *,
    chunk_rows: int | None = None,
) -> Objective:
    """Return the objective dpo. `reference` has the reference model's nats, [store rows]."""
    loss_fn = PreferenceLoss(settings, reference, chunk_rows)
    return Objective(loss_fn, count_pairs, loss_fn.measurements)
