"""Placement of the model to train: strategy, layers, and the arithmetic of its updates.

This module applies all settings of `train.optimisations`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Final, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from toque.config.schema import OptimConfig, TrainConfig
from toque.config.schema_methods import AdapterConfig, OptimisationsConfig
from toque.data.loader.batch_stream import BatchStream, DeviceFeed, Prefetch
from toque.errors import ConfigError
from toque.hardware.memory import HEADROOM, free_bytes, free_in_words, in_words, is_out_of_memory
from toque.models.flops import flops_per_token, products_of
from toque.models.forward.cpu_layers import use_cpu_layers
from toque.models.forward.flex_attention import Choice, attention_of, use_attention
from toque.models.forward.keyed_dropout import dropout_settings, use_keyed_dropout
from toque.models.forward.loss import loss_sum
from toque.models.loading.from_scratch import stock_activations
from toque.models.loading.to_train import ModelToTrain
from toque.models.onednn import has_fast_bf16
from toque.runs.peak import peak_of
from toque.training.checkpoint.resume import DROPOUT_MASKS
from toque.training.distributed.data_parallel import DataParallel, LossFn, Replicated
from toque.training.optim.factory import held_bytes
from toque.training.runtime import Runtime
from toque.units import Cursor

_ELEMENTWISE: Final = ("adamw",)
"""Optimizers that update each number independently, so that tensors can be divided."""
_ALL_ROWS: Final = 1 << 30
"""More positions than a micro-batch can have, so that the head is computed in one chunk."""


@dataclass(frozen=True)
class PlacedModel:
    """Model on the device or devices of the run."""

    model: PreTrainedModel
    sharing: DataParallel
    base_sha256: str | None  # hash of the frozen weights of an adapter run; otherwise None
    numerics: Mapping[str, str]  # facts, in addition to the runtime's, that affect the last bits
    notes: tuple[str, ...]  # reason of auto's choice of a strategy


def place_model(
    wanted: ModelToTrain, train: TrainConfig, optim: OptimConfig, runtime: Runtime
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
    free_memory = free_in_words(runtime.device)
    adapter = wanted.adapter
    try:
        model, base_sha256 = wanted.placed(runtime.dtype, loading_device)
        strategy, note = strategy_of(train, adapter, optim, model, runtime)
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

        sharing = Sharded(model, runtime.ranks, device=runtime.device, dtype=runtime.dtype)
    else:
        sharing = Replicated(model) if strategy == "ddp" else DataParallel(model)
    return PlacedModel(model, sharing, base_sha256, numerics, (note,) if note else ())


def strategy_of(
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
    obstacle = obstacle_to_dividing(train, adapter, optim.name, fp16=runtime.scaler is not None)
    if train.strategy != "auto":
        return train.strategy, ""

    # Compare the bytes that a rank with the entire model still allocates, without activations, with
    # its free memory. On a CPU all ranks of a machine share the memory.
    on_cpu = runtime.device.type == "cpu"
    needed = 0 if on_cpu else sum(p.nbytes for p in model.parameters())
    needed += sum(held_bytes(model, optim).values())
    n_sharing = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)) if on_cpu else 1
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
    return "fsdp", f"train.strategy auto is fsdp: {memory} on the rank with the least memory"


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
        obstacle = f"optim.name={optimizer} needs whole tensors: set optim.name={allowed}"
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


def optimise(
    model: PreTrainedModel, on: OptimisationsConfig, runtime: Runtime, *, sharded: bool = False
) -> None:
    """Replace the model's layers as configured. Call it before the weights are divided."""
    use_attention(model, on.attention)
    if not on.activations:
        stock_activations(model)
    if on.dropout:
        use_keyed_dropout(model)
    # These layers keep 16-bit copies of weights, as large as the parts that sharding gathers.
    if on.layers and not (sharded and runtime.precision == "bf16"):
        use_cpu_layers(model)


def attention_in(model: PreTrainedModel, runtime: Runtime) -> Choice:
    """Choose the attention of packed batches. On a GPU the first call tries the kernels."""
    with runtime.autocast():
        return attention_of(model, runtime.device)


