"""Builder of a run. Each object receives its section of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
from toque.models.loading.trainable import ModelToTrain, SpecialTokens, family_to_train
from toque.models.lora.layers import is_adapted, refuse_unreached
from toque.reporter import SILENT, Reporter
from toque.runs.peak import peak_of
from toque.training.arithmetic import count_flops
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
from toque.training.observers.gradients import Gradients
from toque.training.observers.live_progress import ConsoleProgress, Summary
from toque.training.observers.metrics_log import MetricsLog, start_event
from toque.training.observers.profiler import Profiler
from toque.training.observers.system_sampler import SystemSampler
from toque.training.observers.watchers import StoreWatch, Watchers
from toque.training.optim.factory import optimizer_of
from toque.training.optim.gradient_noise import GradientNoise
from toque.training.optimisations import (
    choose_attention,
    choose_prefetch,
    list_disabled,
    training_loss,
)
from toque.training.phases import PartClock
from toque.training.runtime import Runtime
from toque.training.stopping import CommandClock, Interrupt, Patience
from toque.training.strategy import PlacedModel, place_model
from toque.training.trainer import Schedule, Trainer
from toque.training.update_guard import SkipStep, UpdateGuard
from toque.workflows.banner import Banner, build_banner
from toque.workflows.model_record import build_record
from toque.workflows.prompts import encode_sample_prompts
from toque.workflows.run_folder import is_at_end
from toque.workflows.run_length import (
    Length,
    find_length,
    predict_time,
    probing_seconds,
)


@dataclass(frozen=True)
class Run:
    """A session of training, ready to begin."""

    config: RunConfig
    store: TokenStore
    model: PreTrainedModel
    stream: BatchStream
    trainer: Trainer
    evaluator: Evaluator
    scored: Sampler
    """Sampler of the final texts, which are scored."""
    banner: Banner


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
        config: The configuration.
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
    # The model of this rank.
    train, optim = config.train, config.optim
    runtime = Runtime.from_settings(train, family_to_train(config.model), ranks)
    placed = place_model(model_to_train(config, store.codec()), train, optim, runtime)
    model, sharing = placed.model, placed.sharing

    # Batches, and the number of rows per micro-batch.
    stream = build_stream(config, store, model, rank=ranks.rank, ranks=ranks.world_size)
    fitted = fit_to_machine(
        model,
        stream,
        runtime,
        run=Path(config.run_dir),
        train=train,
        optim=optim,
        in_step=sharing.is_sharded,
        checkpoint=checkpoint,
        max_seconds=probing_seconds(config, clock),
        reporter=reporter,
    )

    # Evaluations. Their time limits the time of training, and a signal interrupts them.
    launched = ranks.is_distributed or is_launched()
    interrupt = Interrupt(silent=not reporter.heard, launched=launched)
    evaluator = _evaluator(
        config, store, placed, stream.layout, runtime, interrupt, reporter
    )
    prompts = held_out_prompts(store, config.evaluation.generate, config.data)
    scored = (
        build_sampler(config, store, prompts, reporter)
        if prompts
        else evaluator.sampler
    )
    over = checkpoint is not None and is_at_end(config, checkpoint)
    length = find_length(config, store, evaluator, scored, clock, reporter, over=over)
    evaluator.limit = length.limit

    # The trainer and its observers, in the order of their calls.
    trainer = _trainer(
        config, store, placed, stream, runtime, evaluator, fitted, length
    )
    strategy = sharing.strategy
    banner = build_banner(
        config, store, model, stream, runtime, strategy, fitted, length
    )
    run = Run(config, store, model, stream, trainer, evaluator, scored, banner)
    observers = [
        interrupt,
        *_observers(run, fitted, length, watchers, uploads, reporter),
    ]
    if length.limit is not None:
        length.limit.warn = trainer.callbacks.on_warning
        observers.append(length.limit)  # after observers that write at an evaluation
    if uploads is not None:
        observers.append(
            UploadProgress(uploads, Path(config.run_dir), trainer.callbacks.on_warning)
        )
    trainer.callbacks.extend(observers)
    if checkpoint is not None:
        trainer.load(checkpoint)
    return run


def model_to_train(config: RunConfig, tokens: SpecialTokens) -> ModelToTrain:
    """Return the run's model, for a tokenizer, before it is loaded."""
    return ModelToTrain(config.model, config.adapter, tokens, config.seed)


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
    trained: Layout,
    runtime: Runtime,
    *,
    sharing: DataParallel | None = None,
    reporter: Reporter = SILENT,
) -> HeldOut:
    """Build the held-out loss over at most `evaluation.max_examples` examples.

    Raises:
        ConfigError: The store has no held-out example that fits.
    """
    return HeldOut.from_settings(
        config.evaluation,
        config.data,
        config.span_corruption,
        store,
        trained,
        runtime,
        sharing,
        reporter.notice,
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


def _evaluator(
    config: RunConfig,
    store: TokenStore,
    placed: PlacedModel,
    trained: Layout,
    runtime: Runtime,
    interrupt: Interrupt,
    reporter: Reporter,
) -> Evaluator:
    """Build the evaluator.

    Raises:
        ConfigError: A setting names a metric that the run does not measure.
    """
    evaluation = config.evaluation
    sharing = placed.sharing
    heldout = build_heldout(
        config, store, trained, runtime, sharing=sharing, reporter=reporter
    )
    n_prompts = min(evaluation.texts, evaluation.generate)
    held_out = held_out_prompts(store, n_prompts, config.data)
    samples = encode_sample_prompts(config, store, encoder=trained.shape.source > 0)
    watched, metrics = watched_metrics(
        config.train, evaluation, config.data, held_out, bits=heldout.n_bytes > 0
    )
    return Evaluator(
        heldout,
        placed.model,
        sharing,
        build_sampler(config, store, [*held_out, *samples], reporter),
        len(held_out),
        runtime.ranks,
        partial(
            ScoresByTask.from_settings, evaluation, config.data, config.foreign_code
        ),
        watched,
        metrics,
        reporter,
        interrupt.has_come,
    )


def _trainer(
    config: RunConfig,
    store: TokenStore,
    placed: PlacedModel,
    stream: BatchStream,
    runtime: Runtime,
    evaluator: Evaluator,
    fitted: Fitted,
    length: Length,
) -> Trainer:
    """Build the training loop without its observers."""
    run = Path(config.run_dir)
    train = config.train
    model, ranks = placed.model, runtime.ranks
    callbacks = Callbacks()
    goal = goal_of(train.best_by)

    optim = config.optim
    optimizer = optimizer_of(model, optim)
    skip = SkipStep(**dict(optim.outliers)) if optim.outliers else None
    noise = None
    if optim.gradient_noise is not None:
        noise = GradientNoise(**dict(optim.gradient_noise), seed=config.seed)
    loss_fn = training_loss(train.optimisations, smoothing=optim.label_smoothing)
    notes = [
        *placed.notes,
        *fitted.warnings,
        *list_disabled(train.optimisations),
        *choose_attention(model, runtime).notes,
    ]
    return Trainer(
        model=model,
        optimizer=optimizer,
        batches=stream,
        loss_fn=runtime.phases.around("forward", loss_fn),
        lr_at=make_schedule(optim, length.stop_after, stream.totals(train.stop_after)),
        evaluator=evaluator,
        checkpoints=CheckpointStore(
            run / "checkpoints",
            keep_last=train.keep_last,
            keep_best=train.keep_best,
            best_by=goal,
            identity=RunIdentity(
                config_sha256(config),
                store.fingerprint,
                software_versions() | runtime.numerics | dict(placed.numerics),
                config.model_dump(mode="json"),
            ),
        ),
        callbacks=callbacks,
        runtime=runtime,
        sharing=placed.sharing,
        schedule=Schedule(length.stop_after, train.evaluate_every, train.save_every),
        oom_fallback=OomFallback.in_run(
            run, fitted.resources, callbacks, rank=ranks.rank
        ),
        guard=UpdateGuard(runtime, callbacks, skip, run_folder=run),
        notes=notes,
        max_grad_norm=optim.max_grad_norm,
        seed=config.seed,
        noise=noise,
        check_reached=refuse_unreached if is_adapted(model) else None,
        base_sha256=placed.base_sha256,
        layout=choose_layout(config.checkpoint.layout, model, optimizer, ranks=ranks),
        prefetch=choose_prefetch(train.optimisations, runtime),
        background_saves=train.optimisations.background_saves,
        goal=goal,
        count_seconds=float if length.limit is None else length.limit.count_seconds,
        clock=PartClock(
            compiling=CompileSeconds() if fitted.resources.compile else float
        ),
    )


def _observers(
    run: Run,
    fitted: Fitted,
    length: Length,
    watchers: Watchers | None,
    uploads: Uploads | None,
    reporter: Reporter,
) -> list[Callback]:
    """Build the loop's observers. Ranks other than the first only assist the first one."""
    config = run.config
    trainer, evaluator = run.trainer, run.evaluator
    runtime, sharing = trainer.runtime, evaluator.sharing
    observe = config.observe
    gradients = partial(
        Gradients.from_settings, observe.gradients, run.model, runtime.phases, sharing
    )
    if watchers is None:
        return [*gradients(record=None)] if sharing.is_sharded else []

    warn = trainer.callbacks.on_warning
    world_size = runtime.ranks.world_size
    n_texts = 0 if run.scored is evaluator.sampler else len(run.scored.prompts)
    console = ConsoleProgress(
        log_every=observe.log_every,
        reporter=reporter,
        warn=warn,
        time_left=predict_time(
            run.stream,
            length,
            config.train.evaluate_every,
            fitted.update_seconds,
            n_texts=n_texts,
        ),
        highlight=lambda: highlight(evaluator.last, evaluator.watched),
    )
    arithmetic = count_flops(
        run.model, run.stream, choose_attention(run.model, runtime)
    )
    peak = peak_of(runtime.device, runtime.dtype, arithmetic.products).of_ranks(
        world_size
    )
    feeds = watchers.feeds(warn)
    summaries: list[Summary] = []
    if observe.summary is not None:
        summary = Summary(
            observe.summary,
            reporter,
            runtime.device,
            fitted.resources.compile,
            fitted.resources.micro_batch_rows,
            world_size,
            fitted.update_seconds,
            arithmetic.flops_per_token,
            peak,
            None if uploads is None else uploads.counts.summary,
        )
        summaries.append(summary)
    folder = Path(config.run_dir)
    log = MetricsLog(
        folder / "metrics.jsonl",
        log_every=observe.log_every,
        about={
            "config_sha256": config_sha256(config),
            **start_event(
                run.model, run.stream, runtime, sharing, fitted.resources, arithmetic
            ),
            "train": config.train.model_dump(mode="json"),
            "evaluation": {
                "max_examples": evaluator.heldout.n_examples,
                "texts": config.evaluation.texts,
            },
        },
        flops_per_token=arithmetic.flops_per_token,
        peak=peak,
        evaluated=evaluator.record,
        copies=[*(s.take for s in summaries), *(feed.take for feed in feeds)],
        device=runtime.device,
    )
    # Observers before the log may record events into it when a session ends.
    callbacks: list[Callback] = [StoreWatch(run.store), console]
    if observe.profile is not None:
        callbacks.append(
            Profiler(observe.profile, folder, runtime, warn, reporter.notice)
        )
    if observe.system is not None:
        sampler = SystemSampler.from_settings(
            observe.system, log.record, warn, runtime.device
        )
        callbacks.append(sampler)
    samples = SampleWriter(
        evaluator, folder / "samples.jsonl", evaluator.watched, reporter, warn
    )
    callbacks += [*gradients(record=log.record), log, samples, *summaries]
    if (early_stopping := config.train.early_stopping) is not None:
        rises = goal_of(early_stopping.metric).rises
        evaluation = config.evaluation.model_dump(mode="json")
        callbacks.append(
            Patience(**dict(early_stopping), rises=rises, evaluation=evaluation)
        )
    return [*callbacks, *watchers.callbacks(warn), *feeds]
