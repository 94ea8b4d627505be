"""Checks of combinations of settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from toque.config.field_types import OF_CLASSES
from toque.config.schema import DataConfig, RunConfig
from toque.config.schema_methods import FROM_REWARDS
from toque.units import Duration

_RUN_FOLDERS = {"best", "checkpoints", "model", "outbox", "set-aside"}
"""Subfolders of a run folder in which the run deletes and replaces files."""


_SETTINGS_OF_OBJECTIVES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("dpo",): ("beta", "label_smoothing", "length_normalised"),
    ("dpo", *FROM_REWARDS): ("sft_weight",),
    FROM_REWARDS: ("rewards", "samples", "temperature", "kl"),
}
"""Settings of `objective`, by the kinds that use them."""


class Conflict(NamedTuple):
    """Two settings that cannot be combined. The user should change the first one."""

    first: str
    second: str
    reason: str


def find_conflicts(config: RunConfig) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield pairs of settings that cannot be combined, each with a message.

    The user should change the first setting of a pair.
    """
    conflicts = (
        *_model_conflicts(config),
        *_optimizer_conflicts(config),
        *_objective_conflicts(config),
        *_curriculum_conflicts(config),
        *_data_conflicts(config),
        *_span_corruption_conflicts(config),
    )
    for first, second, reason in conflicts:
        first_value = _format_value(config, first)
        second_value = _format_value(config, second)
        values = f"`{first}` is {first_value} and `{second}` is {second_value}"
        yield (first, second), f"{values}: {reason}"


