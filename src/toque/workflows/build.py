"""Build of a run: its sections go to what they configure, from the store to the observers."""

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
from toque.models.families import max_positions
from toque.models.forward.blocks import CompileSeconds
from toque.models.loading.to_train import ModelToTrain, SpecialTokens, family_to_train
from toque.models.lora.layers import is_adapted, refuse_unreached
from toque.reporter import SILENT, Reporter
from toque.runs.outlined_update import peak_of
from toque.training.arithmetic import count_flops
from toque.training.autotune import Fitted, fit_to_machine
from toque.training.callbacks import Callback, Callbacks
from toque.training.checkpoint.saved import Checkpoint
from toque.training.checkpoint.saver import chosen_layout
from toque.training.checkpoint.store import CheckpointStore, RunIdentity, software_versions
from toque.training.checkpoint.upload import UploadProgress, Uploads
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.launcher import is_launched
from toque.training.distributed.sharing import Sharing
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
from toque.workflows.asking import own_prompts, provenance_of_run
from toque.workflows.run_folder import has_ended
from toque.workflows.run_length import (
    Banner,
    Length,
    banner,
    length_of,
    probing_seconds,
    time_left_of,
)


@dataclass(frozen=True)
class Run:
    """A session of training, ready to begin."""

    config: RunConfig
    store: TokenStore
    model: PreTrainedModel
    stream: BatchStream
    trainer: Trainer
    evaluator: Evaluator  # computes loss, texts and scores of every evaluation
    scored: Sampler  # writes the texts that are scored at the end
    banner: Banner  # what a session trains, on what, how long and where


