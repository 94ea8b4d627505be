"""Placement of the model to train: its strategy, its layers, and the arithmetic of its updates.

Everything stands here that `train.optimisations` turns on and off.
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
from toque.runs.outlined_update import peak_of
from toque.training.checkpoint.resume import DROPOUT_MASKS
from toque.training.distributed.sharing import LossFn, Replicated, Sharing
from toque.training.optim.factory import held_bytes
from toque.training.runtime import Runtime
from toque.units import Cursor

_BY_ELEMENT: Final = ("adamw",)
"""Optimizers that update each number by itself, and so can update parts of tensors."""
_ALL_ROWS: Final = 1 << 30  # more positions than any micro-batch has, so that the head is one chunk


@dataclass(frozen=True)
class PlacedModel:
    """A model where this rank holds it."""

    model: PreTrainedModel
    sharing: Sharing
    base_sha256: str | None  # hash of the weights beside an adapter; None without one
    numerics: Mapping[str, str]  # facts besides the runtime's that the last bits of a run depend on
    notes: tuple[str, ...]  # a sentence about the strategy that auto chose


def place_model(
    wanted: ModelToTrain, train: TrainConfig, optim: OptimConfig, runtime: Runtime
) -> PlacedModel:
    """Make the model to train, with the layers its device computes fastest; all ranks call it."""
    if train.activation_offload and runtime.device.type == "cpu":
        raise ConfigError(
            "train.activation_offload is true, and this run is on a CPU, whose memory is the one "
            "that it would be moved to. Set it to false."
        )
    # What may be divided among devices is whole in the machine's memory first.
    may_divide = runtime.ranks.is_distributed and train.strategy in ("auto", "fsdp")
    whole_at = torch.device("cpu") if may_divide else runtime.device
    room, adapter = free_in_words(runtime.device), wanted.adapter
    try:
        model, base_sha256 = wanted.placed(runtime.dtype, whole_at)
        strategy, note = strategy_of(train, adapter, optim, model, runtime)
        is_sharded = strategy == "fsdp"
        if not is_sharded:
            model.to(runtime.device)  # type: ignore[arg-type]  # transformers annotates it away
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"The model's weights do not fit into the {room}. Hold those beside an adapter in few "
            "bits (adapter.quantize_base=int8 or nf4), or take a smaller model or a larger device; "
            "`toque plan` tells what each takes."
        ) from None
    optimise(model, train.optimisations, runtime, sharded=is_sharded)
    # The order in which gradients are summed decides their last bits, and so does the package that
    # turns a quantised base back.
    numerics: dict[str, str] = {"strategy": strategy} if is_sharded else {}
    if train.optimisations.dropout and dropout_settings(model):
        numerics[DROPOUT_MASKS] = "keyed"
    if adapter is not None and adapter.quantize_base == "nf4":
        numerics["bitsandbytes"] = version("bitsandbytes")
    sharing: Sharing
    if is_sharded:
        from toque.training.distributed.sharding import Sharded  # loading it takes a while

        sharing = Sharded(model, runtime.ranks, device=runtime.device, dtype=runtime.dtype)
    else:
        sharing = Replicated(model) if strategy == "ddp" else Sharing(model)
    return PlacedModel(model, sharing, base_sha256, numerics, (note,) if note else ())


def strategy_of(
    train: TrainConfig,
    adapter: AdapterConfig | None,
    optim: OptimConfig,
    model: PreTrainedModel,
    runtime: Runtime,
) -> tuple[Literal["single", "ddp", "fsdp"], str]:
    """The strategy that train.strategy asks for, and why auto chose it: ddp where that fits.

    The model is whole and not moved to the device yet. A ConfigError where settings exclude others.
    """
    asked, ranks = train.strategy, runtime.ranks
    if not ranks.is_distributed:
        return "single", ""
    obstacle = obstacle_to_dividing(train, adapter, optim.name, fp16=runtime.scaler is not None)
    if asked != "auto":
        return asked, ""
    # Bytes yet to be allocated by a rank that holds everything, activations left out, and those
    # that it may allocate: a machine's memory is shared by its ranks.
    on_cpu = runtime.device.type == "cpu"
    needed = 0 if on_cpu else sum(p.nbytes for p in model.parameters())
    needed += sum(held_bytes(model, optim).values())
    sharers = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)) if on_cpu else 1
    free = int(HEADROOM * free_bytes(runtime.device) / sharers)
    words = (
        f"weights, gradients and optimizer state take {in_words(needed)} a rank, of "
        f"{in_words(free)} free"
    )
    if all(ranks.all_gather(needed <= free)):
        return "ddp", f"train.strategy auto is ddp: {words}"
    if obstacle is not None:
        why = f"{words}, but fsdp would need other settings: {obstacle}"
        return "ddp", f"train.strategy auto is ddp: {why}"
    return "fsdp", f"train.strategy auto is fsdp: {words} on the rank with least"


def obstacle_to_dividing(
    train: TrainConfig, adapter: AdapterConfig | None, optimizer: str, *, fp16: bool
) -> str | None:
    """Why tensors cannot be divided in such a run, and what to change; a ConfigError under fsdp."""
    obstacle = None
    if optimizer not in _BY_ELEMENT:
        allowed = " or ".join(_BY_ELEMENT)
        obstacle = f"optim.name={optimizer} needs whole tensors: set optim.name={allowed}"
    elif adapter is not None and adapter.quantize_base is not None:
        obstacle = "a quantised base is held whole: set adapter.quantize_base=null"
    elif fp16:
        obstacle = "precision fp16 needs one loss scale for all parts: set train.precision=bf16"
    if train.strategy == "fsdp" and obstacle is not None:
        raise ConfigError(
            f"train.strategy is fsdp, which gives each rank a part of every tensor, and "
            f"{obstacle}. Or set train.strategy=ddp, which holds all of them on every rank."
        )
    return obstacle


def optimise(
    model: PreTrainedModel, on: OptimisationsConfig, runtime: Runtime, *, sharded: bool = False
) -> None:
    """Exchange the model's layers as configured, before its weights are divided, if they are."""
    use_attention(model, on.attention)
    if not on.activations:
        stock_activations(model)
    if on.dropout:
        use_keyed_dropout(model)
    # Copies of weights in 16 bits would be as large as the parts that are gathered.
    if on.layers and not (sharded and runtime.precision == "bf16"):
        use_cpu_layers(model)


