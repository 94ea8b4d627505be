"""Other programs' trainers over rows of made-up tokens, timed update by update.

TRL and Unsloth are not here. TRL's SFTTrainer takes its step from transformers.Trainer, which is,
and what it needs besides, pyarrow and pandas above all, is 71 MB of wheels, more than the 64 MiB
that can be carried to a machine without a network; Unsloth needs that and more.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from toque.batch import Batch, EncoderDecoderBatch


class Clock(TrainerCallback):  # type: ignore[misc]
    """Seconds of every update, the device waited for."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The batch is there."""
        self._begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The update is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._begun)


def by_transformers(
    model: PreTrainedModel, batch: Batch, *, examples: int, updates: int, precision: str
) -> tuple[list[float], list[float], dict[str, Any]]:
    """Updates over the same tokens by transformers.Trainer, each example a row of its own.

    Returns the seconds and the loss of each update, and the attention.
    """
    attention = "sdpa"
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:
        attention = "eager"
    rows = _rows(batch, examples)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=updates, per_device_train_batch_size=len(rows),
            learning_rate=1e-5, bf16=precision == "bf16", fp16=precision == "fp16", report_to=[],
            save_strategy="no", logging_steps=1, disable_tqdm=True, remove_unused_columns=False,
            use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=arguments, train_dataset=rows * updates, callbacks=[clock]
        )
        trainer.train()
    losses = [float(record["loss"]) for record in trainer.state.log_history if "loss" in record]
    return clock.seconds, losses, {"attention": attention, "notes": ["transformers.Trainer"]}


def _rows(batch: Batch, examples: int) -> list[dict[str, Tensor]]:
    """Arguments of a forward, an example at a time; the model shifts labels itself."""
    if isinstance(batch, EncoderDecoderBatch):
        sides = {"input_ids": batch.source_tokens, "labels": batch.target_tokens}
    else:
        sides = {"input_ids": batch.tokens, "labels": batch.tokens}
    rows = {name: side.reshape(len(side) * examples, -1) for name, side in sides.items()}
    return [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
