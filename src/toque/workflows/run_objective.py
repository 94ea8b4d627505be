"""Objective of a run, and the source of its batches, from the configuration."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.data.loader.batch_stream import BatchStream, Feed
from toque.data.store.token_store import TokenStore
from toque.evaluation.rewards import Rewards
from toque.evaluation.rollouts import Rollouts, RolloutSettings
from toque.training.distributed.data_parallel import DataParallel
from toque.training.objectives.objective import (
    Objective,
    imitation,
    policy,
    preference,
)
from toque.training.optimisations import choose_prefetch, head_rows
from toque.training.runtime import Runtime
from toque.units import Cursor


def build_objective(
    config: RunConfig, model: PreTrainedModel, reference: NDArray[np.float32] | None
) -> Objective:
    """Build the objective of the updates. Every call returns its own measurements.

    `reference` are the nats of each answer under the reference of dpo, [store rows].
    """
    chunk_rows = head_rows(config.train.optimisations)
    if config.objective.learns_from_rewards:
        return policy(config.objective, model, chunk_rows=chunk_rows)
    if reference is None:
        smoothing = config.optim.label_smoothing
        return imitation(smoothing=smoothing, chunk_rows=chunk_rows)
    return preference(config.objective, reference, chunk_rows=chunk_rows)


def choose_feed(
    config: RunConfig,
    store: TokenStore,
    stream: BatchStream,
    model: PreTrainedModel,
    sharing: DataParallel,
    runtime: Runtime,
) -> Callable[[BatchStream, Cursor], Feed]:
    """Choose the source of the batches: the store, or texts of the model in training.

    Raises:
        ConfigError: A reward is unknown, or the store has documents without prompts.
    """
    if not config.objective.learns_from_rewards:
        return choose_prefetch(config.train.optimisations, runtime)
    return Rollouts(
        store,
        stream.layout,
        sharing,
        runtime.ranks,
        Rewards.from_settings(config.objective, config.foreign_code),
        RolloutSettings.for_run(config, store, model, runtime),
    ).feed
