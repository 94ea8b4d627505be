"""Training of a run, from its locked folder to its finished model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from toque.config import Resolved, RunConfig, config_sha256
from toque.config.user_code import refuse_foreign_code
from toque.cooking.recipe_scores import RECIPE_SCORES
from toque.data.store.token_store import TokenStore, pinned_store
from toque.errors import CheckpointError, ConfigError, Interrupted, ToqueError, argument
from toque.evaluation.evaluator import goal_of
from toque.evaluation.source_losses import measure_by_source
from toque.evaluation.text_scores import ScoresByTask
from toque.reporter import SILENT, Reporter, counting
from toque.reports.verdict import judge_run
from toque.runs.run_files import refuse_users_address, refuse_users_folder
from toque.storage.bucket import RUNS, Bucket, BucketError, is_remote, open_bucket
from toque.storage.bucket_lock import BucketLock
from toque.storage.download import cache_folder
from toque.storage.no_follow import current_path, refuse_links
from toque.training.callbacks import RunEnd
from toque.training.checkpoint.resume import (
    broadcast_checkpoint,
    refuse_unshared_folder,
)
from toque.training.checkpoint.upload import Uploads
from toque.training.distributed.accelerate import ignored_settings
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.process_group import (
    join_ranks,
    refuse_different_ranks,
    run_on_main_rank,
    versions,
)
from toque.training.observers.metrics_log import write_after_event, write_before_event
from toque.training.observers.watchers import Watchers
from toque.training.stopping import (
    INTERRUPTED,
    TAKEN_OVER,
    CommandClock,
    leaving_on_signal,
)
from toque.units import Progress
from toque.workflows.build import Run, build_run
from toque.workflows.final_model import finish
from toque.workflows.prepare import prepare_if_absent
from toque.workflows.prepared_store import is_prepared, open_store
from toque.workflows.report import report
from toque.workflows.results import Model, TrainedRun
from toque.workflows.run_folder.access import (
    lock_run_folder,
    refuse_small_disk,
    write_config,
)
from toque.workflows.run_folder.continuation import (
    checkpoint_to_continue,
    prepare_run_folder,
)
from toque.workflows.run_folder.run_log import LoggedReporter
from toque.workflows.run_folder.start_adapter import continue_optimizer
from toque.workflows.run_folder.weights import load_start_weights, start_folder


def train(
    config: Resolved,
    *,
    start: Model | None = None,
    resume: str | None = None,
    callbacks: Sequence[object] = (),
    upload: bool = True,
    prepare: bool = True,
    clock: CommandClock | None = None,
    reporter: Reporter = SILENT,
) -> TrainedRun:
    """Train from the beginning, or continue from the newest complete checkpoint in the run folder.

    See `toque.api.train` for the arguments and errors. `clock` starts with the command.
    """
    clock = clock or CommandClock()
    _refuse_early(config.config, resume, start, upload=upload)
    with join_ranks(strategy=config.config.train.strategy) as ranks:
        if ranks.is_distributed:
            _refuse_different_setups(config.config, ranks)
        config = _localise(config)
        folder = Path(config.config.run_dir)
        refuse_links(folder, CheckpointError)
        refuse_users_folder(folder)
        # Only the first rank prints, writes and uploads.
        logged = LoggedReporter(reporter if ranks.is_main else SILENT)
        reporter = logged if ranks.is_main else SILENT
        watchers = _build_watchers(config.config, callbacks) if ranks.is_main else None
        weights = None if start is None else start_folder(start)
        with ExitStack() as stack:
            # The store, the folder and the bucket are locked before anything is written to them.
            store = _lock_store(config.config, ranks, reporter, stack, prepare=prepare)
            uploads = _lock_run(
                config,
                store,
                ranks,
                logged,
                stack,
                resume=resume,
                weights=weights,
                upload=upload,
            )
            if watchers is not None:
                stack.enter_context(_finish_trackers(watchers, reporter))
            session = _run_session(
                config,
                store,
                ranks,
                weights=weights,
                watchers=watchers,
                uploads=uploads,
                clock=clock,
                reporter=reporter,
            )
            ended_at = time.perf_counter()
            if uploads is not None and not session.result.interrupted:
                uploads.upload_model()
        # The end of the context has waited for the uploads.
        if uploads is not None:
            write_after_event(folder, {"uploads": time.perf_counter() - ended_at})
    if ranks.is_main and not session.was_over:
        _print_verdicts(folder, session.model_verdict, logged)
    return session.result


class _SessionEnd(NamedTuple):
    """End of a training session."""

    result: TrainedRun
    model_verdict: str
    """Advice if the model is poor, otherwise ""."""
    was_over: bool
    """True if the run had reached its end in an earlier session."""


def _run_session(
    config: Resolved,
    store: TokenStore,
    ranks: Ranks,
    *,
    weights: Path | None,
    watchers: Watchers | None,
    uploads: Uploads | None,
    clock: CommandClock,
    reporter: Reporter,
) -> _SessionEnd:
    """Continue or begin the run of a locked folder, train it, and write its model.

    `weights` is a checkpoint with the first weights of a new run.
    """
    settings = config.config
    newest = partial(
        checkpoint_to_continue, settings, store, reporter.notice, start=weights
    )
    checkpoint = broadcast_checkpoint(newest, ranks)
    run = build_run(
        settings,
        store,
        ranks,
        watchers=watchers,
        uploads=uploads,
        clock=clock,
        reporter=reporter,
        checkpoint=checkpoint,
    )
    was_over = checkpoint is not None and run.trainer.is_over
    _announce(run, reporter, was_over=was_over)
    if weights is not None and checkpoint is None:
        load_start_weights(run.trainer, store, weights, reporter.notice)
        if run.evaluator.limit is not None:
            run.evaluator.limit.from_scratch = False
    elif checkpoint is None:
        continue_optimizer(run.trainer, settings, reporter.notice)
    if ranks.is_main:
        refuse_small_disk(run.trainer, settings)
        write_config(config)
    is_pretrained = weights is not None or settings.model.start_from != "scratch"
    if checkpoint is None and is_pretrained:
        _record_losses_before(run, reporter)
    end = run.trainer.fit()
    result, model_verdict = _finish_session(run, end, reporter)
    return _SessionEnd(result, model_verdict, was_over)


def _record_losses_before(run: Run, reporter: Reporter) -> None:
    """Record the held-out loss of each source before the first update of a pretrained model."""
    evaluator = run.evaluator
    with counting(reporter, "evaluating", "held-out examples by source") as count:
        losses = measure_by_source(evaluator.heldout, run.model, run.store, count)
    if losses and evaluator.ranks.is_main:
        write_before_event(Path(run.config.run_dir), losses)


def _lock_run(
    config: Resolved,
    store: TokenStore,
    ranks: Ranks,
    logged: LoggedReporter,
    stack: ExitStack,
    *,
    resume: str | None,
    weights: Path | None,
    upload: bool,
) -> Uploads | None:
    """Lock and prepare the run's folder and bucket, until `stack` ends. Return the uploads.

    Ranks other than the first only check that they share the folder.
    """
    folder = Path(config.config.run_dir)
    if ranks.is_main:
        stack.enter_context(lock_run_folder(folder))
        stack.enter_context(logged.writing(folder))
    if ranks.is_distributed:
        refuse_unshared_folder(folder, ranks)
    if not ranks.is_main:
        return None
    prepare = partial(
        prepare_run_folder,
        config,
        store,
        logged.notice,
        resume=resume,
        start=weights,
    )
    return stack.enter_context(
        _upload_until_end(config.config, prepare, say=logged.notice, upload=upload)
    )


def _announce(run: Run, reporter: Reporter, *, was_over: bool) -> None:
    """Print the banner or the end of a finished run, and Accelerate settings without effect."""
    if was_over:
        reporter.notice(_finished_message(run.config, run.trainer.progress))
    else:
        reporter.detail(run.banner.full)
        reporter.notice(run.banner.short)
    for note in ignored_settings(run.config.train.precision):
        reporter.notice(f"note: {note}")


def _finished_message(config: RunConfig, progress: Progress) -> str:
    """Report that a run is finished, and which settings would continue it."""
    length = config.train.stop_after
    longer = f'raise train.stop_after, which is "{length}"'
    if config.train.time_limit is not None and not length.reached(progress):
        longer = "raise train.time_limit"
    if config.train.early_stopping is not None:
        longer += ", or train.early_stopping.patience"
    return (
        f"{config.run_dir} is finished: it was trained to step {progress.step:,}. To train it "
        f"longer, {longer}. To start another run, choose another folder, e.g. "
        "run_dir=runs/another."
    )


def _print_verdicts(folder: Path, model_verdict: str, logged: LoggedReporter) -> None:
    """Print that the model is poor, or else the bottleneck of the run. Log both."""
    bottleneck = judge_run(folder)
    if bottleneck is None:
        return
    with logged.writing(folder):
        if model_verdict:
            logged.notice(model_verdict)
            logged.detail(str(bottleneck))
        else:
            logged.notice(str(bottleneck))


def _finish_session(
    run: Run, end: RunEnd, reporter: Reporter
) -> tuple[TrainedRun, str]:
    """Score and write the model, unless training was stopped. Return the run and a verdict."""
    result = TrainedRun(Path(run.config.run_dir), end.progress.step, end.reason)
    if result.interrupted or result.reason == TAKEN_OVER:
        return result, ""
    # If one of several ranks exits, the rest wait for it.
    is_distributed = run.evaluator.ranks.is_distributed
    try:
        with nullcontext() if is_distributed else leaving_on_signal():
            return result, finish(run, reporter)
    except Interrupted:
        # The last checkpoint is saved, so the same command finishes the run.
        return replace(result, reason=INTERRUPTED), ""


def _build_watchers(config: RunConfig, callbacks: Sequence[object]) -> Watchers:
    """Build the watchers of a run.

    Raises:
        ConfigError: A tracker or callback is not available.
    """
    return Watchers.from_settings(
        config.observe,
        config.foreign_code,
        callbacks,
        run=Path(config.run_dir),
        settings=config.model_dump(mode="json"),
        scores=RECIPE_SCORES,
        goal=goal_of(config.train.best_by),
        bridge=partial(_wrap_trainer_callback, config),
    )


def _wrap_trainer_callback(config: RunConfig, callback: object) -> object:
    """Wrap a callback for transformers' Trainer. Return any other callback unchanged."""
    kinds = {(kind.__module__, kind.__name__) for kind in type(callback).__mro__}
    if ("transformers.trainer_callback", "TrainerCallback") not in kinds:
        return callback
    # Only the bridge needs transformers' Trainer, which is slow to import.
    from toque.training.observers.trainer_callbacks import TrainerCallbackBridge

    return TrainerCallbackBridge(
        cast("Any", callback), config, goal_of(config.train.best_by)
    )


