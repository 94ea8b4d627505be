"""Optimisations of a run, as `train.optimisations` turns them on and off, all in one place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from transformers import PreTrainedModel

from toque.batch import Batch
from toque.config.schema_methods import OptimisationsConfig
from toque.data.loader.prefetch import Batches, DeviceFeed, Prefetch
from toque.models.forward.attention_choice import Choice, attention_of, use_attention
from toque.models.forward.attention_plan import planned
from toque.models.forward.cpu_layers import use_cpu_layers
from toque.models.forward.fast_dropout import use_fast_dropout
from toque.models.forward.loss import loss_sum
from toque.models.loading.from_scratch import stock_activations
from toque.training.runtime import Runtime
from toque.units import Cursor

_ALL_ROWS: Final = 1 << 30
"""More positions than any micro-batch has, so that the head is one chunk."""


def optimise(
    model: PreTrainedModel, on: OptimisationsConfig, runtime: Runtime, *, sharded: bool = False
) -> None:
    """Exchange the model's layers as configured, before its weights are divided, if they are."""
    use_attention(model, on.attention)
    if not on.activations:
        stock_activations(model)
    if on.dropout:
        use_fast_dropout(model)
    if on.layers:
        # Copies of weights in 16 bits would be as large as the parts that are gathered.
        use_cpu_layers(model, "float32" if sharded else runtime.precision)


def attention_in(model: PreTrainedModel, runtime: Runtime) -> Choice:
    """The attention of the run's packed forwards; on a GPU kernels are tried, the first time."""
    with runtime.autocast():
        return attention_of(model, runtime.device)


def training_loss(
    on: OptimisationsConfig, *, smoothing: float
) -> Callable[[torch.nn.Module, Batch], torch.Tensor]:
    """The loss that is trained on, with a share of label smoothing."""
    return partial(loss_sum, smoothing=smoothing, chunk_rows=None if on.head else _ALL_ROWS)


def prefetching(
    model: PreTrainedModel, on: OptimisationsConfig, runtime: Runtime
) -> Callable[[Batches, Cursor], Prefetch]:
    """Makes batches ahead of the loop, and on a GPU sends them there with attention's plan."""
    if not on.prefetch:
        return partial(Prefetch, depth=0)
    if runtime.device.type != "cuda":
        return Prefetch
    kernel = attention_in(model, runtime).name
    prepare = partial(planned, kernel=kernel) if kernel in {"flash", "flex"} else _as_it_is
    return partial(Prefetch, feed=DeviceFeed(runtime.device, prepare))


def turned_off(on: OptimisationsConfig) -> list[str]:
    """A sentence about what is not as fast as it could be; none when nothing is turned off."""
    names = [name for name, value in on if value is False]
    if on.attention != "auto":
        names.append(f"attention: {on.attention}")
    return [f"turned off by train.optimisations: {', '.join(names)}"] if names else []


def _as_it_is(batch: Batch) -> Batch:
    return batch
