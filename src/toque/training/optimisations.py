"""Optimisations of a run, as configured by `train.optimisations`."""

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
"""More positions than in any micro-batch, so that the output head is computed in one chunk.
"""


def optimise(
    model: PreTrainedModel,
    settings: OptimisationsConfig,
    runtime: Runtime,
    *,
    sharded: bool = False,
) -> None:
    """Replace the model's layers as configured. Call it before the weights are sharded."""
    use_attention(model, settings.attention)
    if not settings.activations:
        stock_activations(model)
    if settings.dropout:
        use_keyed_dropout(model)
    # In bf16 these layers keep copies of all weights, which would undo the savings of sharding.
    if settings.layers and not (sharded and runtime.precision == "bf16"):
        use_cpu_layers(model)


def choose_attention(model: PreTrainedModel, runtime: Runtime) -> AttentionChoice:
    """Choose the attention kernel for packed batches. On a GPU the first call tests the kernels."""
    with runtime.autocast():
        return attention_of(model, runtime.device)


def training_loss(settings: OptimisationsConfig, *, smoothing: float) -> LossFn:
    """Return the training loss with the label smoothing `smoothing`, from 0 to 1."""
    return partial(loss_sum, smoothing=smoothing, chunk_rows=head_rows(settings))


def head_rows(settings: OptimisationsConfig) -> int | None:
    """Return the positions per matmul of the output head. None is the usual number."""
    return None if settings.head else _ALL_ROWS


def choose_prefetch(
    settings: OptimisationsConfig, runtime: Runtime
) -> Callable[[BatchStream, Cursor], Prefetch]:
    """Choose whether batches are prepared in advance, and how they are moved to a GPU."""
    if not settings.prefetch:
        return partial(Prefetch, depth=0)
    if runtime.device.type != "cuda":
        return Prefetch
    return partial(Prefetch, feed=DeviceFeed(runtime.device))


def list_disabled(settings: OptimisationsConfig) -> list[str]:
    """Return a message about the optimisations that are turned off, if there are any."""
    names = [name for name, value in settings if value is False]
    if settings.attention != "auto":
        names.append(f"attention: {settings.attention}")
    return [f"turned off by train.optimisations: {', '.join(names)}"] if names else []