def _refuse_different_setups(config: RunConfig, ranks: Ranks) -> None:
    """Check that all ranks have the same configuration and versions of software."""
    config_hash = config_sha256(config)[:12]
    refuse_different_ranks(
        ranks, versions() | {"the configuration (its SHA-256)": config_hash}
    )


def _refuse_early(
    config: RunConfig, resume: str | None, start: Model | None, *, upload: bool
) -> None:
    """Refuse untrusted code, metrics that cannot be imported, and conflicting arguments."""
    refuse_foreign_code(config.foreign_code)
    ScoresByTask.from_settings(config.evaluation, config.data, config.foreign_code)
    if resume is None:
        return
    if start is not None:
        raise ConfigError(
            f"{argument('resume')} and {argument('start')} cannot be combined: the first continues "
            "a run from one of its checkpoints, and the second begins a new run. Use one of them."
        )
    if not upload and (config.checkpoint.upload or "://" in config.run_dir):
        raise ConfigError(
            f"{argument('resume')} and {argument('upload=False')} cannot be combined: newer "
            "checkpoints must be set aside in the bucket, or the next session would continue from "
            f"them. Leave {argument('upload=False')} out."
        )


def _localise(resolved: Resolved) -> Resolved:
    """Move a run with `run_dir: gs://...` to a local folder and set `checkpoint.upload` to it."""
    config = resolved.config
    try:
        remote = is_remote(config.run_dir)
    except BucketError as error:
        raise ConfigError(
            "run_dir must be a folder, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER, not "
            f"{config.run_dir.partition('://')[0]}://..."
        ) from error
    if not remote:
        return resolved

    address = config.run_dir.rstrip("/")
    if config.checkpoint.upload not in (None, address):
        raise ConfigError(
            f"run_dir is {address} and checkpoint.upload is {config.checkpoint.upload}, but a run "
            "has only one folder in a bucket. Leave checkpoint.upload out."
        )

    scheme, _, rest = address.partition("://")
    parts = rest.split("/")
    if len(parts) < 2 or any(part in ("", ".", "..") for part in parts):
        raise ConfigError(
            f"run_dir must name a folder in the bucket, e.g. gs://my-bucket/runs/cookbook, not "
            f"{address}."
        )

    folder = cache_folder("runs").joinpath(scheme, *parts)
    checkpoint = config.checkpoint.model_copy(update={"upload": address})
    local = config.model_copy(update={"run_dir": str(folder), "checkpoint": checkpoint})
    return replace(resolved, config=local)