def attention_in(model: PreTrainedModel, runtime: Runtime) -> Choice:
    """The attention of the run's packed forwards; on a GPU kernels are tried, the first time."""
    with runtime.autocast():
        return attention_of(model, runtime.device)


def training_loss(on: OptimisationsConfig, *, smoothing: float) -> LossFn:
    """The loss that is trained on, with a share of label smoothing."""
    return partial(loss_sum, smoothing=smoothing, chunk_rows=None if on.head else _ALL_ROWS)


def prefetching(
    on: OptimisationsConfig, runtime: Runtime
) -> Callable[[BatchStream, Cursor], Prefetch]:
    """Makes batches ahead of the loop, and on a GPU sends them there."""
    if not on.prefetch:
        return partial(Prefetch, depth=0)
    if runtime.device.type != "cuda":
        return Prefetch
    return partial(Prefetch, feed=DeviceFeed(runtime.device))


def turned_off(on: OptimisationsConfig) -> list[str]:
    """A sentence about what is not as fast as it could be; none when nothing is turned off."""
    names = [name for name, value in on if value is False]
    if on.attention != "auto":
        names.append(f"attention: {on.attention}")
    return [f"turned off by train.optimisations: {', '.join(names)}"] if names else []


@dataclass(frozen=True)
class Arithmetic:
    """FLOPs of one useful token of a run's data, forward and backward."""

    flops_per_token: float
    products: dict[tuple[int, int], float]
    """FLOPs of products with weights, a part of these, by the matrix' (in, out)."""
    kind: str = "masked"
    """Kind of attention that keeps packed examples apart: variable-length or masked."""
    masked_flops_per_token: float = 0.0
    """FLOPs of attention as it is computed where it is masked: every pair of a row's positions."""

    def record(self) -> dict[str, Any]:
        """FLOPs per useful token, for the start event."""
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
    """The rate of the model's products in bf16, where a float32 run leaves it unused."""
    if runtime.precision != "float32" or not has_fast_bf16(runtime.device):
        return {}
    peak = peak_of(runtime.device, torch.bfloat16, arithmetic.products)
    return {"bf16_peak": peak.flops_per_second}


def arithmetic_of(
    model: PreTrainedModel, stream: BatchStream, attention: Choice | None = None
) -> Arithmetic:
    """Forward and backward arithmetic of one useful token of this data, by some attention."""
    source, target = (
        side.astype(float) for side in (stream.plan.source_lengths, stream.plan.target_lengths)
    )

    def context(lengths: np.ndarray, of: np.ndarray) -> float:  # for an average token of `of`
        return float((lengths * of).sum() / max(1.0, float(of.sum())))

    own, shape = context(target, target) / 2, stream.layout.shape
    if shape.source == 0:
        # As `BatchStream` counts: a last token is no input; without a prompt a first is no label.
        prompts, targets = stream.prompt_lengths, stream.target_lengths
        learnt = targets if stream.learnt_lengths is None else stream.learnt_lengths
        labelled = int(learnt.sum()) - int((prompts == 0).sum())
        tokens = int(prompts.sum()) + int(targets.sum()) - len(targets)
        shares = {"labelled_share": labelled / max(1, tokens)}
    else:
        shares = {"source_share": float(source.sum()) / float(source.sum() + target.sum())}
    across = {
        "source_context": context(source, source), "cross_context": context(source, target)
    }  # fmt: skip
    flops = flops_per_token(model, context=own, **across, **shares)
    sides = {"source_context": shape.source, "cross_context": shape.source}
    everything = flops_per_token(model, context=shape.target, **sides, **shares)
    products = products_of(model, **shares)
    chosen = attention or attention_of(model, model.device)
    kind = "masked" if chosen.name == "dense" else "variable-length"
    return Arithmetic(flops, products, kind, everything - sum(products.values()))
