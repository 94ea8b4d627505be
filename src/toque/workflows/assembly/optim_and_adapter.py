"""Adapter, schedule and weight average, from a configuration."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.data.tokenizer.codec import Codec
from toque.models.lora.layers import attach, resolve
from toque.training.lr_schedules import Cycles, LearningRate, make_schedule
from toque.training.optim.weight_average import WeightAverage
from toque.units import Duration


def add_adapter(config: RunConfig, model: PreTrainedModel, codec: Codec, *, base_rows: int) -> None:
    """Put the configured adapter into `model`, if there is one.

    The rows of tokens that the base has no use for are trained besides: those of an embedding
    that had to grow, and of the marker that stands for a line break.

    Raises:
        ConfigError: unknown target modules.
    """
    wanted = config.adapter
    if wanted is None:
        return
    marker = () if codec.newline_id is None else (codec.newline_id,)
    shape = resolve(
        model,
        kind=wanted.kind,
        r=None if wanted.r == "auto" else wanted.r,
        alpha=None if wanted.alpha == "auto" else wanted.alpha,
        dropout=wanted.dropout,
        target_modules=wanted.target_modules,
        tokens=sorted({*marker, *range(base_rows, codec.vocab_size)}),
    )
    folder = Path(config.model.start_from).expanduser()
    base = str(folder.resolve()) if folder.is_dir() else config.model.start_from
    attach(model, shape, base=base, seed=config.seed)


def learning_rate(config: RunConfig, expected: dict[str, float]) -> LearningRate:
    """The learning rate as a function of progress."""
    optim = config.optim
    return make_schedule(
        optim.schedule,
        peak_lr=optim.peak_lr,
        min_lr=optim.min_lr,
        warmup=optim.warmup.in_minutes(),
        stop_after=config.train.stop_after.in_minutes(),
        expected=expected,
        cycles=Cycles(**dict(optim.cycles or {})),
        cooldown=(optim.cooldown or Duration(20, "%")).in_minutes(),
    )


def weight_average(config: RunConfig) -> WeightAverage | None:
    """An average of the weights, if asked for."""
    wanted = config.optim.averaging
    if wanted is None:
        return None
    asked = {name: value for name, value in wanted if value is not None}
    return WeightAverage(**asked, whole=config.train.stop_after)
