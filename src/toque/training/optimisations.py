"""Optimisations of a run: all settings of `train.optimisations`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from transformers import PreTrainedModel

from toque.config.schema_methods import OptimisationsConfig
from toque.data.loader.batch_stream import BatchStream, DeviceFeed, Prefetch
from toque.models.forward.attention import AttentionChoice, attention_of, use_attention
from toque.models.forward.cpu_layers import use_cpu_layers
from toque.models.forward.keyed_dropout import use_keyed_dropout
from toque.models.forward.loss import loss_sum
from toque.models.loading.from_scratch import stock_activations
from toque.training.distributed.data_parallel import LossFn
from toque.training.runtime import Runtime
from toque.units import Cursor

_ALL_ROWS: Final = 1 << 30
"""More positions than a micro-batch can have, so that the head is computed in one chunk."""


def optimise(
    model: PreTrainedModel,
    on: OptimisationsConfig,
    runtime: Runtime,
    *,
    sharded: bool = False,
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


def choose_attention(model: PreTrainedModel, runtime: Runtime) -> AttentionChoice:
    """Choose the attention of packed batches. On a GPU the first call tries the kernels."""
    with runtime.autocast():
        return attention_of(model, runtime.device)


def training_loss(on: OptimisationsConfig, *, smoothing: float) -> LossFn:
    """Return the training loss, with `smoothing` as its share of label smoothing."""
    return partial(
        loss_sum, smoothing=smoothing, chunk_rows=None if on.head else _ALL_ROWS
    )


def choose_prefetch(
    on: OptimisationsConfig, runtime: Runtime
) -> Callable[[BatchStream, Cursor], Prefetch]:
    """Choose how batches are prepared ahead of the loop and moved to a GPU."""
    if not on.prefetch:
        return partial(Prefetch, depth=0)
    if runtime.device.type != "cuda":
        return Prefetch
    return partial(Prefetch, feed=DeviceFeed(runtime.device))


def list_disabled(on: OptimisationsConfig) -> list[str]:
    """Describe the optimisations that are turned off, if any."""
    names = [name for name, value in on if value is False]
    if on.attention != "auto":
        names.append(f"attention: {on.attention}")
    return [f"turned off by train.optimisations: {', '.join(names)}"] if names else []
