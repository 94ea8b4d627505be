"""Cross-checks: combinations of settings that are each allowed and together impossible."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from toque.config.schema import RunConfig
from toque.units import Duration

_OF_A_RUN: Final = {"best", "checkpoints", "model", "outbox", "set-aside"}
"""Folders of a run, in which it removes and replaces what it finds."""


@dataclass(frozen=True)
class Problem:
    """An impossible combination."""

    paths: tuple[str, ...]
    """The settings involved; the first is the one to change."""
    message: str


def impossible(config: RunConfig) -> Iterator[Problem]:
    """Every impossible combination in `config`."""
    yield from _folders(config)
    yield from _model(config)
    yield from _adapter(config)
    yield from _memory(config)
    yield from _learning_rate(config)
    yield from _inert(config)
    yield from _held_out(config)
    yield from _tasks(config)
    yield from _curriculum(config)
    yield from _spans(config)


def _folders(config: RunConfig) -> Iterator[Problem]:
    """A run and a store in one place, where each would find the other's files among its own."""
    # No file system takes a NUL; realpath would raise at it.
    run, store = (
        Path(os.path.realpath(at.replace("\0", ""))) for at in (config.run_dir, config.data.store)
    )
    if run.is_relative_to(store) or any(store.is_relative_to(run / name) for name in _OF_A_RUN):
        yield Problem(
            ("data.store", "run_dir"),
            f"`data.store` is {config.data.store} and `run_dir` is {config.run_dir}: they would "
            "write among each other's files. Give each a folder of its own, e.g. stores/mine and "
            "runs/mine.",
        )


