"""`transformers.Trainer` for so many minutes, and the loss of any folder's model on examples alone.

Both read the ids of a prepared store, so that every side sees the same tokens. The Trainer keeps
its usual settings (AdamW, linear decay after a warm-up, gradients clipped at 1, batches padded to
their longest) but for one: its rate falls to zero at the end of the time, not of a number of
updates that nobody knows beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from toque.data.store.token_store import TokenStore

UNLABELLED = -100
WARMUP_SHARE, WARMUP_UPDATES = 0.05, 3
"""Of the time, or so many updates where that is longer."""
Example = dict[str, Tensor]


def example_of(store: TokenStore, row: int, *, is_encoder_decoder: bool) -> Example:
    """A store's row as transformers' models take it: `input_ids` and `labels`."""
    prompt, target = (
        torch.from_numpy(np.asarray(side(row), np.int64)) for side in (store.prompt, store.target)
    )
    if is_encoder_decoder:
        return {"input_ids": prompt, "labels": target}
    unlabelled = torch.full_like(prompt, UNLABELLED)
    return {
        "input_ids": torch.cat([prompt, target]),
        "labels": torch.cat([unlabelled, target]),
    }


def padded(examples: Sequence[Example]) -> Example:
    """A batch, padded to its longest."""
    ids = [example["input_ids"] for example in examples]
    labels = [example["labels"] for example in examples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=UNLABELLED),
    }


def from_scratch(folder: Path) -> PreTrainedModel:
    """A model of the shape in a folder's config.json, as transformers draws its weights."""
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_config(config, dtype=torch.float32)
    return model


@dataclass
class Clock(TrainerCallback):  # type: ignore[misc]
    """Ends training when the time is over, and knows the rate of the next update."""

    seconds: float
    warmup: float = float(WARMUP_UPDATES)
    """Updates."""
    updates: list[float] = field(default_factory=list)
    """Seconds from the beginning to the end of each."""
    began: float = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start."""
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop after the first update that ends later."""
        self.updates.append(time.perf_counter() - self.began)
        if self.updates[-1] >= self.seconds:  # and never False: the last of `most` has set it
            control.should_training_stop = True

    def rate(self, update: int) -> float:
        """Share of the peak learning rate: up in `warmup` updates, down to 0 when the time ends."""
        gone = self.updates[-1] / self.seconds if self.updates else 0.0
        return max(0.0, 1.0 - gone) * min(1.0, (update + 1) / self.warmup)


class TimedTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose rate goes by a clock."""

    clock: Clock

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """The clock's rate in place of one over a number of updates."""
        by = optimizer if optimizer is not None else self.optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(by, self.clock.rate)
        return self.lr_scheduler


def train(
    shape: Path,
    store: TokenStore,
    out: Path,
    *,
    minutes: float,
    lr: float,
    batch: int,
    bf16: bool,
    seed: int,
) -> dict[str, Any]:
    """Train from scratch and save the model in `out`; speed, losses and seconds.

    Two updates of a model that is thrown away are timed before: the warm-up's length follows.
    """
    rows = store.rows("train")

    def run(clock: Clock, most: int) -> TimedTrainer:
        torch.manual_seed(seed)
        model = from_scratch(shape)
        is_encoder_decoder = bool(model.config.is_encoder_decoder)
        arguments = TrainingArguments(
            output_dir=str(out),
            max_steps=most,
            per_device_train_batch_size=batch,
            learning_rate=lr,
            bf16=bf16,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            seed=seed,
            remove_unused_columns=False,
        )
        trainer = TimedTrainer(
            model=model,
            args=arguments,
            train_dataset=Rows(store, rows, is_encoder_decoder=is_encoder_decoder),
            data_collator=padded,
            callbacks=[clock],
        )
        trainer.clock = clock
        trainer.train()
        return trainer

    tried = Clock(float("inf"))
    run(tried, most=2)
    update = tried.updates[1] - tried.updates[0]
    clock = Clock(60 * minutes, warmup=max(WARMUP_UPDATES, WARMUP_SHARE * 60 * minutes / update))
    trainer = run(clock, most=10**6)
    trainer.save_model(str(out))
    return {
        "lr": lr,
        "updates": len(clock.updates),
        "seconds": round(clock.updates[-1], 2),
        "warmup_updates": round(clock.warmup, 1),
        "losses": [round(e["loss"], 4) for e in trainer.state.log_history if "loss" in e][-3:],
    }


class Rows(torch.utils.data.Dataset[Example]):
    """The training examples of a store."""

    def __init__(self, store: TokenStore, rows: Any, *, is_encoder_decoder: bool) -> None:
        self.store, self.rows, self.is_encoder_decoder = store, rows, is_encoder_decoder

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        row = int(self.rows[index])
        return example_of(self.store, row, is_encoder_decoder=self.is_encoder_decoder)


def loss_alone(folder: Path, store: TokenStore, rows: Iterable[int]) -> float:
    """Nats a target token of a folder's model: stock transformers, example by example, float32."""
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    nats, targets = 0.0, 0
    with torch.no_grad():
        for row in rows:
            example = example_of(store, row, is_encoder_decoder=config.is_encoder_decoder)
            n = int((example["labels"] != UNLABELLED).sum())
            one = {name: values[None] for name, values in example.items()}
            nats, targets = nats + float(model(**one).loss) * n, targets + n
    return nats / targets