def build_run(
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
    """Build everything a run consists of, continued from `found`, as this machine computes it best.

    `watchers` are on the first rank alone; what does not fit the model or data is a ConfigError.
    """
    # Model: where this rank holds it.
    train, optim = config.train, config.optim
    runtime = Runtime.from_settings(train, family_to_train(config.model), ranks)
    placed = place_model(model_to_train(config, store.codec()), train, optim, runtime)
    model, sharing = placed.model, placed.sharing

    # Batches, and how many rows of them are computed at once.
    stream = build_stream(config, store, model, rank=ranks.rank, ranks=ranks.world_size)
    fitted = fit_to_machine(
        model,
        stream,
        runtime,
        run=Path(config.run_dir),
        train=train,
        optim=optim,
        in_step=sharing.is_sharded,
        checkpoint=found,
        max_seconds=probing_seconds(config, clock),
        reporter=reporter,
    )

    # Evaluations, which a signal interrupts; what they take decides how long a run may train.
    launched = ranks.is_distributed or is_launched()
    interrupt = Interrupt(silent=not reporter.heard, launched=launched)
    evaluator = _evaluator(config, store, placed, stream.layout, runtime, interrupt, reporter)
    prompts = held_out_prompts(store, config.evaluation.generate, config.data)
    scored = build_sampler(config, store, prompts, reporter) if prompts else evaluator.sampler
    over = found is not None and has_ended(config, found)
    length = length_of(config, store, evaluator, scored, clock, reporter, over=over)
    evaluator.limit = length.limit

    # Trainer, and last the observers of its loop, in the order in which they are called.
    trainer = _trainer(config, store, placed, stream, runtime, evaluator, fitted, length)
    lines = banner(config, store, model, stream, runtime, sharing.strategy, fitted, length)
    run = Run(config, store, model, stream, trainer, evaluator, scored, lines)
    observers = [interrupt, *_observers(run, fitted, length, watchers, uploads, reporter)]
    if length.limit is not None:
        length.limit.warn = trainer.callbacks.on_warning
        observers.append(length.limit)  # after those that write at an evaluation
    if uploads is not None:
        observers.append(
            UploadProgress(uploads, Path(config.run_dir), trainer.callbacks.on_warning)
        )
    trainer.callbacks.extend(observers)
    if found is not None:
        trainer.load(found)
    return run


def model_to_train(config: RunConfig, tokens: SpecialTokens) -> ModelToTrain:
    """The run's model, for a tokenizer."""
    return ModelToTrain(config.model, config.adapter, tokens, config.seed)


def build_language_model(config: RunConfig, store: TokenStore) -> PreTrainedModel:
    """The model to train, in float32 on the CPU, fitting the store's tokenizer, adapter and all."""
    return model_to_train(config, store.codec()).in_float32()


def build_stream(
    config: RunConfig, store: TokenStore, model: PreTrainedModel, *, rank: int = 0, ranks: int = 1
) -> BatchStream:
    """Training batches by position; a ConfigError where store, model and settings do not fit."""
    rows, encoder = store.rows("train"), model.config.is_encoder_decoder
    corruption = config.span_corruption
    spans = SpanCorruption.from_settings(corruption, store, encoder=encoder) if corruption else None
    rules = config.augmentation
    rewriting = Rewriting(rules, store, rows, encoder=encoder) if rules is not None else None
    return BatchStream.from_settings(
        config.train,
        config.data,
        config.curriculum,
        store,
        model.config,
        seed=config.seed,
        positions=max_positions(model.config),
        spans=spans,
        varied=None if rewriting is None else rewriting.varied,
        rank=rank,
        world_size=ranks,
    )


def build_heldout(
    config: RunConfig,
    store: TokenStore,
    trained: Layout,
    runtime: Runtime,
    *,
    sharing: Sharing | None = None,
    reporter: Reporter = SILENT,
) -> HeldOut:
    """Held-out loss over the subset that `evaluation.max_examples` asks for, or a ConfigError."""
    evaluation, data, gaps = config.evaluation, config.data, config.span_corruption
    return HeldOut.from_settings(
        evaluation, data, gaps, store, trained, runtime, sharing, reporter.notice
    )


def build_sampler(
    config: RunConfig, store: TokenStore, prompts: Sequence[Prompt], reporter: Reporter = SILENT
) -> Sampler:
    """The likeliest texts for `prompts`, scored; as long as the store's targets."""
    record = provenance_of_run(config, store.manifest)
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
    """The computing and writing of every evaluation; refuses metrics that it does not measure."""
    evaluation, model, sharing = config.evaluation, placed.model, placed.sharing
    heldout = build_heldout(config, store, trained, runtime, sharing=sharing, reporter=reporter)
    n, data = min(evaluation.texts, evaluation.generate), config.data
    held_out = held_out_prompts(store, n, data)
    own = own_prompts(config, store, encoder=trained.shape.source > 0)
    watched, known = watched_metrics(
        config.train, evaluation, data, held_out, bits=heldout.n_bytes > 0
    )
    return Evaluator(
        heldout,
        model,
        sharing,
        build_sampler(config, store, [*held_out, *own], reporter),
        len(held_out),
        runtime.ranks,
        partial(ScoresByTask.from_settings, evaluation, data, config.foreign_code),
        watched,
        known,
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
    """The loop with everything it holds but observers."""
    run, optim, train = Path(config.run_dir), config.optim, config.train
    model, sharing, resources = placed.model, placed.sharing, fitted.resources
    callbacks, goal, ranks = Callbacks(), goal_of(train.best_by), runtime.ranks
    optimizer = optimizer_of(model, optim)
    outliers, noise = optim.outliers, optim.gradient_noise
    skip = SkipStep(**dict(outliers)) if outliers else None
    loss_fn = training_loss(train.optimisations, smoothing=optim.label_smoothing)
    slower = list_disabled(train.optimisations)
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
        sharing=sharing,
        schedule=Schedule(length.stop_after, train.evaluate_every, train.save_every),
        oom_fallback=OomFallback.in_run(run, resources, callbacks, rank=ranks.rank),
        guard=UpdateGuard(runtime, callbacks, skip, run_folder=run),
        notes=[*placed.notes, *fitted.warnings, *slower, *choose_attention(model, runtime).notes],
        max_grad_norm=optim.max_grad_norm,
        seed=config.seed,
        noise=GradientNoise(**dict(noise), seed=config.seed) if noise else None,
        check_reached=refuse_unreached if is_adapted(model) else None,
        base_sha256=placed.base_sha256,
        layout=chosen_layout(config.checkpoint.layout, model, optimizer, ranks=ranks),
        prefetch=choose_prefetch(train.optimisations, runtime),
        background_saves=train.optimisations.background_saves,
        goal=goal,
        count_seconds=float if length.limit is None else length.limit.count_seconds,
        clock=PartClock(compiling=CompileSeconds() if resources.compile else float),
    )


def _observers(
    run: Run,
    fitted: Fitted,
    length: Length,
    watchers: Watchers | None,
    uploads: Uploads | None,
    reporter: Reporter,
) -> list[Callback]:
    """Observers of the loop: all on the first rank; on the others, what it needs of them."""
    config, trainer, evaluator = run.config, run.trainer, run.evaluator
    observe, runtime, sharing = config.observe, trainer.runtime, evaluator.sharing
    gradients = partial(
        Gradients.from_settings, observe.gradients, run.model, runtime.phases, sharing
    )
    if watchers is None:
        return [*gradients(record=None)] if sharing.is_sharded else []

    warn, world_size = trainer.callbacks.on_warning, runtime.ranks.world_size
    n_texts = 0 if run.scored is evaluator.sampler else len(run.scored.prompts)
    left = time_left_of(
        run.stream, length, config.train.evaluate_every, fitted.update_seconds, n_texts=n_texts
    )
    console = ConsoleProgress(
        log_every=observe.log_every,
        reporter=reporter,
        warn=warn,
        time_left=left,
        highlight=lambda: highlight(evaluator.last, evaluator.watched),
    )
    arithmetic = count_flops(run.model, run.stream, choose_attention(run.model, runtime))
    peak = peak_of(runtime.device, runtime.dtype, arithmetic.products).of_ranks(world_size)
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
            None if uploads is None else uploads.counts.in_words,
        )
        summaries.append(summary)
    folder = Path(config.run_dir)
    log = MetricsLog(
        folder / "metrics.jsonl",
        log_every=observe.log_every,
        about={
            "config_sha256": config_sha256(config),
            **start_event(run.model, run.stream, runtime, sharing, fitted.resources, arithmetic),
            "train": config.train.model_dump(mode="json"),
            "evaluation": {
                "max_examples": evaluator.heldout.n_examples,  # at most, and as many as there are
                "texts": config.evaluation.texts,
            },
        },
        flops_per_token=arithmetic.flops_per_token,
        peak=peak,
        evaluated=evaluator.record,
        copies=[*(s.take for s in summaries), *(feed.take for feed in feeds)],
        device=runtime.device,
    )
    # Those before the log still record into it when a session ends.
    callbacks: list[Callback] = [StoreWatch(run.store), console]
    if observe.profile is not None:
        callbacks.append(Profiler(observe.profile, folder, runtime, warn, reporter.notice))
    if observe.system is not None:
        sampler = SystemSampler.from_settings(observe.system, log.record, warn, runtime.device)
        callbacks.append(sampler)
    samples = SampleWriter(evaluator, folder / "samples.jsonl", evaluator.watched, reporter, warn)
    callbacks += [*gradients(record=log.record), log, samples, *summaries]
    if (asked := config.train.early_stopping) is not None:
        rises, measured = goal_of(asked.metric).rises, config.evaluation.model_dump(mode="json")
        callbacks.append(Patience(**dict(asked), rises=rises, evaluation=measured))
    return [*callbacks, *watchers.callbacks(warn), *feeds]