def training_loss(on: OptimisationsConfig, *, smoothing: float) -> LossFn:
    """Return the training loss, with `smoothing` as its share of label smoothing."""
    return partial(loss_sum, smoothing=smoothing, chunk_rows=None if on.head else _ALL_ROWS)


def prefetching(
    on: OptimisationsConfig, runtime: Runtime
) -> Callable[[BatchStream, Cursor], Prefetch]:
    """Choose how batches are prepared ahead of the loop and moved to a GPU."""
    if not on.prefetch:
        return partial(Prefetch, depth=0)
    if runtime.device.type != "cuda":
        return Prefetch
    return partial(Prefetch, feed=DeviceFeed(runtime.device))


def turned_off(on: OptimisationsConfig) -> list[str]:
    """Describe the optimisations that are turned off, if any."""
    names = [name for name, value in on if value is False]
    if on.attention != "auto":
        names.append(f"attention: {on.attention}")
    return [f"turned off by train.optimisations: {', '.join(names)}"] if names else []


@dataclass(frozen=True)
class Arithmetic:
    """FLOPs per useful token of a run's data, forward and backward."""

    flops_per_token: float
    products: dict[tuple[int, int], float]
    """FLOPs of products with weights, a part of `flops_per_token`, by the matrix's (in, out)."""
    kind: str = "masked"
    """Kind of attention that separates packed examples: variable-length or masked."""
    masked_flops_per_token: float = 0.0
    """FLOPs of masked attention, which computes every pair of a row's positions."""

    def record(self) -> dict[str, Any]:
        """Return the FLOPs per useful token for the start event."""
        products = sum(self.products.values())
        needed = self.flops_per_token - products
        masked = self.kind == "masked"
        return {
            "products": products,
            "attention": needed,
            "attention_kind": self.kind,
            "attention_computed": max(needed, self.masked_flops_per_token) if masked else needed,
        }


def rate_of_bf16(runtime: Runtime, arithmetic: Arithmetic) -> dict[str, float]:
    """Return the FLOP/s of the model's products in bf16, if a float32 run leaves bf16 unused."""
    if runtime.precision != "float32" or not has_fast_bf16(runtime.device):
        return {}
    peak = peak_of(runtime.device, torch.bfloat16, arithmetic.products)
    return {"bf16_peak": peak.flops_per_second}


def arithmetic_of(
    model: PreTrainedModel, stream: BatchStream, attention: Choice | None = None
) -> Arithmetic:
    """Count the forward and backward FLOPs per useful token of this data."""
    source = stream.plan.source_lengths.astype(float)
    target = stream.plan.target_lengths.astype(float)

    def mean_context(lengths: np.ndarray, weights: np.ndarray) -> float:
        return float((lengths * weights).sum() / max(1.0, float(weights.sum())))

    target_context = mean_context(target, target) / 2
    shape = stream.layout.shape
    if shape.source == 0:
        # As `BatchStream` counts, the last token is not an input. Without a prompt the first token
        # is not a label.
        prompts, targets = stream.prompt_lengths, stream.target_lengths
        learnt = targets if stream.learnt_lengths is None else stream.learnt_lengths
        labelled = int(learnt.sum()) - int((prompts == 0).sum())
        tokens = int(prompts.sum()) + int(targets.sum()) - len(targets)
        shares = {"labelled_share": labelled / max(1, tokens)}
    else:
        shares = {"source_share": float(source.sum()) / float(source.sum() + target.sum())}

    flops = flops_per_token(
        model,
        context=target_context,
        source_context=mean_context(source, source),
        cross_context=mean_context(source, target),
        **shares,
    )
    padded_flops = flops_per_token(
        model,
        context=shape.target,
        source_context=shape.source,
        cross_context=shape.source,
        **shares,
    )
    products = products_of(model, **shares)
    chosen = attention or attention_of(model, model.device)
    kind = "masked" if chosen.name == "dense" else "variable-length"
    return Arithmetic(flops, products, kind, padded_flops - sum(products.values()))
