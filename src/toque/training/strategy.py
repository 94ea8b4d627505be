"""Strategy of a run: one model on one device, a copy per rank, or a part per rank."""

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
from toque.training.optim.factory import held_bytes
from toque.training.optimisations import optimise
from toque.training.runtime import Runtime

_ELEMENTWISE: Final = ("adamw",)
"""Optimizers that update each number independently, so that tensors can be divided."""


@dataclass(frozen=True)
class PlacedModel:
    """Model on the device or devices of the run."""

    model: PreTrainedModel
    sharing: DataParallel
    # Hash of the frozen weights of an adapter run; otherwise None.
    base_sha256: str | None
    # facts, in addition to the runtime's, that affect the last bits.
    numerics: Mapping[str, str]
    notes: tuple[str, ...]  # reason of auto's choice of a strategy


def place_model(
    model_to_train: ModelToTrain,
    train: TrainConfig,
    optim: OptimConfig,
    runtime: Runtime,
) -> PlacedModel:
    """Build the model to train, with the fastest layers for its device. All ranks must call it."""
    if train.activation_offload and runtime.device.type == "cpu":
        raise ConfigError(
            "train.activation_offload is true, but this run is on a CPU. It moves activations from "
            "a GPU to the CPU's memory. Set it to false."
        )
    # A model that may be divided among devices is first loaded into the machine's memory.
    may_divide = runtime.ranks.is_distributed and train.strategy in ("auto", "fsdp")
    loading_device = torch.device("cpu") if may_divide else runtime.device
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
            "device. `toque plan` estimates the memory of each."
        ) from None

    optimise(model, train.optimisations, runtime, sharded=is_sharded)
    # The order of summing gradients and the package that dequantises weights affect the last bits.
    numerics: dict[str, str] = {"strategy": strategy} if is_sharded else {}
    if train.optimisations.dropout and dropout_settings(model):
        numerics[DROPOUT_MASKS] = "keyed"
    if adapter is not None and adapter.quantize_base == "nf4":
        numerics["bitsandbytes"] = version("bitsandbytes")

    sharing: DataParallel
    if is_sharded:
        from toque.training.distributed.sharding import Sharded  # slow to import

        sharing = Sharded(
            model, runtime.ranks, device=runtime.device, dtype=runtime.dtype
        )
    else:
        sharing = Replicated(model) if strategy == "ddp" else DataParallel(model)
    return PlacedModel(model, sharing, base_sha256, numerics, (note,) if note else ())


def choose_strategy(
    train: TrainConfig,
    adapter: AdapterConfig | None,
    optim: OptimConfig,
    model: PreTrainedModel,
    runtime: Runtime,
) -> tuple[Literal["single", "ddp", "fsdp"], str]:
    """Choose the strategy of train.strategy, and give the reason of auto, which prefers ddp.

    The model is not divided and not yet on the device.

    Raises:
        ConfigError: train.strategy is fsdp and other settings do not allow it.
    """
    ranks = runtime.ranks
    if not ranks.is_distributed:
        return "single", ""
    obstacle = obstacle_to_dividing(
        train, adapter, optim.name, fp16=runtime.scaler is not None
    )
    if train.strategy != "auto":
        return train.strategy, ""

    # Compare the bytes that a rank with the entire model still allocates, without activations, with
    # its free memory. On a CPU all ranks of a machine share the memory.
    on_cpu = runtime.device.type == "cpu"
    needed = 0 if on_cpu else sum(p.nbytes for p in model.parameters())
    needed += sum(held_bytes(model, optim).values())
    n_sharing = (
        int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)) if on_cpu else 1
    )
    free = int(HEADROOM * free_bytes(runtime.device) / n_sharing)
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


def obstacle_to_dividing(
    train: TrainConfig, adapter: AdapterConfig | None, optimizer: str, *, fp16: bool
) -> str | None:
    """Describe the setting that does not allow divided tensors and its remedy, if there is one.

    Raises:
        ConfigError: There is such a setting and train.strategy is fsdp.
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
            f"train.strategy is fsdp, which gives each rank a part of every tensor, but "
            f"{obstacle}. Or set train.strategy=ddp, which copies the model to every rank."
        )
    return obstacle
