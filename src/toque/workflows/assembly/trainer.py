"""Trainer assembly: a configured training loop, and the facts of a run for its start event."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from toque.config import RunConfig, config_sha256
from toque.evaluation.watched_metrics import goal_of
from toque.hardware.processor import usable_cores
from toque.models.flops import parameter_counts
from toque.models.forward.compile import CompileSeconds
from toque.models.lora.layers import is_adapted, refuse_unreached
from toque.models.precision import has_fast_bf16
from toque.training.arithmetic import Arithmetic
from toque.training.autotune.cache import Resources
from toque.training.autotune.oom_fallback import OomFallback
from toque.training.callbacks import Callback, Callbacks
from toque.training.checkpoint.layout_choice import chosen_layout
from toque.training.checkpoint.sharded_saver import Layout
from toque.training.checkpoint.store import CheckpointStore, RunIdentity, software_versions
from toque.training.guards.skip_step import SkipStep
from toque.training.guards.update_guard import UpdateGuard
from toque.training.lr_schedules import schedule_from_settings
from toque.training.optim.factory import build_optimizer
from toque.training.optim.gradient_noise import GradientNoise
from toque.training.optim.weight_average import WeightAverage
from toque.training.optimisations import (
    attention_in,
    prefetching,
    training_loss,
    turned_off,
)
from toque.training.part_clock import PartClock
from toque.training.schedule import Schedule
from toque.training.trainer import Trainer
from toque.version import __version__
from toque.workflows.assembly.run_length import Length
from toque.workflows.assembly.setup import Setup
from toque.workflows.assembly.speed.autotune import Fitted


def build_trainer(
    setup: Setup,
    fitted: Fitted,
    evaluator: Callable[[], dict[str, float]],
    callbacks: Sequence[Callback],
    base_hash: str | None,
    length: Length,
) -> Trainer:
    """The loop with everything it holds; `base_hash` is of the weights beside an adapter."""
    config, model, stream, runtime = setup.config, setup.model, setup.stream, setup.runtime
    run, optim, train = Path(config.run_dir), config.optim, config.train
    resources = fitted.resources
    observers, noise, outliers = Callbacks(callbacks), optim.gradient_noise, optim.outliers
    skip = SkipStep(**dict(outliers)) if outliers else None
    limit = length.limit
    optimizer = build_optimizer(model, name=optim.name, weight_decay=optim.weight_decay)
    average = WeightAverage.from_settings(optim.averaging, length.stop_after)
    return Trainer(
        model=model,
        optimizer=optimizer,
        batches=stream,
        loss_fn=runtime.phases.around(
            "forward", training_loss(train.optimisations, smoothing=optim.label_smoothing)
        ),
        lr_at=schedule_from_settings(optim, length.stop_after, stream.totals(train.stop_after)),
        evaluator=evaluator,
        checkpoints=CheckpointStore(
            run / "checkpoints",
            keep_last=train.keep_last,
            keep_best=train.keep_best,
            best_by=goal_of(train.best_by),
            identity=_identity(setup),
            held=True,  # by whoever trains, before anything is written
        ),
        callbacks=observers,
        runtime=runtime,
        sharing=setup.sharing,
        schedule=Schedule(length.stop_after, train.evaluate_every, train.save_every),
        oom_fallback=OomFallback(
            rows=resources.micro_batch_rows,
            smaller_from=dict(resources.smaller_from),
            remember=lambda smaller: replace(resources, smaller_from=dict(smaller)).save(
                run, rank=runtime.ranks.rank
            ),
            callbacks=observers,
            resources=resources,
        ),
        guard=UpdateGuard(runtime, observers, skip, run_folder=run),
        notes=[*fitted.warnings, *_notes(setup)],
        max_grad_norm=optim.max_grad_norm,
        seed=config.seed,
        noise=GradientNoise(**dict(noise), seed=config.seed) if noise else None,
        average=average,
        check_reached=refuse_unreached if is_adapted(model) else None,
        base_sha256=base_hash,
        layout=_layout(setup, optimizer, averages=average is not None),
        prefetch=prefetching(model, config.train.optimisations, runtime),
        background_saves=train.optimisations.background_saves,
        goal=goal_of(train.best_by),
        count_seconds=float if limit is None else limit.count_seconds,
        clock=PartClock(compiling=CompileSeconds() if resources.compile else float),
    )


def _layout(setup: Setup, optimizer: torch.optim.Optimizer, *, averages: bool) -> Layout:
    asked, ranks = setup.config.checkpoint.layout, setup.runtime.ranks
    return chosen_layout(asked, setup.model, optimizer, averages=averages, ranks=ranks)


def _identity(setup: Setup) -> RunIdentity:
    config, sharded = setup.config, setup.sharded
    # The order in which gradients are summed decides their last bits.
    summed = {} if sharded is None else {"strategy": sharded.strategy}
    return RunIdentity(
        config_sha256=config_sha256(config),
        data_fingerprint=setup.store.fingerprint,
        versions=software_versions() | setup.runtime.numerics | summed | _quantiser(config),
        settings=config.model_dump(mode="json"),
    )


def _quantiser(config: RunConfig) -> dict[str, str]:
    """The package that a quantised base's last bits depend on."""
    if config.adapter is None or config.adapter.quantize_base != "nf4":
        return {}
    return {"bitsandbytes": version("bitsandbytes")}


def _notes(setup: Setup) -> list[str]:
    """What is slower than it could be, and why."""
    off = turned_off(setup.config.train.optimisations)
    return [*([off] if off else []), *attention_in(setup.model, setup.runtime).notes]


def about_run(setup: Setup, resources: Resources, arithmetic: Arithmetic) -> dict[str, Any]:
    """The start event of metrics.jsonl: hash, versions, hardware, sizes, precision."""
    runtime = setup.runtime
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    counts = parameter_counts(setup.model)
    return {
        "config_sha256": config_sha256(setup.config),
        "versions": {
            "toque": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "hardware": {
            "device": cuda or platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "cores": len(usable_cores()),
            "fast_bf16": has_fast_bf16(runtime.device),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "parameters": asdict(counts) | {"trainable_share": counts.trainable / counts.total},
        "row": asdict(setup.stream.layout.shape),
        "arithmetic": arithmetic.record(),
        "precision": runtime.precision,
        "deterministic": runtime.deterministic,
        "compile": resources.compile,
        "attention": attention_in(setup.model, runtime).name,
        "gradient_checkpointing": resources.gradient_checkpointing,
        "micro_batch_rows": resources.micro_batch_rows,
        "readers": setup.stream.readers,
        "ranks": runtime.ranks.world_size,
        "strategy": "single" if setup.sharing is None else setup.sharing.strategy,
        "train": setup.config.train.model_dump(mode="json"),
        "evaluation": setup.config.evaluation.model_dump(include={"max_examples", "texts"}),
    }
