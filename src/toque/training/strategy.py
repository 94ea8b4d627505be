"""Strategy of a run: one model on one device, a copy per rank (DDP), or a part per rank (FSDP)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final, Literal

import torch
from transformers import PreTrainedModel

from toque.config.schema import OptimConfig, TrainConfig
from toque.config.schema_methods import AdapterConfig
from toque.errors import ConfigError
from toque.hardware.memory import (
    HEADROOM,
    describe_free_memory,
    free_bytes,
    in_words,
    is_out_of_memory,
)
from toque.models.forward.keyed_dropout import dropout_settings
from toque.models.loading.trainable import ModelToTrain
from toque.training.checkpoint.resume import DROPOUT_MASKS
from toque.training.distributed.data_parallel import DataParallel, Replicated
from toque.training.optim.factory import gradient_and_state_bytes
from toque.training.optimisations import optimise
from toque.training.runtime import Runtime

_ELEMENTWISE: Final = ("adamw",)
"""Optimizers that update each weight independently, so that tensors can be sharded."""


@dataclass(frozen=True)
class PlacedModel:
    """Model on the device or devices of the run."""

    model: PreTrainedModel
    sharing: DataParallel
    # SHA-256 of an adapter's frozen base weights; None without an adapter.
    base_sha256: str | None
    # Facts that affect the last bits, in addition to `Runtime.numerics`.
    numerics: Mapping[str, str]
    notes: tuple[str, ...]  # the reason if train.strategy is auto


def place_model(
    model_to_train: ModelToTrain,
    train: TrainConfig,
    optim: OptimConfig,
    runtime: Runtime,
) -> PlacedModel:
    """Build the model on its device, with the fastest layers for it. All ranks must call this.

    Raises:
        ConfigError: The weights do not fit into memory, or settings do not fit the device.
    """
    if train.activation_offload and runtime.device.type == "cpu":
        raise ConfigError(
            "train.activation_offload is true, but this run is on a CPU. This setting moves "
            "activations from a GPU to host memory. Set it to false."
        )
    # A model that may be sharded is first loaded into the machine's memory.
    may_shard = runtime.ranks.is_distributed and train.strategy in ("auto", "fsdp")
    loading_device = torch.device("cpu") if may_shard else runtime.device
    free_memory = describe_free_memory(runtime.device)
    adapter = model_to_train.adapter
    try:
        model, base_sha256 = model_to_train.placed(runtime.dtype, loading_device)
        strategy, note = choose_strategy(train, adapter, optim, model, runtime)
        is_sharded = strategy == "fsdp"
        if not is_sharded:
            model.to(runtime.device)  # type: ignore[arg-type]  # transformers annotates it away
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"The model's weights do not fit into the {free_memory}. Train an adapter of quantised "
            "weights (adapter.quantize_base=int8 or nf4), or use a smaller model or a larger "
            "device. `toque plan` estimates the memory for each option."
        ) from None

    optimise(model, train.optimisations, runtime, sharded=is_sharded)
    numerics: dict[str, str] = {}
    if is_sharded:  # FSDP sums gradients in another order than DDP
        numerics["strategy"] = strategy
    if train.optimisations.dropout and dropout_settings(model):
        numerics[DROPOUT_MASKS] = "keyed"
    if adapter is not None and adapter.quantize_base == "nf4":
        # The package that dequantises the weights.
        numerics["bitsandbytes"] = version("bitsandbytes")
    sharing = _share(model, strategy, runtime)
    return PlacedModel(model, sharing, base_sha256, numerics, (note,) if note else ())


def _share(
    model: PreTrainedModel, strategy: Literal["single", "ddp", "fsdp"], runtime: Runtime
) -> DataParallel:
    """Wrap the model for its strategy. fsdp shards it in place."""
    if strategy == "single":
        return DataParallel(model)
    if strategy == "ddp":
        return Replicated(model)
    from toque.training.distributed.sharding import Sharded  # slow to import

    return Sharded(model, runtime.ranks, device=runtime.device, dtype=runtime.dtype)


def choose_strategy(
    train: TrainConfig,
    adapter: AdapterConfig | None,
    optim: OptimConfig,
    model: PreTrainedModel,
    runtime: Runtime,
) -> tuple[Literal["single", "ddp", "fsdp"], str]:
    """Choose the strategy. Return it with the reason if train.strategy is auto, otherwise "".

    auto is ddp, unless a rank has too little memory for the entire model and fsdp is possible.
    `model` is the entire model, before it is moved to the device.

    Raises:
        ConfigError: train.strategy is fsdp and other settings do not allow it.
    """
    ranks = runtime.ranks
    if not ranks.is_distributed:
        return "single", ""
    obstacle = find_fsdp_obstacle(
        train, adapter, optim.name, fp16=runtime.scaler is not None
    )
    if train.strategy != "auto":
        return train.strategy, ""

    needed, free = _ddp_memory(model, optim, runtime)
    memory = (
        f"weights, gradients and optimizer state take {in_words(needed)} per rank, of "
        f"{in_words(free)} free"
    )
    if all(ranks.all_gather(needed <= free)):
        return "ddp", f"train.strategy auto is ddp: {memory}"
    if obstacle is not None:
        return "ddp", (
            f"train.strategy auto is ddp: {memory}, but fsdp needs other settings: {obstacle}"
        )
    return (
        "fsdp",
        f"train.strategy auto is fsdp: {memory} on the rank with the least memory",
    )


def _ddp_memory(
    model: PreTrainedModel, optim: OptimConfig, runtime: Runtime
) -> tuple[int, int]:
    """Return the bytes that a rank with the entire model still allocates, and its free bytes.

    Activations are not included.
    """
    needed = sum(gradient_and_state_bytes(model, optim).values())
    free = HEADROOM * free_bytes(runtime.device)
    if runtime.device.type == "cpu":
        # The weights are already allocated, and all ranks of a machine share its memory.
        ranks_on_machine = os.environ.get("LOCAL_WORLD_SIZE", runtime.ranks.world_size)
        return needed, int(free / int(ranks_on_machine))
    return needed + sum(p.nbytes for p in model.parameters()), int(free)


def find_fsdp_obstacle(
    train: TrainConfig, adapter: AdapterConfig | None, optimizer: str, *, fp16: bool
) -> str | None:
    """Describe the setting that does not allow sharded tensors, with its remedy, if there is one.

    Raises:
        ConfigError: There is such a setting, and train.strategy is fsdp.
    """
    obstacle = None
    if optimizer not in _ELEMENTWISE:
        allowed = " or ".join(_ELEMENTWISE)
        obstacle = (
            f"optim.name={optimizer} needs whole tensors: set optim.name={allowed}"
        )
    elif adapter is not None and adapter.quantize_base is not None:
        obstacle = "a quantised base cannot be divided: set adapter.quantize_base=null"
    elif fp16:
        obstacle = "precision fp16 needs one loss scale for all parts: set train.precision=bf16"
    if train.strategy == "fsdp" and obstacle is not None:
        raise ConfigError(
            "train.strategy is fsdp, which gives each rank a part of every tensor, but "
            f"{obstacle}. Alternatively, set train.strategy=ddp, which copies the model to every "
            "rank."
        )
    return obstacle
