"""Strategy of a run: how its ranks hold the model, as train.strategy asks or as memory allows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final, Literal, cast

import torch
from transformers import PreTrainedModel

from toque.config.schema import ModelConfig, TrainConfig
from toque.config.schema_methods import AdapterConfig
from toque.errors import ConfigError
from toque.hardware.memory import free_bytes, in_words
from toque.models.loading.to_train import SpecialTokens, placed_model
from toque.training.autotune.micro_batch import HEADROOM
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.sharing import Alone, Replicated, Sharing
from toque.training.optim.factory import build_optimizer, state_bytes
from toque.training.optimisations import optimise
from toque.training.runtime import Runtime

_BY_ELEMENT: Final = ("adamw",)
"""Optimizers that update each number by itself, and so can update parts of tensors."""
Several = Literal["ddp", "fsdp", "hsdp"]


@dataclass(frozen=True)
class Strategy:
    """The way in which the ranks of a run hold its model."""

    name: Several | Literal["single"]
    reason: str = ""
    """Why auto chose it; empty where it was asked for."""

    @property
    def is_sharded(self) -> bool:
        """True if a rank holds parts of the weights."""
        return self.name in ("fsdp", "hsdp")

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence about what auto chose."""
        return (f"train.strategy auto is {self.name}: {self.reason}",) if self.reason else ()

    def share(self, model: PreTrainedModel, runtime: Runtime) -> Sharing:
        """The model as this rank holds it; all ranks call it.

        Raises:
            ConfigError: hsdp, and the ranks cannot be arranged so.
        """
        if self.name == "single":
            return Alone(model)
        if self.name == "ddp":
            return Replicated(model)
        from toque.training.distributed.sharding import Sharded  # loading it takes a while

        return Sharded(
            model,
            self.name,
            runtime.ranks,
            device=runtime.device,
            dtype=runtime.dtype,
            on_this_machine=_on_this_machine(runtime.ranks.world_size),
        )


@dataclass(frozen=True)
class PlacedModel:
    """A model where this rank holds it."""

    model: PreTrainedModel
    sharing: Sharing
    base_sha256: str | None
    """Hash of the weights beside an adapter; None without one."""
    numerics: Mapping[str, str]
    """Facts besides the runtime's that the last bits of a run depend on."""
    notes: tuple[str, ...]
    """Sentences about the strategy that was chosen."""


def place_model(
    section: ModelConfig,
    adapter: AdapterConfig | None,
    train: TrainConfig,
    optimizer: str,
    tokens: SpecialTokens,
    runtime: Runtime,
    *,
    seed: int,
) -> PlacedModel:
    """Make the model to train, with the layers its device computes fastest; all ranks call it.

    Args:
        section: names the model.
        adapter: of the run, if it has one.
        train: names the strategy.
        optimizer: its name.
        tokens: of the store's tokenizer.
        runtime: of this rank.
        seed: of the run.

    Raises:
        ConfigError: settings that exclude each other, or a model that cannot be made.
        CheckpointError: its files are damaged.
    """
    if train.activation_offload and runtime.device.type == "cpu":
        raise ConfigError(
            "train.activation_offload is true, and this run is on a CPU, whose memory is the one "
            "that it would be moved to. Set it to false."
        )
    # What may be divided among devices is whole in the machine's memory first.
    whole_at = torch.device("cpu") if _may_divide(train, runtime.ranks) else runtime.device
    model, base_sha256 = placed_model(
        section, adapter, tokens, seed=seed, dtype=runtime.dtype, device=whole_at
    )
    strategy = strategy_of(train, adapter, optimizer, model, runtime)
    if not strategy.is_sharded:
        model.to(runtime.device)  # type: ignore[arg-type]  # transformers annotates it away
    optimise(model, train.optimisations, runtime, sharded=strategy.is_sharded)
    # The order in which gradients are summed decides their last bits, and so does the package that
    # turns a quantised base back.
    numerics: dict[str, str] = {"strategy": strategy.name} if strategy.is_sharded else {}
    if adapter is not None and adapter.quantize_base == "nf4":
        numerics["bitsandbytes"] = version("bitsandbytes")
    return PlacedModel(model, strategy.share(model, runtime), base_sha256, numerics, strategy.notes)


def _may_divide(train: TrainConfig, ranks: Ranks) -> bool:
    """True if `strategy_of` may come to a strategy that divides the weights."""
    return ranks.is_distributed and train.strategy in ("auto", "fsdp", "hsdp")


def strategy_of(
    train: TrainConfig,
    adapter: AdapterConfig | None,
    optimizer: str,
    model: PreTrainedModel,
    runtime: Runtime,
) -> Strategy:
    """The strategy that train.strategy asks for; auto is ddp where that fits, else fsdp.

    Args:
        train: of the run.
        adapter: of the run.
        optimizer: its name.
        model: whole, before it is moved to the device.
        runtime: of this rank; the ranks agree.

    Raises:
        ConfigError: the strategy and other settings exclude each other.
    """
    asked, ranks = train.strategy, runtime.ranks
    if not ranks.is_distributed:
        return Strategy("single")
    obstacle = _obstacle(optimizer, adapter, runtime)
    if asked in ("fsdp", "hsdp") and obstacle is not None:
        raise ConfigError(
            f"train.strategy is {asked}, which gives each rank a part of every tensor, and "
            f"{obstacle}. Or set train.strategy=ddp, which holds all of them on every rank."
        )
    if asked != "auto":
        return Strategy(cast("Several", asked))
    needed, free = _bytes_of_replica(optimizer, model, runtime), _room(runtime)
    words = (
        f"weights, gradients and optimizer state take {in_words(needed)} a rank, of "
        f"{in_words(free)} free"
    )
    if all(ranks.all_gather(needed <= free)):
        return Strategy("ddp", words)
    if obstacle is not None:
        return Strategy("ddp", f"{words}, but fsdp would need other settings: {obstacle}")
    return Strategy("fsdp", f"{words} on the rank with least")


def _obstacle(optimizer: str, adapter: AdapterConfig | None, runtime: Runtime) -> str | None:
    """Why tensors cannot be divided in this run, and what to change; None where they can."""
    if optimizer not in _BY_ELEMENT:
        allowed = " or ".join(_BY_ELEMENT)
        return f"optim.name={optimizer} needs whole tensors: set optim.name={allowed}"
    if adapter is not None and adapter.quantize_base is not None:
        return "a quantised base is held whole: set adapter.quantize_base=null"
    if runtime.scaler is not None:
        return "precision fp16 needs one loss scale for all parts: set train.precision=bf16"
    return None


def _bytes_of_replica(optimizer: str, model: PreTrainedModel, runtime: Runtime) -> int:
    """Bytes yet to be allocated by a rank that holds everything, activations left out."""
    parameters = list(model.parameters())
    there = runtime.device.type == "cpu"
    weights = 0 if there else sum(p.numel() * p.element_size() for p in parameters)
    gradients = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    return weights + gradients + state_bytes(build_optimizer(model, name=optimizer))


def _room(runtime: Runtime) -> int:
    """Bytes that this rank may allocate; a machine's memory is shared by its ranks."""
    sharers = _on_this_machine(runtime.ranks.world_size) if runtime.device.type == "cpu" else 1
    return int(HEADROOM * free_bytes(runtime.device) / sharers)


def _on_this_machine(world_size: int) -> int:
    """Number of ranks on this machine, as launchers say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
