"""A run assembled: from the configuration, the store and the ranks to a trainer that is ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.evaluation.evaluator import Evaluator, writing_in
from toque.evaluation.heldout_loss import HeldOut
from toque.evaluation.sample_writer import SampleWriter
from toque.evaluation.text_samples import held_out_prompts
from toque.evaluation.text_scores import TextScores
from toque.evaluation.watched_metrics import goal_of, watched_metrics
from toque.models.loading.to_train import family_to_train, placed_model
from toque.reporter import Reporter, heard, losing
from toque.training.arithmetic import arithmetic_of, rate_of_bf16
from toque.training.callbacks import Callback, EarlyStopping
from toque.training.checkpoint.saved import Checkpoint
from toque.training.checkpoint.upload import UploadProgress, Uploads
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.sharing import Alone, Sharing
from toque.training.distributed.surroundings import is_launched
from toque.training.observers.console import ConsoleLoss, ConsoleProgress
from toque.training.observers.metrics_log import MetricsLog
from toque.training.observers.store_watch import StoreWatch
from toque.training.observers.summary import Computing, GpuUse, Summary
from toque.training.optimisations import attention_in, optimise
from toque.training.peak_flops import peak_of_ranks
from toque.training.runtime import Runtime
from toque.training.signals import Interrupt
from toque.training.strategy import Strategy, may_divide, strategy_of
from toque.training.time_limit import CommandClock
from toque.training.trainer import Trainer
from toque.units import Progress
from toque.workflows.assembly.figures import build_figures, build_gradients, phase_memory
from toque.workflows.assembly.observers import Watchers
from toque.workflows.assembly.run_length import length_of, time_left_of
from toque.workflows.assembly.setup import Setup
from toque.workflows.assembly.speed.autotune import Fitted, fit_to_machine
from toque.workflows.assembly.trainer import about_run, build_trainer
from toque.workflows.assembly.while_training.banner import banner
from toque.workflows.build import build_heldout, build_sampler, build_stream, own_prompts


@dataclass(frozen=True)
class Run:
    """What a session of training needs."""

    setup: Setup
    trainer: Trainer
    evaluator: Evaluator
    """Loss, texts and scores of every evaluation."""
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
    family = family_to_train(config.model)
    runtime = Runtime.from_settings(config.train, family, ranks)
    _refuse_offload(config, runtime)
    # What may be divided among devices is whole in the machine's memory first.
    first_at = torch.device("cpu") if may_divide(config.train, ranks) else runtime.device
    model, base_hash = placed_model(
        config.model,
        config.adapter,
        store.codec(),
        seed=config.seed,
        dtype=runtime.dtype,
        device=first_at,
    )
    strategy = strategy_of(config.train, config.adapter, config.optim.name, model, runtime)
    sharing = _placed(model, config, runtime, strategy)
    stream = build_stream(config, store, model, rank=ranks.rank, ranks=ranks.world_size)
    setup = Setup(config, store, model, stream, runtime, sharing)
    tuned = fit_to_machine(setup, found, reporter=reporter)
    tuned = replace(tuned, warnings=(*strategy.notes, *tuned.warnings))
    heldout = build_heldout(
        config, store, model, stream.layout, runtime, sharing=sharing, reporter=reporter
    )
    encoder = family.is_encoder_decoder
    evaluator = build_evaluator(setup, heldout, encoder=encoder, reporter=reporter)
    # A launcher passes on a signal that every process has had already.
    again = 5.0 if ranks.is_distributed or is_launched() else 0.0
    interrupt = Interrupt(silent=not heard(reporter), same_for_seconds=again)
    evaluator.interrupted = interrupt.has_come
    length = length_of(setup, heldout, evaluator.sampler, clock, reporter)

    def warn(at: Progress, message: str) -> None:
        trainer.callbacks.on_warning(at, message)

    def optimizer() -> torch.optim.Optimizer:
        return trainer.optimizer

    callbacks: list[Callback] = [interrupt]
    if watchers is not None:
        time_left = time_left_of(setup, length, tuned.update_seconds)
        callbacks += [
            StoreWatch(store),
            ConsoleProgress(
                log_every=config.observe.log_every, reporter=reporter, time_left=time_left
            ),
            *_observers(setup, tuned, evaluator, watchers, uploads, warn, optimizer, reporter),
        ]
    elif setup.sharded is not None:
        callbacks += build_gradients(setup, _unrecorded, optimizer)
    if length.limit is not None:
        callbacks.append(length.limit)  # after those that write at an evaluation
    if uploads is not None:
        callbacks.append(UploadProgress(uploads, Path(config.run_dir), warn))
    trainer = build_trainer(setup, tuned, evaluator, callbacks, base_hash, length)
    return Run(setup, trainer, evaluator, banner(setup, tuned, length))


def _placed(
    model: PreTrainedModel, config: RunConfig, runtime: Runtime, strategy: Strategy
) -> Sharing:
    """Put the model, with the layers its device computes fastest, where this rank holds it."""
    if not strategy.is_sharded:
        model.to(runtime.device)  # type: ignore[arg-type]  # transformers annotates it away
    optimise(model, config.train.optimisations, runtime, sharded=strategy.is_sharded)
    return strategy.share(model, runtime)


def _refuse_offload(config: RunConfig, runtime: Runtime) -> None:
    if config.train.activation_offload and runtime.device.type == "cpu":
        raise ConfigError(
            "train.activation_offload is true, and this run is on a CPU, whose memory is the one "
            "that it would be moved to. Set it to false."
        )


def build_evaluator(
    setup: Setup, heldout: HeldOut, *, encoder: bool, reporter: Reporter
) -> Evaluator:
    """What every evaluation computes and writes.

    Raises:
        ConfigError: the run goes by a metric that it does not measure.
    """
    config, store, model, runtime = setup.config, setup.store, setup.model, setup.runtime
    evaluation = config.evaluation
    held_out = held_out_prompts(store, min(evaluation.texts, evaluation.generate))
    own = own_prompts(config, store, encoder=encoder)
    watched = watched_metrics(config.train, evaluation, held_out, bits=heldout.n_bytes > 0)
    return Evaluator(
        heldout,
        model,
        setup.sharing or Alone(model),
        build_sampler(config, store, [*held_out, *own], reporter),
        len(held_out),
        runtime.ranks,
        writing_in(model, runtime),
        partial(TextScores.from_settings, evaluation, config.foreign_code),
        watched.names,
        watched.known,
        reporter,
    )


def _unrecorded(event: str, **fields: object) -> None:
    """Takes what the first rank writes down."""


def _observers(
    setup: Setup,
    tuned: Fitted,
    evaluator: Evaluator,
    watchers: Watchers,
    uploads: Uploads | None,
    warn: Callable[[Progress, str], None],
    optimizer: Callable[[], torch.optim.Optimizer],
    reporter: Reporter,
) -> list[Callback]:
    config, model, runtime = setup.config, setup.model, setup.runtime
    run, feeds = Path(config.run_dir), watchers.feeds(warn)
    arithmetic = arithmetic_of(model, setup.stream, attention_in(model, runtime))
    peak = peak_of_ranks(runtime.peak(arithmetic.products), runtime.ranks.world_size)
    memory, gpu_use = phase_memory(runtime), GpuUse()
    log = MetricsLog(
        run / "metrics.jsonl",
        log_every=config.observe.log_every,
        about=about_run(setup, tuned.resources, arithmetic) | rate_of_bf16(runtime, arithmetic),
        flops_per_token=arithmetic.flops_per_token,
        peak=peak,
        evaluated=evaluator.record,
        copies=[gpu_use.take, *(feed.take for feed in feeds)],
        beside=[part.take for part in memory],
    )
    callbacks: list[Callback] = [
        *memory,
        *build_figures(setup, log.record, warn, reporter, optimizer),
        log,
        SampleWriter(
            evaluator,
            run / "samples.jsonl",
            watched=evaluator.watched,
            reporter=reporter,
            warn=warn,
        ),
    ]
    if config.observe.summary is not None:
        computing = Computing(
            runtime.device,
            tuned.resources.compile,
            tuned.resources.micro_batch_rows,
            runtime.ranks.world_size,
            tuned.update_seconds,
            arithmetic.flops_per_token,
            peak,
        )
        told = None if uploads is None else uploads.counts.in_words
        callbacks.append(Summary(config.observe.summary, reporter, computing, told, gpu_use))
    if (shown := losing(reporter)) is not None:
        callbacks.append(ConsoleLoss(shown, warn=warn))
    if config.train.early_stopping is not None:
        asked = config.train.early_stopping
        callbacks.append(EarlyStopping(**dict(asked), rises=goal_of(asked.metric).rises))
    return [*callbacks, *watchers.callbacks(warn), *feeds]
