"""A run assembled: from the configuration, the store and the ranks to a trainer that is ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from toque.config import RunConfig
from toque.data.store.token_store import TokenStore
from toque.evaluation.heldout_loss import HeldOut
from toque.evaluation.text_samples import Sampler
from toque.models.families import family_of
from toque.models.flops import ParameterCounts, parameter_counts
from toque.models.forward.bf16.layers import use_bf16_layers
from toque.models.forward.fast_dropout import use_fast_dropout
from toque.models.lora.files import base_sha256
from toque.models.lora.layers import hold_frozen, is_adapted
from toque.reporter import SILENT, Reporter, counting, losing
from toque.training.callbacks import Callback, EarlyStopping
from toque.training.checkpoint.store import Checkpoint
from toque.training.checkpoint.upload import UploadProgress, Uploads
from toque.training.distributed.collectives import Ranks
from toque.training.observers.busy_machine import BusyMachine
from toque.training.observers.console import ConsoleLoss, ConsoleProgress
from toque.training.observers.metrics_log import MetricsLog
from toque.training.observers.store_watch import StoreWatch
from toque.training.observers.time_left import TimeLeft
from toque.training.processor_use import usable_cores
from toque.training.runtime import Runtime
from toque.training.short_waits import ShortWaits
from toque.training.signals import Interrupt
from toque.training.time_limit import CommandClock
from toque.training.trainer import Trainer
from toque.units import Cursor, Progress
from toque.version import __version__
from toque.workflows.assembly.augmentation import augmentation_in_words
from toque.workflows.assembly.autotune import Fitted, fit_to_machine
from toque.workflows.assembly.batches import build_language_model, build_stream, expected_totals
from toque.workflows.assembly.curriculum import stages_in_words
from toque.workflows.assembly.distributed_eval import rank_summary, total_peak
from toque.workflows.assembly.evaluation import (
    build_heldout,
    build_sampler,
    held_out_prompts,
    own_prompts,
)
from toque.workflows.assembly.figures import build_figures, phase_memory
from toque.workflows.assembly.mixture import mixture_in_words
from toque.workflows.assembly.observers import Watchers
from toque.workflows.assembly.sample_writer import SampleWriter, writing_in
from toque.workflows.assembly.setup import Setup
from toque.workflows.assembly.timing.ahead import Length, length_of, time_left_of, with_length
from toque.workflows.assembly.trainer import about_run, arithmetic_of, build_trainer

LOOKS = 2
"""Texts written at every evaluation for the eye; the scored ones come at the end."""


@dataclass(frozen=True)
class Run:
    """What a session of training needs."""

    setup: Setup
    trainer: Trainer
    sampler: Sampler
    """Writes the texts of every evaluation."""
    banner: str
    """The lines a run begins with."""


def assemble(
    config: RunConfig,
    store: TokenStore,
    ranks: Ranks,
    *,
    watchers: Watchers | None,
    uploads: Uploads | None,
    clock: CommandClock,
    reporter: Reporter,
    found: Checkpoint | None = None,
) -> Run:
    """Build everything a run consists of, and measure how it is best computed on this machine.

    Args:
        config: of the run.
        store: its prepared data.
        ranks: the processes that share it.
        watchers: the observers that `observe` asks for; None but on the first rank.
        uploads: copies checkpoints to a bucket; None without checkpoint.upload.
        clock: runs since the command began.
        reporter: told of progress.
        found: the checkpoint that will be continued from, which holds how it was computed.

    Raises:
        ConfigError: settings that do not fit each other, the model or the data.
    """
    model = build_language_model(config, store)
    family = family_of(model.config)
    runtime = Runtime.detect(
        precision=config.train.precision,
        deterministic=config.train.deterministic,
        fp16_is_safe=family.name != "t5",
        ranks=ranks,
    )
    base_hash = base_sha256(model) if is_adapted(model) else None
    hold_frozen(model, runtime.dtype)
    model.to(runtime.device)  # type: ignore[arg-type]  # transformers annotates it away
    use_fast_dropout(model)
    if runtime.precision == "bf16":
        use_bf16_layers(model)
    stream = build_stream(config, store, model, rank=ranks.rank, ranks=ranks.world_size)
    setup = Setup(config, store, model, stream, runtime)
    tuned = fit_to_machine(setup, found, reporter=reporter)
    heldout = build_heldout(setup)
    length = length_of(setup, heldout, clock, reporter)
    looks = own_prompts(config, store, encoder=family.is_encoder_decoder) or held_out_prompts(
        store, LOOKS
    )
    sampler = build_sampler(config, store, looks if config.evaluation.generate else [])

    def evaluate() -> dict[str, float]:
        with counting(reporter, "evaluating", "held-out examples") as count:
            return heldout(model, count)

    def warn(at: Progress, message: str) -> None:
        trainer.callbacks.on_warning(at, message)

    # torchrun passes on a signal that every process has had already.
    again = 5.0 if ranks.is_distributed else 0.0
    callbacks: list[Callback] = [Interrupt(silent=reporter is SILENT, same_for_seconds=again)]
    if watchers is not None:
        time_left = _time_left(setup, tuned, heldout, sampler, length, reporter)
        callbacks += [
            StoreWatch(store),
            ConsoleProgress(
                log_every=config.observe.log_every, reporter=reporter, time_left=time_left
            ),
            *_observers(setup, tuned, sampler, watchers, warn, lambda: trainer.optimizer, reporter),
        ]
    if length.limit is not None:
        callbacks.append(length.limit)  # after those that write at an evaluation
    if uploads is not None:
        callbacks.append(UploadProgress(uploads, Path(config.run_dir), warn))
    trainer = build_trainer(setup, tuned, evaluate, callbacks, base_hash, length)
    return Run(setup, trainer, sampler, _banner(setup, tuned, length))


def _time_left(
    setup: Setup,
    tuned: Fitted,
    heldout: HeldOut,
    sampler: Sampler,
    length: Length,
    reporter: Reporter,
) -> TimeLeft | None:
    timed = replace(setup, config=with_length(setup.config, length))
    limited = length.limit is not None
    with reporter.working("estimating how long it will take"):
        return time_left_of(timed, tuned, heldout, sampler, reporter, counts_evaluations=limited)


def _observers(
    setup: Setup,
    tuned: Fitted,
    sampler: Sampler,
    watchers: Watchers,
    warn: Callable[[Progress, str], None],
    optimizer: Callable[[], torch.optim.Optimizer],
    reporter: Reporter,
) -> list[Callback]:
    config, model, runtime = setup.config, setup.model, setup.runtime
    run, feeds = Path(config.run_dir), watchers.feeds(warn)
    arithmetic = arithmetic_of(model, setup.stream)
    memory = phase_memory(runtime)
    log = MetricsLog(
        run / "metrics.jsonl",
        log_every=config.observe.log_every,
        about=about_run(setup, tuned.resources),
        flops_per_token=arithmetic.flops_per_token,
        peak=total_peak(runtime.peak(arithmetic.products), runtime.ranks),
        copies=[feed.take for feed in feeds],
        beside=[part.take for part in memory],
    )
    callbacks: list[Callback] = [
        *memory,
        *build_figures(setup, log.record, warn, reporter, optimizer),
        log,
        SampleWriter(
            sampler,
            model,
            run / "samples.jsonl",
            writing_in(model, runtime),
            reporter=reporter,
            show=bool(config.evaluation.prompts),  # asked for by name
            warn=warn,
        ),
    ]
    if runtime.device.type == "cpu":
        callbacks.append(
            BusyMachine(warn, ShortWaits(torch.get_num_threads(), len(usable_cores())))
        )
    if (shown := losing(reporter)) is not None:
        callbacks.append(ConsoleLoss(shown, warn=warn))
    if config.train.early_stopping is not None:
        callbacks.append(EarlyStopping(**dict(config.train.early_stopping)))
    return [*callbacks, *watchers.callbacks(warn), *feeds]


def _banner(setup: Setup, tuned: Fitted, expected: Length) -> str:
    config, store, stream, runtime = setup.config, setup.store, setup.stream, setup.runtime
    counts = parameter_counts(setup.model)
    splits, tokens = store.manifest.splits, store.manifest.tokens
    shape = stream.layout.shape
    rows = f"{shape.source} + {shape.target}" if shape.source else f"{shape.target}"
    steps = expected_totals(config, stream).get("steps")
    stop = config.train.stop_after
    length = f"until {str(stop).removesuffix('s') if stop.amount == 1 else stop}"
    if steps and stop.unit != "steps":
        length += f", about {steps:,.0f} steps"
    return (
        f"toque {__version__}: {counts.total / 1e6:,.1f} M parameters "
        f"({counts.non_embedding / 1e6:,.1f} M without embeddings), "
        f"{_adapter_in_words(config, counts)}{runtime.precision} on {runtime.device}\n"
        f"{splits.train:,} examples to train on, {splits.validation:,} held out; "
        f"{tokens.prompt + tokens.target:,} tokens; rows of {rows} tokens\n"
        f"{rank_summary(runtime.ranks, str(runtime.device), stream.at(Cursor()).batch.n_rows)}"
        f"{tuned.line}\n"
        f"{mixture_in_words(config, stream.plan)}"
        f"{stages_in_words(config, stream.plan)}"
        f"{augmentation_in_words(config, store, encoder=shape.source > 0)}"
        f"{length}{expected.line}; run folder {config.run_dir}"
    )


def _adapter_in_words(config: RunConfig, counts: ParameterCounts) -> str:
    """The trained share; nothing when all is trained."""
    if config.adapter is None:
        return ""
    base = counts.total - counts.trainable
    return (
        f"{config.adapter.kind} adapter of {counts.trainable:,} parameters "
        f"({counts.trainable / base:.2%}, {counts.trainable * 4 / 1e6:,.1f} MB), "
    )
