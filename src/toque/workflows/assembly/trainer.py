"""Trainer assembly: a configured training loop, and the facts of a run for its start event."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers
from transformers import PreTrainedModel

from toque.config import RunConfig, config_sha256
from toque.data.loader.batch_stream import BatchStream
from toque.hardware.processor import usable_cores
from toque.models.flops import flops_per_token, parameter_counts, products_of
from toque.models.forward.compile import CompileSeconds
from toque.models.forward.kernels.choice import Choice, attention_of
from toque.models.lora.layers import is_adapted, refuse_unreached
from toque.models.precision import has_fast_bf16
from toque.training.autotune.cache import Resources
from toque.training.autotune.oom_fallback import OomFallback
from toque.training.callbacks import Callback, Callbacks
from toque.training.checkpoint.layout_choice import chosen_layout
from toque.training.checkpoint.sharded_saver import Layout
from toque.training.checkpoint.store import CheckpointStore, RunIdentity, software_versions
from toque.training.guards.skip_step import SkipStep
from toque.training.guards.update_guard import UpdateGuard
from toque.training.optim.factory import build_optimizer
from toque.training.optim.gradient_noise import GradientNoise
from toque.training.part_clock import PartClock
from toque.training.peak_flops import peak_of
from toque.training.runtime import Runtime
from toque.training.schedule import Schedule
from toque.training.trainer import Trainer
from toque.version import __version__
from toque.workflows.assembly.batches import expected_totals
from toque.workflows.assembly.optim_and_adapter import learning_rate, weight_average
from toque.workflows.assembly.setup import Setup
from toque.workflows.assembly.speed.autotune import Fitted
from toque.workflows.assembly.speed.optimisations import (
    attention_in,
    prefetching,
    training_loss,
    turned_off,
)
from toque.workflows.assembly.timing.ahead import Length, with_length
from toque.workflows.assembly.while_training.goals import goal_of


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
    by_length, limit = with_length(config, length), length.limit
    optimizer = build_optimizer(model, name=optim.name, weight_decay=optim.weight_decay)
    average = weight_average(by_length)
    return Trainer(
        model=model,
        optimizer=optimizer,
        batches=stream,
        loss_fn=runtime.phases.around("forward", training_loss(config)),
        lr_at=learning_rate(by_length, expected_totals(config, stream)),
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
        prefetch=prefetching(model, config, runtime),
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
    off = turned_off(setup.config)
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


@dataclass(frozen=True)
class Arithmetic:
    """What one useful token of a run's data costs, forward and backward."""

    flops_per_token: float
    products: dict[tuple[int, int], float]
    """Of that, the FLOPs of products with weights, by the matrix' (in, out)."""
    kind: str = "masked"
    """How attention keeps packed examples apart: variable-length (each alone) or masked."""
    masked_flops_per_token: float = 0.0
    """FLOPs of attention as it is computed where it is masked: every pair of a row's positions."""

    def record(self) -> dict[str, Any]:
        """For the start event; FLOPs per useful token."""
        products = sum(self.products.values())
        needed = self.flops_per_token - products
        masked = self.kind == "masked"
        return {
            "products": products,
            "attention": needed,
            "attention_kind": self.kind,
            "attention_computed": max(needed, self.masked_flops_per_token) if masked else needed,
        }


def rate_of_bf16(runtime: Runtime, arithmetic: Arithmetic) -> dict[str, float]:
    """The rate of the model's products in bf16, where a float32 run leaves it unused."""
    if runtime.precision != "float32" or not has_fast_bf16(runtime.device):
        return {}
    peak = peak_of(runtime.device, torch.bfloat16, arithmetic.products)
    return {"bf16_peak": peak.flops_per_second}


def arithmetic_of(
    model: PreTrainedModel, stream: BatchStream, attention: Choice | None = None
) -> Arithmetic:
    """Forward and backward arithmetic of one useful token of this data, by some attention."""
    source, target = (
        side.astype(float) for side in (stream.plan.source_lengths, stream.plan.target_lengths)
    )

    def context(lengths: np.ndarray, of: np.ndarray) -> float:  # that an average token of `of` has
        return float((lengths * of).sum() / max(1.0, float(of.sum())))

    own, shape = context(target, target) / 2, stream.layout.shape
    if shape.source == 0:
        # As `BatchStream` counts: a last token is no input; without a prompt a first is no label.
        prompts, targets = stream.prompt_lengths, stream.target_lengths
        labelled = int(targets.sum()) - int((prompts == 0).sum())
        tokens = int(prompts.sum()) + int(targets.sum()) - len(targets)
        shares = {"labelled_share": labelled / max(1, tokens)}
        flops = flops_per_token(model, context=own, **shares)
        everything = flops_per_token(model, context=shape.target, **shares)
    else:
        shares = {"source_share": float(source.sum()) / float(source.sum() + target.sum())}
        flops = flops_per_token(
            model,
            context=own,
            source_context=context(source, source),
            cross_context=context(source, target),
            **shares,
        )
        sides = {"source_context": shape.source, "cross_context": shape.source}
        everything = flops_per_token(model, context=shape.target, **sides, **shares)
    products = products_of(model, **shares)
    chosen = attention or attention_of(model, model.device)
    kind = "masked" if chosen.name == "dense" else "variable-length"
    return Arithmetic(flops, products, kind, everything - sum(products.values()))
