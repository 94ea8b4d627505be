"""Construction of a run from its configuration and store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from toque.config import RunConfig, config_sha256
from toque.cooking.augmentation import Rewriting
from toque.data.loader.batch_stream import BatchStream
from toque.data.loader.collate import Layout
from toque.data.loader.span_corruption import SpanCorruption
from toque.data.store.token_store import TokenStore
from toque.evaluation.evaluator import Evaluator, goal_of, watched_metrics
from toque.evaluation.heldout_loss import HeldOut
from toque.evaluation.sample_writer import SampleWriter, highlight
from toque.evaluation.text_samples import Prompt, Sampler, held_out_prompts
from toque.evaluation.text_scores import ScoresByTask
from toque.models.config_values import max_positions
from toque.models.forward.blocks import CompileSeconds
from toque.models.forward.keyed_dropout import turn_off_dropout
from toque.models.loading.trainable import ModelToTrain, SpecialTokens, family_to_train
from toque.models.lora.layers import is_adapted, refuse_unreached
from toque.reporter import SILENT, Reporter
from toque.runs.peak import Peak, peak_of
from toque.training.arithmetic import Arithmetic, count_flops
from toque.training.autotune import Fitted, fit_to_machine
from toque.training.callbacks import Callback, Callbacks
from toque.training.checkpoint.saved import Checkpoint
from toque.training.checkpoint.saver import choose_layout
from toque.training.checkpoint.store import (
    CheckpointStore,
    RunIdentity,
    software_versions,
)
from toque.training.checkpoint.upload import UploadProgress, Uploads
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.data_parallel import DataParallel
from toque.training.distributed.launcher import is_launched
from toque.training.lr_schedules import make_schedule
from toque.training.micro_batch import OomFallback
from toque.training.objectives.objective import Objective
from toque.training.observers.gradients import Gradients
from toque.training.observers.live_progress import ConsoleProgress, Summary
from toque.training.observers.metrics_log import MetricsLog, start_event
from toque.training.observers.profiler import Profiler
from toque.training.observers.system_sampler import SystemSampler
from toque.training.observers.watchers import StoreWatch, Watchers
from toque.training.optim.factory import optimizer_of
from toque.training.optim.gradient_noise import GradientNoise
from toque.training.optimisations import choose_attention, list_disabled
from toque.training.phases import PartClock
from toque.training.runtime import Runtime
from toque.training.stopping import CommandClock, Interrupt, Patience
from toque.training.strategy import PlacedModel, place_model
from toque.training.trainer import Schedule, Trainer
from toque.training.update_guard import SkipStep, UpdateGuard
from toque.workflows.banner import Banner, build_banner
from toque.workflows.run_folder.continuation import is_at_end
from toque.workflows.run_folder.start_adapter import adapter_of_run
from toque.workflows.run_length import (
    Length,
    find_length,
    predict_time,
    probing_seconds,
)
from toque.workflows.run_objective import (
    Reference,
    build_objective,
    build_reference,
    check_start_weights,
    choose_feed,
    describe_cut_prompts,
)
from toque.workflows.trained_model.prompt_format import encode_sample_prompts
from toque.workflows.trained_model.training_record import build_record


@dataclass(frozen=True)
class Run:
    """A training session, ready to begin."""

    config: RunConfig
    store: TokenStore
    model: PreTrainedModel
    stream: BatchStream
    trainer: Trainer
    evaluator: Evaluator
    final_sampler: Sampler
    """Generator of the final texts, which are scored."""
    banner: Banner


@dataclass(frozen=True)
class _Parts:
    """Parts that the evaluator, the trainer and the observers share."""

    config: RunConfig
    store: TokenStore
    runtime: Runtime
    placed: PlacedModel
    stream: BatchStream
    fitted: Fitted
    reporter: Reporter
    reference: Reference | None

    @property
    def folder(self) -> Path:
        """Run folder."""
        return Path(self.config.run_dir)


def build_run(
    config: RunConfig,
    store: TokenStore,
    ranks: Ranks,
    *,
    watchers: Watchers | None,
    uploads: Uploads | None,
    clock: CommandClock,
    reporter: Reporter,
    checkpoint: Checkpoint | None = None,
) -> Run:
    """Build all parts of a run, with the settings that are fastest on this machine.

    Args:
        config: Configuration of the run.
        store: The prepared store.
        ranks: The ranks of the run.
        watchers: The watchers, on the first rank only.
        uploads: The queue of uploads, if checkpoints are copied to a bucket.
        clock: The clock of the command.
        reporter: Receives the progress.
        checkpoint: The checkpoint to continue from.

    Raises:
        ConfigError: A setting does not fit the model or the data.
    """
    parts = _build_parts(config, store, ranks, clock, checkpoint, reporter)
    launched = ranks.is_distributed or is_launched()
    interrupt = Interrupt(silent=not reporter.heard, launched=launched)
    evaluator = _build_evaluator(parts, interrupt)
    final_sampler = _build_final_sampler(parts, evaluator)

    # The evaluations are built first, because a time limit must leave time for them.
    is_over = checkpoint is not None and is_at_end(config, checkpoint)
    length = find_length(
        config, store, evaluator, final_sampler, clock, reporter, over=is_over
    )
    evaluator.limit = length.limit

    trainer = _build_trainer(parts, evaluator, length)
    banner = build_banner(
        config, store, parts.placed, parts.stream, parts.runtime, parts.fitted, length
    )
    run = Run(
        config,
        store,
        parts.placed.model,
        parts.stream,
        trainer,
        evaluator,
        final_sampler,
        banner,
    )

    observers = _build_observers(run, parts, length, watchers, uploads)
    trainer.callbacks.extend([interrupt, *observers])
    # The limit follows the observers that write at an evaluation, because it counts their time.
    if length.limit is not None:
        length.limit.warn = trainer.callbacks.on_warning
        trainer.callbacks.extend([length.limit])
    if uploads is not None:
        warn = trainer.callbacks.on_warning
        trainer.callbacks.extend([UploadProgress(uploads, parts.folder, warn)])

    if checkpoint is not None:
        trainer.load(checkpoint)
    return run


def _build_parts(
    config: RunConfig,
    store: TokenStore,
    ranks: Ranks,
    clock: CommandClock,
    checkpoint: Checkpoint | None,
    reporter: Reporter,
) -> _Parts:
    """Place the model, build its batches, and measure the number of rows per micro-batch."""
    train, optim = config.train, config.optim
    runtime = Runtime.from_settings(train, family_to_train(config.model), ranks)
    placed = place_model(model_to_train(config, store.codec()), train, optim, runtime)
    if config.objective.kind != "sft":
        # These objectives compare probabilities with values from a pass without dropout.
        turn_off_dropout(placed.model)
    stream = build_stream(
        config, store, placed.model, rank=ranks.rank, ranks=ranks.world_size
    )
    # The autotuner follows, because it changes the model and measures the memory that is left.
    reference = build_reference(
        config,
        store,
        stream.layout,
        runtime,
        placed,
        continues=checkpoint is not None,
        reporter=reporter,
    )
    fitted = fit_to_machine(
        placed.model,
        stream,
        runtime,
        run=Path(config.run_dir),
        train=train,
        optim=optim,
        in_step=placed.sharing.is_sharded,
        checkpoint=checkpoint,
        max_seconds=probing_seconds(config, clock),
        reporter=reporter,
    )
    return _Parts(config, store, runtime, placed, stream, fitted, reporter, reference)


def model_to_train(config: RunConfig, tokens: SpecialTokens) -> ModelToTrain:
    """Describe the run's model with the tokenizer's special tokens. Load no weights."""
    adapter = adapter_of_run(config)
    return ModelToTrain(config.model, adapter, tokens, config.seed)


def build_language_model(config: RunConfig, store: TokenStore) -> PreTrainedModel:
    """Load the model to train, with its adapter, in float32 on the CPU."""
    return model_to_train(config, store.codec()).in_float32()


def build_stream(
    config: RunConfig,
    store: TokenStore,
    model: PreTrainedModel,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> BatchStream:
    """Build the stream of training batches.

    Raises:
        ConfigError: The store, the model and the settings do not fit together.
    """
    encoder = model.config.is_encoder_decoder
    spans = None
    if config.span_corruption is not None:
        spans = SpanCorruption.for_store(config.span_corruption, store, encoder=encoder)
    varied = None
    if config.augmentation is not None:
        rows = store.rows("train")
        varied = Rewriting(config.augmentation, store, rows, encoder=encoder).varied
    return BatchStream.for_training(
        config,
        store,
        model.config,
        context_length=max_positions(model.config),
        spans=spans,
        varied=varied,
        rank=rank,
        world_size=ranks,
    )


def build_heldout(
    config: RunConfig,
    store: TokenStore,
    layout: Layout,
    runtime: Runtime,
    *,
    sharing: DataParallel | None = None,
    reporter: Reporter = SILENT,
    preference: Objective | None = None,
) -> HeldOut:
    """Build the held-out loss over at most `evaluation.max_examples` examples.

    Without an objective `preference`, the loss of pairs is of the chosen answers.

    Raises:
        ConfigError: The store has no held-out example that fits.
    """
    return HeldOut.from_settings(
        config.evaluation,
        config.data,
        config.span_corruption,
        store,
        layout,
        runtime,
        sharing,
        reporter.notice,
        preference,
    )


def build_sampler(
    config: RunConfig,
    store: TokenStore,
    prompts: Sequence[Prompt],
    reporter: Reporter = SILENT,
) -> Sampler:
    """Build the greedy generator for `prompts`, with texts no longer than the store's targets."""
    record = build_record(config, store.manifest)
    return Sampler(prompts, store.codec(), record, reporter.notice)


