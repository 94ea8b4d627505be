"""Cross-checks: settings that are each allowed and together impossible, and longer runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

from toque.config.field_types import OF_CLASSES
from toque.config.schema import RunConfig
from toque.units import Duration, Progress

_OF_A_RUN: Final = {"best", "checkpoints", "model", "outbox", "set-aside"}
"""Folders of a run, in which it removes and replaces what it finds."""
_ANY_LENGTH: Final = ("constant", "inverse_sqrt", "cosine_restarts")
"""Schedules whose rate does not depend on the length of the run."""
_COOLDOWN: Final = Duration(20, "%")


def impossible(config: RunConfig) -> Iterator[tuple[tuple[str, str], str]]:
    """Every two settings of `config` that do not go together, the one to change first, and why."""
    for text in (*_of_weights(config), *_of_time(config), *_of_data(config)):
        named, _, why = text.partition(": ")
        first, other = named.split(", ")
        told = " and ".join(f"`{name}` is {_shown(config, name)}" for name in (first, other))
        yield (first, other), f"{told}: {why}"


def _shown(config: RunConfig, name: str) -> str:
    value: object = config
    for part in name.split("."):
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    if value == ():
        return "empty"
    if isinstance(value, str | int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return f'"{value}"' if isinstance(value, Duration) else "set"


# Each of these texts begins with its two settings, whose values are put in.
def _of_weights(config: RunConfig) -> Iterator[str]:
    model, adapter, train = config.model, config.adapter, config.train
    scratch = model.start_from == "scratch"
    held = adapter.quantize_base if adapter is not None else None
    if scratch and model.family == "auto":
        yield (
            "model.family, model.start_from: with no checkpoint there is nothing to read the "
            "family from. Name one of t5, gpt2, neox, llama."
        )
    if not scratch and model.shape:
        yield (
            "model.shape, model.start_from: a checkpoint brings its own shape. Remove "
            "`model.shape`, or set `model.start_from` to scratch."
        )
    if train.precision == "fp16" and model.family == "t5":
        yield (
            "train.precision, model.family: activations of T5 models pass 65504, the largest "
            "fp16 number, and the loss becomes NaN. Use bf16, float32 or auto."
        )
    if adapter is not None and scratch:
        yield (
            "adapter, model.start_from: an adapter beside random, frozen weights learns nothing of "
            "use. Name a checkpoint in `model.start_from`, or set `adapter` to null."
        )
    if adapter is not None and held and adapter.kind == "dora":
        yield (
            "adapter.quantize_base, adapter.kind: dora computes with the lengths of the base's "
            "own rows. Take lora or rslora, or set `adapter.quantize_base` to null."
        )
    if held and train.strategy == "fsdp":
        yield (
            "adapter.quantize_base, train.strategy: sharding takes matrices of 16 or 32 bits. Take "
            "ddp, each GPU holding the small base, or set `adapter.quantize_base` to null."
        )
    if train.activation_offload and train.gradient_checkpointing is not True:
        yield (
            "train.activation_offload, train.gradient_checkpointing: what it moves is what "
            "checkpointing keeps. Set `train.gradient_checkpointing` to true, or "
            "`train.activation_offload` to false."
        )


def _of_time(config: RunConfig) -> Iterator[str]:
    optim, stop_after = config.optim, config.train.stop_after
    for name, schedule in {"cycles": "cosine_restarts", "cooldown": "wsd"}.items():
        if getattr(optim, name) is not None and optim.schedule != schedule:
            yield (
                f"optim.{name}, optim.schedule: only {schedule} reads it. Set `optim.schedule` "
                f"to {schedule}, or remove `optim.{name}`."
            )
    own = ":" in optim.name
    for name in ("betas", "eps", "momentum"):
        read = optim.name == "muon" if name == "momentum" else optim.name != "adafactor"
        if getattr(optim, name) is not None and not (read or own):
            yield f"optim.{name}, optim.name: it has none. Set `optim.{name}` to null."
    if optim.min_lr > optim.peak_lr:
        yield (
            "optim.min_lr, optim.peak_lr: the rate falls from the peak to the minimum. Lower "
            "`optim.min_lr`."
        )
    if optim.schedule == "constant" and optim.min_lr > 0:
        yield (
            "optim.min_lr, optim.schedule: the rate never falls to it. Set `optim.min_lr` to 0 "
            "or take the schedule linear or cosine."
        )
    if (share_of(optim.warmup, stop_after) or 0.0) >= 1.0:
        yield (
            "optim.warmup, train.stop_after: the run would end before its learning rate is "
            'reached. Warm up for less, e.g. "5 %".'
        )
    if config.curriculum is None:
        return
    begins = [stage.begins for stage in config.curriculum.stages]
    shares = [share for begin in begins if (share := share_of(begin, stop_after)) is not None]
    told = f"the stages begin at {', '.join(map(str, begins))}"
    if stop_after.seconds is not None:
        yield (
            "curriculum, train.stop_after: by the clock two equal runs would see different "
            "examples. Give `train.stop_after` in epochs, steps, examples or tokens."
        )
    elif len(shares) < len(begins):
        yield (
            f"curriculum.stages, train.stop_after: {told}, in another unit than the run. Write "
            f'shares such as "50 %", or {stop_after.unit}.'
        )
    elif shares[0] != 0 or shares[-1] >= 1 or not all(a < b for a, b in pairwise(shares)):
        yield (
            f"curriculum.stages, train.stop_after: {told}. The first must begin at 0 %, each "
            "later than the one before, and the last before the run ends."
        )


def _of_data(config: RunConfig) -> Iterator[str]:
    data, gaps = config.data, config.span_corruption is not None
    # No file system takes a NUL; realpath would raise at it.
    run, store = (
        Path(os.path.realpath(at.replace("\0", ""))) for at in (config.run_dir, data.store)
    )
    if run.is_relative_to(store) or any(store.is_relative_to(run / name) for name in _OF_A_RUN):
        yield (
            "data.store, run_dir: they would write among each other's files. Give each a "
            "folder of its own, e.g. stores/my and runs/my."
        )
    if data.validation and not data.sources:
        yield (
            "data.validation, data.sources: held-out files are prepared with those to train on. "
            "Name both, or neither where the store is there."
        )
    held_out = data.validation_fraction > 0 or data.validation
    if config.train.early_stopping is not None and not held_out:
        yield (
            "train.early_stopping, data.validation_fraction: without held-out examples there is no "
            "loss to watch. Hold some out, e.g. 0.05, or set `train.early_stopping` to null."
        )
    for name, task in data.own_tasks.items():
        if not task.classes and (asked := [m for m in task.metrics if m in OF_CLASSES]):
            yield (
                f"data.tasks.{name}.metrics, data.tasks.{name}.classes: {asked[0]} is a metric of "
                f"classes. Name them, or take exact_match."
            )
    absent = [task for task in data.task_weights if task not in data.tasks]
    if absent:
        yield (
            f"data.task_weights, data.tasks: of {', '.join(absent)} there is nothing to weigh. "
            "Add it to `data.tasks`, or remove the weight."
        )
    if data.task_weights and data.task_temperature is not None:
        yield (
            "data.task_temperature, data.task_weights: both say how often a task is seen. Drop one."
        )
    if gaps and config.model.family not in ("t5", "auto"):
        yield (
            "span_corruption, model.family: it needs an encoder, which reads what is left of "
            "the text. Take t5, or set it to null."
        )
    varied = config.augmentation is not None
    if gaps and (varied or data.tasks != ("write",)):
        yield (
            f"span_corruption, {'augmentation' if varied else 'data.tasks'}: a text with gaps asks "
            "for nothing else. Pretrain without it, then go on from runs/.../model with it."
        )
    if gaps and config.evaluation.generate > 0:
        yield (
            "evaluation.generate, span_corruption: a model that fills gaps writes no recipes "
            "yet. Set `evaluation.generate` to 0."
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


def lengthened(
    old: RunConfig, new: RunConfig, at: Progress, *, total_seconds: float = 0.0
) -> str | None:
    """Sentence about continuing to another `train.stop_after`; None where that is not allowed.

    A run that ended continues under every schedule, another one where all it did so far is what the
    longer run would have done. `old` and `new` differ in their length alone; `total_seconds` is the
    length in time of a whole command that was reached, which `at` does not tell.
    """
    then, now = old.train.stop_after, new.train.stop_after
    if then == now or now.reached(at) or (now.total and (now.seconds or 0.0) <= total_seconds):
        return None
    if new.curriculum is not None and len(new.curriculum.stages) > 1:
        return None  # stages that are over would begin or end elsewhere
    schedule = new.optim.schedule
    ended = total_seconds >= (then.seconds or 0.0) if then.total else then.reached(at)
    further = then.unit == now.unit and now.amount > then.amount
    if not (ended or (further and _alike_so_far(new, then, at))):
        return None
    said = f"this run was to last {then} and is at step {at.step:,}: it goes on to {now}"
    if schedule in _ANY_LENGTH or not ended:
        return f"{said}."
    if schedule == "wsd":
        return (
            f"{said}. optim.schedule=wsd has cooled down: the rate is at its peak again from here, "
            f"and cools down before {now}."
        )
    return (
        f"{said}. optim.schedule={schedule} had taken the rate down to its end: from here it is "
        f"what it is at this point of a run of {now}, which is higher."
    )


def _alike_so_far(config: RunConfig, then: Duration, at: Progress) -> bool:
    """True where nothing that was done up to `at` depends on the length of the run."""
    optim = config.optim
    shares = [optim.warmup if optim.warmup.amount else None]
    shares += [optim.cycles.first] if optim.cycles is not None else []
    if any(part is not None and part.unit == "%" for part in shares):
        return False
    if optim.schedule != "wsd":
        return optim.schedule in _ANY_LENGTH
    cooldown = share_of(optim.cooldown or _COOLDOWN, then)
    return cooldown is not None and then.fraction(at) <= 1.0 - cooldown