def _model(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    scratch = model.start_from == "scratch"
    if scratch and model.family == "auto":
        yield Problem(
            ("model.family", "model.start_from"),
            "`model.family` is auto and `model.start_from` is scratch: with no checkpoint there is "
            "nothing to read the family from. Name one of t5, gpt2, neox, llama.",
        )
    if not scratch and model.shape:
        yield Problem(
            ("model.shape", "model.start_from"),
            f"`model.shape` is given and `model.start_from` is {model.start_from!r}: a checkpoint "
            "brings its own shape. Remove `model.shape`, or set `model.start_from` to scratch.",
        )
    if config.train.precision == "fp16" and model.family == "t5":
        yield Problem(
            ("train.precision", "model.family"),
            "`train.precision` is fp16 and `model.family` is t5: activations of T5 models pass "
            "65504, the largest fp16 number, and the loss becomes NaN. Use bf16, float32 or auto.",
        )


def _adapter(config: RunConfig) -> Iterator[Problem]:
    if config.adapter is not None and config.model.start_from == "scratch":
        yield Problem(
            ("adapter", "model.start_from"),
            "`adapter` is set and `model.start_from` is scratch: an adapter beside random, frozen "
            "weights learns nothing of use, and nobody could load it. Name a checkpoint in "
            "`model.start_from`, or set `adapter` to null.",
        )


def _memory(config: RunConfig) -> Iterator[Problem]:
    """Ways to save memory that go against each other."""
    adapter, train, strategy = config.adapter, config.train, str(config.train.strategy)
    if adapter is not None and adapter.quantize_base is not None:
        form = adapter.quantize_base
        if adapter.kind == "dora":
            yield Problem(
                ("adapter.quantize_base", "adapter.kind"),
                f"`adapter.quantize_base` is {form} and `adapter.kind` is dora, which computes "
                "with the lengths of the base's own rows. Take lora or rslora, or set "
                "`adapter.quantize_base` to null.",
            )
        if strategy in ("fsdp", "hsdp"):
            yield Problem(
                ("adapter.quantize_base", "train.strategy"),
                f"`adapter.quantize_base` is {form} and `train.strategy` is {strategy}, which "
                "shards matrices of 16 or 32 bits. Take ddp, where each GPU holds the small base "
                "whole, or set `adapter.quantize_base` to null.",
            )
    if train.activation_offload and train.gradient_checkpointing is not True:
        yield Problem(
            ("train.activation_offload", "train.gradient_checkpointing"),
            "`train.activation_offload` is true and `train.gradient_checkpointing` is "
            f"{str(train.gradient_checkpointing).lower()}: what it moves is what checkpointing "
            "keeps. Set `train.gradient_checkpointing` to true, or `train.activation_offload` to "
            "false.",
        )


def _inert(config: RunConfig) -> Iterator[Problem]:
    """Settings that nothing would read."""
    optim, averaging = config.optim, config.optim.averaging
    owners = {"cycles": "cosine_restarts", "cooldown": "wsd"}
    for name, schedule in owners.items():
        if getattr(optim, name) is not None and optim.schedule != schedule:
            yield Problem(
                (f"optim.{name}", "optim.schedule"),
                f"`optim.{name}` is set and `optim.schedule` is {optim.schedule}: only {schedule} "
                f"reads it. Set `optim.schedule` to {schedule}, or remove `optim.{name}`.",
            )
    if averaging is None:
        return
    unread = ("last", "every") if averaging.kind == "ema" else ("decay",)
    for name in unread:
        if getattr(averaging, name) is not None:
            yield Problem(
                (f"optim.averaging.{name}", "optim.averaging.kind"),
                f"`optim.averaging.{name}` is set and `optim.averaging.kind` is {averaging.kind}, "
                f"which does not read it. Remove it, or take the other kind.",
            )


def _learning_rate(config: RunConfig) -> Iterator[Problem]:
    optim, stop_after = config.optim, config.train.stop_after
    if optim.min_lr > optim.peak_lr:
        yield Problem(
            ("optim.min_lr", "optim.peak_lr"),
            f"`optim.min_lr` is {optim.min_lr:g}, above `optim.peak_lr`, {optim.peak_lr:g}. The "
            "rate falls from the peak to the minimum; lower `optim.min_lr`.",
        )
    if optim.schedule == "constant" and optim.min_lr > 0:
        yield Problem(
            ("optim.min_lr", "optim.schedule"),
            f"`optim.min_lr` is {optim.min_lr:g} and `optim.schedule` is constant, which never "
            "falls to it. Set `optim.min_lr` to 0 or take the schedule linear or cosine.",
        )
    warmup = share_of(optim.warmup, stop_after)
    if warmup is not None and warmup >= 1.0:
        yield Problem(
            ("optim.warmup", "train.stop_after"),
            f"`optim.warmup` is {str(optim.warmup)!r} of a run of {str(stop_after)!r}: the run "
            'would end before its learning rate is reached. Warm up for less, e.g. "5 %".',
        )


def _held_out(config: RunConfig) -> Iterator[Problem]:
    if config.train.early_stopping is not None and config.data.validation_fraction == 0:
        yield Problem(
            ("train.early_stopping", "data.validation_fraction"),
            "`train.early_stopping` is set and `data.validation_fraction` is 0: without held-out "
            "examples there is no loss to watch. Hold some out, e.g. 0.05, or set "
            "`train.early_stopping` to null.",
        )


def _tasks(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    absent = [task for task in data.task_weights if task not in data.tasks]
    if absent:
        yield Problem(
            ("data.task_weights", "data.tasks"),
            f"`data.task_weights` weighs {', '.join(absent)}, and `data.tasks` is "
            f"{', '.join(data.tasks)}: there is nothing to weigh. Add it to `data.tasks`, or "
            "remove the weight.",
        )
    if data.task_weights and data.task_temperature is not None:
        yield Problem(
            ("data.task_temperature", "data.task_weights"),
            "`data.task_temperature` and `data.task_weights` are both set, and both say how often "
            "each task is seen. Remove one.",
        )


def _curriculum(config: RunConfig) -> Iterator[Problem]:
    if config.curriculum is None:
        return
    stop_after = config.train.stop_after
    if stop_after.seconds is not None:
        yield Problem(
            ("curriculum", "train.stop_after"),
            f"`train.stop_after` is {str(stop_after)!r} and there is a `curriculum`: by the clock "
            "two equal runs would see different examples. Give `train.stop_after` in epochs, "
            "steps, examples or tokens.",
        )
        return
    shares = [share_of(stage.begins, stop_after) for stage in config.curriculum.stages]
    told = ", ".join(str(stage.begins) for stage in config.curriculum.stages)
    if None in shares:
        yield Problem(
            ("curriculum.stages", "train.stop_after"),
            f"`curriculum.stages` begin at {told}, and the run is measured in {stop_after.unit}. "
            f'Write shares such as "50 %", or {stop_after.unit}.',
        )
        return
    known = [share for share in shares if share is not None]
    rising = all(a < b for a, b in pairwise(known))
    if known[0] != 0 or not rising or known[-1] >= 1:
        yield Problem(
            ("curriculum.stages", "train.stop_after"),
            f"`curriculum.stages` begin at {told}: the first must begin at 0 %, each later than "
            "the one before, and the last before the run ends.",
        )


def _spans(config: RunConfig) -> Iterator[Problem]:
    if config.span_corruption is None:
        return
    if config.model.family not in ("t5", "auto"):
        yield Problem(
            ("span_corruption", "model.family"),
            f"`span_corruption` is set and `model.family` is {config.model.family}: it needs an "
            "encoder, which reads what is left of the text. Take t5, or set it to null.",
        )
    if config.augmentation is not None or config.data.tasks != ("write",):
        other = "augmentation" if config.augmentation is not None else "data.tasks"
        yield Problem(
            ("span_corruption", other),
            f"`span_corruption` is set, and so is `{other}`: a text with gaps asks for nothing but "
            "its gaps. Pretrain without it, then go on from runs/.../model with it.",
        )
    if config.evaluation.generate:
        yield Problem(
            ("evaluation.generate", "span_corruption"),
            f"`evaluation.generate` is {config.evaluation.generate} and `span_corruption` is set: "
            "a model that fills gaps writes no recipes yet. Set `evaluation.generate` to 0.",
        )


def share_of(point: Duration, whole: Duration) -> float | None:
    """A point of a run as a share of it; None where its unit is neither % nor the whole's.

    >>> share_of(Duration.parse("2 epochs"), Duration.parse("6 epochs"))
    0.3333333333333333
    """
    if point.unit == "%":
        return point.amount / 100.0
    point, whole = point.in_minutes(), whole.in_minutes()
    return point.amount / whole.amount if point.unit == whole.unit else None