def _build_evaluator(parts: _Parts, interrupt: Interrupt) -> Evaluator:
    """Build the evaluator.

    Raises:
        ConfigError: A setting names a metric that the run does not measure.
    """
    config, store = parts.config, parts.store
    reporter = parts.reporter
    evaluation = config.evaluation
    sharing = parts.placed.sharing
    layout = parts.stream.layout
    preference = None
    if config.objective.kind == "dpo":
        preference = build_objective(config, parts.reference)
    heldout = build_heldout(
        config,
        store,
        layout,
        parts.runtime,
        sharing=sharing,
        reporter=reporter,
        preference=preference,
    )

    n_prompts = min(evaluation.texts, evaluation.generate)
    held_out = held_out_prompts(store, n_prompts, config.data)
    samples = encode_sample_prompts(config, store, encoder=layout.shape.source > 0)
    sampler = build_sampler(config, store, [*held_out, *samples], reporter)

    watched, metrics = watched_metrics(
        config.train, evaluation, config.data, held_out, bits=heldout.n_bytes > 0
    )
    scores = partial(
        ScoresByTask.from_settings, evaluation, config.data, config.foreign_code
    )
    return Evaluator(
        heldout,
        parts.placed.model,
        sharing,
        sampler,
        len(held_out),
        parts.runtime.ranks,
        scores,
        watched,
        metrics,
        reporter,
        interrupt.has_arrived,
    )


