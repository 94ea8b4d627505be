"""A small real run on any device: packed rows, accumulation, dropout, evaluation, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fixtures.trainers import small_trainer
from tiny import model_of, shape_of, stream_of, uneven_examples
from toque.batch import Batch
from toque.data.loader.batch_stream import DeviceFeed, Prefetch
from toque.models.forward.attention import use_attention
from toque.models.forward.blocks import compile_blocks
from toque.training.callbacks import Callback, StepInfo
from toque.training.runtime import Runtime
from toque.training.trainer import Schedule, Trainer
from toque.units import Duration, Progress

HEADS, WIDTH = 2, 128
"""Heads of 64, as those of most models: a T5's kernels need smaller blocks than torch's own."""


class Losses(Callback):
    """Every update's loss and gradient norm, read only when asked for, and the warnings."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.warnings: list[str] = []

    def on_step(self, info: StepInfo) -> None:
        self.seen.append((torch.as_tensor(info.loss), torch.as_tensor(info.grad_norm)))

    def on_warning(self, at: Progress, message: str) -> None:
        self.warnings.append(message)

    @property
    def losses(self) -> list[float]:
        return [float(loss) for loss, _ in self.seen]


def model_on(
    device: torch.device, family: str, *, dropout: float, attention: Any = "auto"
) -> nn.Module:
    shape = shape_of(family, width=WIDTH, heads=HEADS, inner=96, dropout=dropout)
    model = model_of(family, seed=5, shape=shape).to(device)
    use_attention(model, attention)
    return model.train()


def run_on(
    device: torch.device,
    family: str,
    *,
    folder: Path,
    steps: int = 6,
    precision: Any = "auto",
    attention: Any = "auto",
    dropout: float = 0.1,
    rows: int = 2,
    save_every: str | None = "3 steps",
    compiled: bool = False,
    runtime: Runtime | None = None,
    loss_fn: Callable[[nn.Module, Batch], Tensor] | None = None,
) -> tuple[Trainer, Losses]:
    """A run as `toque train` builds it, small; on a GPU with batches sent ahead."""
    runtime = runtime or Runtime.detect(device=str(device), precision=precision)
    model = model_on(device, family, dropout=dropout, attention=attention)
    if compiled:
        compile_blocks(model)
    seen = Losses()
    feed = DeviceFeed(device) if device.type == "cuda" else None
    trainer = small_trainer(
        model,
        stream_of(uneven_examples(38), family, update_rows=5),
        folder=folder,
        runtime=runtime,
        schedule=Schedule(
            Duration(steps, "steps"),
            None,
            Duration.parse(save_every) if save_every else None,
        ),
        callbacks=(seen,),
        rows=rows,
        loss_fn=loss_fn,
        prefetch=partial(Prefetch, feed=feed),
    )
    return trainer, seen