def _format_value(config: RunConfig, name: str) -> str:
    """Format the value of a setting for a message."""
    value: object = config
    for part in name.split("."):
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    if value in ((), {}):
        return "empty"
    if isinstance(value, str | int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return f'"{value}"' if isinstance(value, Duration) else "set"


def _model_conflicts(config: RunConfig) -> Iterator[Conflict]:
    model, train = config.model, config.train
    from_scratch = model.start_from == "scratch"

    if from_scratch and model.family == "auto":
        yield Conflict(
            "model.family",
            "model.start_from",
            "only a checkpoint determines its family. Choose t5, gpt2, neox or llama.",
        )

    if not from_scratch and model.shape:
        yield Conflict(
            "model.shape",
            "model.start_from",
            "a checkpoint has its own shape. Remove `model.shape`, or set `model.start_from` to "
            "scratch.",
        )

    if train.precision == "fp16" and model.family == "t5":
        yield Conflict(
            "train.precision",
            "model.family",
            "activations of T5 models exceed 65504, the largest number in fp16, and the loss "
            "becomes NaN. Use bf16, float32 or auto.",
        )

    yield from _adapter_conflicts(config)

    if train.activation_offload and train.gradient_checkpointing is not True:
        yield Conflict(
            "train.activation_offload",
            "train.gradient_checkpointing",
            "offloading moves the activations that gradient checkpointing stores. Set "
            "`train.gradient_checkpointing` to true, or `train.activation_offload` to false.",
        )


def _adapter_conflicts(config: RunConfig) -> Iterator[Conflict]:
    adapter = config.adapter
    if adapter is None:
        return

    if config.model.start_from == "scratch":
        yield Conflict(
            "adapter",
            "model.start_from",
            "an adapter on random, frozen weights learns nothing useful. Set `model.start_from` "
            "to a checkpoint, or `adapter` to null.",
        )

    is_quantized = adapter.quantize_base is not None
    if is_quantized and adapter.kind == "dora":
        yield Conflict(
            "adapter.quantize_base",
            "adapter.kind",
            "dora needs the norms of the original weights. Use lora or rslora, or set "
            "`adapter.quantize_base` to null.",
        )

    if is_quantized and config.train.strategy == "fsdp":
        yield Conflict(
            "adapter.quantize_base",
            "train.strategy",
            "fsdp shards only matrices of 16 or 32 bits. Use ddp, with a copy of the small base "
            "on each GPU, or set `adapter.quantize_base` to null.",
        )


def _objective_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield conflicts of the objective with its own settings and with other sections."""
    objective = config.objective
    for kinds, names in _SETTINGS_OF_OBJECTIVES.items():
        for name in names:
            is_set = (
                getattr(objective, name) != type(objective).model_fields[name].default
            )
            if is_set and objective.kind not in kinds:
                users = " and ".join(kinds) + (" use" if len(kinds) > 1 else " uses")
                yield Conflict(
                    f"objective.{name}",
                    "objective.kind",
                    f"only {users} it. Set `objective.kind` to {kinds[0]}, or "
                    f"remove `objective.{name}`.",
                )
    if objective.kind == "sft":
        return

    if objective.learns_from_rewards:
        yield from _reward_conflicts(config)

    data = config.data
    if data.sources and not data.validation and data.validation_fraction == 0:
        yield Conflict(
            "data.validation_fraction",
            "objective.kind",
            f"{objective.kind} is evaluated on held-out examples. Set it to 0.1, for example, or "
            "name held-out files in `data.validation`.",
        )
    if config.model.start_from == "scratch":
        yield Conflict(
            "objective.kind",
            "model.start_from",
            f"{objective.kind} improves a model that can already write. Set `model.start_from` to "
            "the `model/` folder of a run, or to another checkpoint.",
        )
    others = {"span_corruption": "prompts", "augmentation": "texts"}
    for section, changed in others.items():
        if getattr(config, section) is not None:
            yield Conflict(
                section,
                "objective.kind",
                f"{objective.kind} compares texts for the same prompt, and {section} changes "
                f"{changed}. Remove `{section}`.",
            )
    if config.optim.label_smoothing:
        remedy = "Set it to 0."
        if objective.kind == "dpo":
            remedy = "Use `objective.label_smoothing`."
        yield Conflict(
            "optim.label_smoothing",
            "objective.kind",
            f"{objective.kind} needs the exact probabilities of texts. {remedy}",
        )


def _reward_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield conflicts of objectives that learn from rewards."""
    if not any(config.objective.rewards.values()):
        yield Conflict(
            "objective.rewards",
            "objective.kind",
            "there is nothing to learn from. Set it to scores and weights other than 0, e.g. "
            "{cookable: 1.0}.",
        )
    if config.train.batch.unit != "examples":
        yield Conflict(
            "train.batch",
            "objective.kind",
            "the texts of an update do not exist yet, so it has a number of prompts. Set "
            '`train.batch` to a number of examples such as "8 examples".',
        )
    if config.objective.kl and config.objective.sft_weight:
        yield Conflict(
            "objective.kl",
            "objective.sft_weight",
            "the divergence is a mean over the texts of the model, and both keep it near the data. "
            "Set one of them to 0.",
        )
    if config.objective.kl and config.train.strategy == "fsdp":
        yield Conflict(
            "objective.kl",
            "train.strategy",
            "the reference model would need the memory that fsdp saves. Set `objective.kl` to 0, "
            "or use ddp.",
        )


def _optimizer_conflicts(config: RunConfig) -> Iterator[Conflict]:
    optim, stop_after = config.optim, config.train.stop_after

    for name, schedule in {"cycles": "cosine_restarts", "cooldown": "wsd"}.items():
        if getattr(optim, name) is not None and optim.schedule != schedule:
            yield Conflict(
                f"optim.{name}",
                "optim.schedule",
                f"only {schedule} uses it. Set `optim.schedule` to {schedule}, or remove "
                f"`optim.{name}`.",
            )

    if ":" not in optim.name:  # an optimizer of the user may have any options
        unused = [] if optim.name == "muon" else ["momentum"]
        if optim.name == "adafactor":
            unused += ["betas", "eps"]
        for name in unused:
            if getattr(optim, name) is not None:
                yield Conflict(
                    f"optim.{name}",
                    "optim.name",
                    f"this optimizer does not use it. Set `optim.{name}` to null.",
                )

    if optim.ema_decay is not None and config.objective.kind != "sft":
        yield Conflict(
            "optim.ema_decay",
            "objective.kind",
            "the held-out loss decides whether an average is kept, and it does not measure this "
            "objective. Set `optim.ema_decay` to null.",
        )

    if optim.min_lr > optim.peak_lr:
        yield Conflict(
            "optim.min_lr",
            "optim.peak_lr",
            "the learning rate decreases from the peak to the minimum. Lower `optim.min_lr`.",
        )

    if optim.schedule == "constant" and optim.min_lr > 0:
        yield Conflict(
            "optim.min_lr",
            "optim.schedule",
            "a constant rate never reaches the minimum. Set `optim.min_lr` to 0, or use the "
            "schedule linear or cosine.",
        )

    if (share_of(optim.warmup, stop_after) or 0.0) >= 1.0:
        yield Conflict(
            "optim.warmup",
            "train.stop_after",
            'the run would end before the warmup. Shorten it, e.g. to "5 %".',
        )


def _curriculum_conflicts(config: RunConfig) -> Iterator[Conflict]:
    if config.curriculum is None:
        return
    stop_after = config.train.stop_after
    begins = [stage.begins for stage in config.curriculum.stages]
    known_shares = [share_of(begin, stop_after) for begin in begins]
    shares = [share for share in known_shares if share is not None]
    stages = f"the stages start at {', '.join(map(str, begins))}"
    if stop_after.seconds is not None:
        yield Conflict(
            "curriculum",
            "train.stop_after",
            "with a time limit, two equal runs would train on different examples. Give "
            "`train.stop_after` in epochs, steps, examples or tokens.",
        )
        return
    if len(shares) < len(begins):
        yield Conflict(
            "curriculum.stages",
            "train.stop_after",
            f"{stages}, in another unit than the run. Write "
            f'shares such as "50 %", or {stop_after.unit}.',
        )
        return
    is_rising = all(a < b for a, b in pairwise(shares))
    if shares[0] != 0 or shares[-1] >= 1 or not is_rising:
        yield Conflict(
            "curriculum.stages",
            "train.stop_after",
            f"{stages}. The first must start at 0 %, each stage after the previous one, and the "
            "last before the end of the run.",
        )


def _data_conflicts(config: RunConfig) -> Iterator[Conflict]:
    data = config.data
    run = _real_path(config.run_dir)
    store = _real_path(data.store)

    if run.is_relative_to(store) or any(
        store.is_relative_to(run / name) for name in _RUN_FOLDERS
    ):
        yield Conflict(
            "data.store",
            "run_dir",
            "one folder is inside the other, and their files would mix. Choose separate folders, "
            "e.g. stores/my and runs/my.",
        )

    if data.validation and not data.sources:
        yield Conflict(
            "data.validation",
            "data.sources",
            "validation files are prepared together with training files. Set both, or neither if "
            "the store exists.",
        )

    has_validation = data.validation_fraction > 0 or data.validation
    if config.train.early_stopping is not None and not has_validation:
        yield Conflict(
            "train.early_stopping",
            "data.validation_fraction",
            "without held-out examples there is no loss to watch. Hold some out, e.g. 0.05, or "
            "set `train.early_stopping` to null.",
        )

    yield from _task_conflicts(data)


def _task_conflicts(data: DataConfig) -> Iterator[Conflict]:
    for name, task in data.own_tasks.items():
        class_metrics = [metric for metric in task.metrics if metric in OF_CLASSES]
        if class_metrics and not task.classes:
            yield Conflict(
                f"data.tasks.{name}.metrics",
                f"data.tasks.{name}.classes",
                f"{class_metrics[0]} needs classes. Set them, or use exact_match.",
            )

    unknown_tasks = [task for task in data.task_weights if task not in data.tasks]
    if unknown_tasks:
        yield Conflict(
            "data.task_weights",
            "data.tasks",
            f"{', '.join(unknown_tasks)} has a weight, but is not a task of the run. Add it to "
            "`data.tasks`, or remove the weight.",
        )

    if data.task_weights and data.task_temperature is not None:
        yield Conflict(
            "data.task_temperature",
            "data.task_weights",
            "both set how often a task is sampled. Remove one.",
        )


def _span_corruption_conflicts(config: RunConfig) -> Iterator[Conflict]:
    if config.span_corruption is None:
        return

    if config.model.family not in ("t5", "auto"):
        yield Conflict(
            "span_corruption",
            "model.family",
            "span corruption needs an encoder. Use t5, or set `span_corruption` to null.",
        )

    augments = config.augmentation is not None
    if augments or config.data.tasks != ("write",):
        yield Conflict(
            "span_corruption",
            f"{'augmentation' if augments else 'data.tasks'}",
            "span corruption is a task of its own. Pretrain with it alone, and then start another "
            "run from runs/.../model without it.",
        )

    if config.evaluation.generate > 0:
        yield Conflict(
            "evaluation.generate",
            "span_corruption",
            "a model that predicts removed spans cannot generate recipes yet. Set "
            "`evaluation.generate` to 0.",
        )


def _real_path(name: str) -> Path:
    return Path(os.path.realpath(name.replace("\0", "")))  # realpath raises for a NUL


def share_of(point: Duration, length: Duration) -> float | None:
    """Convert a point of a run to a fraction of its length. Return None if the units differ.

    >>> share_of(Duration.parse("2 epochs"), Duration.parse("6 epochs"))
    0.3333333333333333
    """
    if point.unit == "%":
        return point.amount / 100.0
    point, length = point.in_minutes(), length.in_minutes()
    return point.amount / length.amount if point.unit == length.unit else None