def _build_final_sampler(parts: _Parts, evaluator: Evaluator) -> Sampler:
    """Build the generator of the final texts. Without held-out prompts, use the evaluator's own."""
    config = parts.config
    prompts = held_out_prompts(parts.store, config.evaluation.generate, config.data)
    if not prompts:
        return evaluator.sampler
    return build_sampler(config, parts.store, prompts, parts.reporter)


def _build_trainer(parts: _Parts, evaluator: Evaluator, length: Length) -> Trainer:
    """Build the training loop without its observers."""
    config, runtime = parts.config, parts.runtime
    resources = parts.fitted.resources
    train, optim = config.train, config.optim
    model = parts.placed.model
    ranks = runtime.ranks
    switches = train.optimisations
    callbacks = Callbacks(check_start_weights(config, parts.placed))

    objective = build_objective(config, parts.reference)
    optimizer = optimizer_of(model, optim)
    totals = parts.stream.totals(train.stop_after)
    skip_step = SkipStep(**dict(optim.outliers)) if optim.outliers else None
    # `float()` is 0.0: without torch.compile, no time is spent on it.
    compile_clock = CompileSeconds() if resources.compile else float
    limit = length.limit
    return Trainer(
        # The update.
        model=model,
        optimizer=optimizer,
        batches=parts.stream,
        loss_fn=runtime.phases.around("forward", objective.loss_fn),
        measurements=objective.measurements,
        lr_at=make_schedule(optim, length.stop_after, totals),
        max_grad_norm=optim.max_grad_norm,
        noise=_build_gradient_noise(config),
        seed=config.seed,
        # The machine.
        runtime=runtime,
        sharing=parts.placed.sharing,
        oom_fallback=OomFallback.from_resources(
            parts.folder, resources, callbacks, rank=ranks.rank
        ),
        prefetch=choose_feed(
            config, parts.store, parts.stream, model, parts.placed.sharing, runtime
        ),
        feed_part="rollouts" if config.objective.learns_from_rewards else "data_wait",
        clock=PartClock(compiling=compile_clock),
        # The session: its length, evaluations and checkpoints.
        schedule=Schedule(length.stop_after, train.evaluate_every, train.save_every),
        # Without a limit, the seconds of an update count unchanged.
        count_seconds=float if limit is None else limit.count_seconds,
        evaluator=evaluator,
        goal=goal_of(train.best_by),
        checkpoints=_build_checkpoint_store(parts),
        base_sha256=parts.placed.base_sha256,
        layout=choose_layout(config.checkpoint.layout, model, optimizer, ranks=ranks),
        background_saves=switches.background_saves,
        # Observers and guards.
        callbacks=callbacks,
        guard=UpdateGuard(runtime, callbacks, skip_step, run_folder=parts.folder),
        check_reached=refuse_unreached if is_adapted(model) else None,
        notes=_list_notes(parts),
    )


