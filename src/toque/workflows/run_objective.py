"""Objective of a run, and the source of its batches, from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.data.loader.batch_stream import BatchStream, Feed
from toque.data.loader.collate import Layout
from toque.data.store.token_store import TokenStore
from toque.errors import CheckpointError, ConfigError
from toque.evaluation.reference_nats import find_reference
from toque.evaluation.rewards import Rewards
from toque.evaluation.rollouts import Rollouts, RolloutSettings
from toque.models.lora.continued import start_hash
from toque.models.lora.frozen import base_sha256
from toque.reporter import Reporter
from toque.training.callbacks import Callback, State
from toque.training.distributed.data_parallel import DataParallel
from toque.training.objectives.objective import (
    Objective,
    imitation,
    near_reference,
    preference,
)
from toque.training.objectives.policy_gradient import copy_reference
from toque.training.optimisations import choose_prefetch, head_rows
from toque.training.runtime import Runtime
from toque.training.strategy import PlacedModel
from toque.units import Cursor
from toque.workflows.run_folder.start_adapter import adapter_of_run

Reference = NDArray[np.float32] | nn.Module
"""Reference of an objective: the nats of each answer for dpo, [store rows], or a model for `kl`."""


class StartWeights(Callback):
    """Check that the start weights, which are the reference of `kl`, stay the same.

    A continued run reads the reference again, because checkpoints do not have it.

    Args:
        start_from: Setting `model.start_from`.
        sha256: Hash of its weights.
    """

    def __init__(self, start_from: str, sha256: str) -> None:
        self._start_from = start_from
        self._sha256 = sha256

    def state_dict(self) -> State:
        """Return the hash of the start weights."""
        return {"sha256": self._sha256}

    def load_state_dict(self, state: State) -> None:
        """Compare the hash with the hash at the beginning of the run.

        Raises:
            CheckpointError: The weights have changed.
        """
        if state.get("sha256") != self._sha256:
            raise CheckpointError(
                f"objective.kl compares the model with {self._start_from} (model.start_from), but "
                "the weights there have changed since this run began (SHA-256 "
                f"{str(state.get('sha256'))[:12]}, now {self._sha256[:12]}). Restore them to "
                "continue, or begin a new run: run_dir=runs/another."
            )


def check_start_weights(
    config: RunConfig, placed: PlacedModel
) -> Sequence[StartWeights]:
    """Return the check of the start weights, if they are the reference of `kl`."""
    if not config.objective.kl:
        return ()
    # Without an adapter, all weights are the start.
    adapter_hash = start_hash(adapter_of_run(config), placed.base_sha256)
    sha256 = adapter_hash or base_sha256(placed.model)
    return (StartWeights(config.model.start_from, sha256),)


def build_reference(
    config: RunConfig,
    store: TokenStore,
    layout: Layout,
    runtime: Runtime,
    placed: PlacedModel,
    *,
    continues: bool,
    reporter: Reporter,
) -> Reference | None:
    """Build the reference from the start weights, before the weights of a checkpoint are loaded.

    Raises:
        ConfigError: The weights are sharded and `kl` needs a copy of them, or see `find_reference`.
        CheckpointError: The reference cannot be written.
    """
    if config.objective.kind == "dpo":
        return find_reference(
            Path(config.run_dir),
            store,
            layout,
            runtime,
            placed.sharing,
            base_sha256=start_hash(adapter_of_run(config), placed.base_sha256),
            continues=continues,
            reporter=reporter,
        )
    if not config.objective.kl:
        return None
    if placed.sharing.is_sharded:
        raise ConfigError(
            f"objective.kl is {config.objective.kl:g}, which needs a second model on each rank, "
            "but train.strategy auto chose fsdp because the weights, gradients and optimizer state "
            "of the first do not fit. Set objective.kl to 0, or train an adapter."
        )
    return copy_reference(placed.model)


def build_objective(config: RunConfig, reference: Reference | None) -> Objective:
    """Build the objective of the updates. Every call returns its own measurements."""
    chunk_rows = head_rows(config.train.optimisations)
    if isinstance(reference, nn.Module):
        return near_reference(config.objective, reference, chunk_rows=chunk_rows)
    if reference is not None:
        return preference(config.objective, reference, chunk_rows=chunk_rows)
    smoothing = config.optim.label_smoothing
    return imitation(smoothing=smoothing, chunk_rows=chunk_rows)


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


def describe_cut_prompts(config: RunConfig, store: TokenStore) -> list[str]:
    """Describe the prompts that the store cut, if the model generates texts for them."""
    n_cut = store.manifest.cut.get("prompts", 0)
    if not config.objective.learns_from_rewards or n_cut == 0:
        return []
    limit = store.manifest.settings["max_prompt_tokens"]
    note = (
        f"{n_cut:,} of {store.manifest.examples:,} prompts were cut to {limit} tokens, so the "
        "model and the rewards receive only their beginning. Raise data.max_prompt_tokens, or set "
        "data.on_overlong to drop, and prepare the data again"
    )
    return [note]