@contextmanager
def _upload_until_end(
    config: RunConfig,
    prepare: Callable[[Bucket | None], None],
    *,
    say: Callable[[str], None],
    upload: bool,
) -> Iterator[Uploads | None]:
    """Lock the run's folder in its bucket, call `prepare`, and upload until the context ends.

    `prepare` prepares the run folder. It receives the folder in the bucket, or None.
    """
    if config.checkpoint.upload is None or not upload:
        prepare(None)
        yield None
        return
    run = Path(config.run_dir)
    bucket = open_bucket(config.checkpoint.upload.rstrip("/"), RUNS)
    refuse_users_address(bucket)
    with BucketLock(bucket) as lock:
        prepare(bucket)
        uploads = Uploads(run, bucket, lock, keep_last=config.train.keep_last)
        try:
            with uploads:
                yield uploads
                say(f"uploading the remaining files to {bucket.address}")
        finally:
            for message in uploads.messages():
                say(f"warning: {message}")
            say(f"checkpoint.upload={bucket.address}: {uploads.counts.summary()}")


@contextmanager
def _finish_trackers(watchers: Watchers, reporter: Reporter) -> Iterator[None]:
    """Send the texts, the scores and the report page to the trackers at the end of the command."""
    failed = True
    try:
        yield
        failed = False
    finally:
        page = None
        run = current_path(watchers.run)  # the user may have moved the folder
        if watchers.open_feeds:
            try:
                page = report(run).file
            except ToqueError as error:
                reporter.notice(f"note: trackers do not receive a report page: {error}")
        for feed in watchers.open_feeds:
            feed.finish(failed=failed, scores=run / "evaluation.json", page=page)


def _lock_store(
    config: RunConfig,
    ranks: Ranks,
    reporter: Reporter,
    stack: ExitStack,
    *,
    prepare: bool,
) -> TokenStore:
    """Open the store, compare it with the configuration, and lock it until `stack` ends."""
    opened: list[TokenStore] = []

    def open_on_main_rank() -> None:
        if prepare:
            prepare_if_absent(config, reporter=reporter)
        if is_prepared(config):
            stack.enter_context(pinned_store(Path(config.data.store)))
        with reporter.working(f"hashing {config.data.store}"):
            opened.append(open_store(config))

    run_on_main_rank(ranks, open_on_main_rank)
    if ranks.is_main:
        return opened[0]
    stack.enter_context(pinned_store(Path(config.data.store)))
    return open_store(config, sources=False)