def _build_gradient_noise(config: RunConfig) -> GradientNoise | None:
    settings = config.optim.gradient_noise
    if settings is None:
        return None
    return GradientNoise(**dict(settings), seed=config.seed)


def _build_checkpoint_store(parts: _Parts) -> CheckpointStore:
    """Build the checkpoint store of the run folder.

    A run that learns from rewards moves away from the reference texts, so its lowest held-out loss
    is at the beginning. Its finished model is the last one.
    """
    config = parts.config
    keep_best = config.train.keep_best
    if config.objective.learns_from_rewards and config.train.best_by == "loss":
        keep_best = 0
    numerics = parts.runtime.numerics | dict(parts.placed.numerics)
    identity = RunIdentity(
        config_sha256(config),
        parts.store.fingerprint,
        software_versions() | numerics,
        config.model_dump(mode="json"),
    )
    return CheckpointStore(
        parts.folder / "checkpoints",
        keep_last=config.train.keep_last,
        keep_best=keep_best,
        best_by=goal_of(config.train.best_by),
        identity=identity,
    )


def _list_notes(parts: _Parts) -> list[str]:
    """List the choices for this machine that the log should explain."""
    return [
        *parts.placed.notes,
        *parts.fitted.warnings,
        *list_disabled(parts.config.train.optimisations),
        *describe_cut_prompts(parts.config, parts.store),
        *choose_attention(parts.placed.model, parts.runtime).notes,
    ]


def _build_observers(
    run: Run,
    parts: _Parts,
    length: Length,
    watchers: Watchers | None,
    uploads: Uploads | None,
) -> list[Callback]:
    """Build the observers of the training loop, in the order of their calls.

    Ranks other than the first have no watchers. They only contribute to gradient norms.
    """
    observe = run.config.observe
    runtime, reporter = parts.runtime, parts.reporter
    sharing = parts.placed.sharing
    gradients = partial(
        Gradients.list_if_enabled, observe.gradients, run.model, runtime.phases, sharing
    )
    if watchers is None:
        return [*gradients(record=None)] if sharing.is_sharded else []

    warn = run.trainer.callbacks.on_warning
    arithmetic = count_flops(
        run.model, run.stream, choose_attention(run.model, runtime)
    )
    device_peak = peak_of(runtime.device, runtime.dtype, arithmetic.products)
    peak = device_peak.of_ranks(runtime.ranks.world_size)
    feeds = watchers.start_feeds(warn)
    summaries = _build_summaries(parts, arithmetic, peak, uploads)
    copies = [*(s.take for s in summaries), *(feed.take for feed in feeds)]
    log = _build_metrics_log(run, parts, arithmetic, peak, copies)

    # Observers before the log may record events into it when a session ends.
    callbacks: list[Callback] = [
        StoreWatch(run.store),
        _build_console(run, parts, length),
    ]
    if observe.profile is not None:
        profiler = Profiler(
            observe.profile, parts.folder, runtime, warn, reporter.notice
        )
        callbacks.append(profiler)
    if observe.system is not None:
        sampler = SystemSampler.from_settings(
            observe.system, log.record, warn, runtime.device
        )
        callbacks.append(sampler)
    samples = SampleWriter(
        run.evaluator,
        parts.folder / "samples.jsonl",
        run.evaluator.watched,
        reporter,
        warn,
    )
    callbacks += [*gradients(record=log.record), log, samples, *summaries]
    callbacks += _build_early_stopping(run.config)
    return [*callbacks, *watchers.callbacks(warn), *feeds]


def _build_console(run: Run, parts: _Parts, length: Length) -> ConsoleProgress:
    """Build the progress on the console, with an estimate of the time left."""
    config, evaluator = run.config, run.evaluator
    has_final_texts = run.final_sampler is not evaluator.sampler
    time_left = predict_time(
        run.stream,
        length,
        config.train.evaluate_every,
        parts.fitted.update_seconds,
        n_texts=len(run.final_sampler.prompts) if has_final_texts else 0,
    )
    return ConsoleProgress(
        log_every=config.observe.log_every,
        reporter=parts.reporter,
        warn=run.trainer.callbacks.on_warning,
        time_left=time_left,
        highlight=lambda: highlight(evaluator.last, evaluator.watched),
    )


def _build_summaries(
    parts: _Parts, arithmetic: Arithmetic, peak: Peak, uploads: Uploads | None
) -> list[Summary]:
    """Build the periodic summary for the log, unless `observe.summary` is null."""
    every = parts.config.observe.summary
    if every is None:
        return []
    runtime, fitted = parts.runtime, parts.fitted
    summary = Summary(
        every,
        parts.reporter,
        runtime.device,
        fitted.resources.compile,
        fitted.resources.micro_batch_rows,
        runtime.ranks.world_size,
        fitted.update_seconds,
        arithmetic.flops_per_token,
        peak,
        None if uploads is None else uploads.counts.summary,
    )
    return [summary]


def _build_metrics_log(
    run: Run,
    parts: _Parts,
    arithmetic: Arithmetic,
    peak: Peak,
    copies: Sequence[Callable[[Mapping[str, Any]], None]],
) -> MetricsLog:
    """Build the writer of metrics.jsonl. `copies` also receive its events."""
    config, evaluator = run.config, run.evaluator
    runtime = parts.runtime
    sharing, resources = parts.placed.sharing, parts.fitted.resources
    about = {
        "config_sha256": config_sha256(config),
        **start_event(run.model, run.stream, runtime, sharing, resources, arithmetic),
        "train": config.train.model_dump(mode="json"),
        "evaluation": {
            "max_examples": evaluator.heldout.n_examples,
            "texts": config.evaluation.texts,
        },
    }
    return MetricsLog(
        parts.folder / "metrics.jsonl",
        log_every=config.observe.log_every,
        about=about,
        flops_per_token=arithmetic.flops_per_token,
        peak=peak,
        evaluated=evaluator.record,
        copies=copies,
        device=runtime.device,
    )


def _build_early_stopping(config: RunConfig) -> list[Patience]:
    settings = config.train.early_stopping
    if settings is None:
        return []
    rises = goal_of(settings.metric).rises
    evaluation = config.evaluation.model_dump(mode="json")
    return [Patience(**dict(settings), rises=rises, evaluation=evaluation)]
