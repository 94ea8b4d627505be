"""Training: a run from its folder's state to its finished model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from toque.config import Resolved, RunConfig, config_sha256
from toque.config.user_code import refuse_foreign_code
from toque.cooking.recipe_scores import RECIPE_SCORES
from toque.data.store.token_store import TokenStore, held_store
from toque.errors import CheckpointError, ConfigError, Interrupted, ToqueError, argument
from toque.evaluation.evaluator import goal_of
from toque.evaluation.text_scores import ScoresByTask
from toque.reporter import SILENT, LogReporter, Reporter
from toque.reports.verdict import verdict_of
from toque.runs.run_files import refuse_users_address, refuse_users_folder
from toque.storage.bucket import RUNS, Bucket, BucketError, is_remote, open_bucket
from toque.storage.bucket_lock import BucketLock
from toque.storage.download import cache_folder
from toque.storage.no_follow import current_path, refuse_links
from toque.training.callbacks import RunEnd
from toque.training.checkpoint.resume import broadcast_checkpoint, refuse_unshared_folder
from toque.training.checkpoint.upload import Uploads
from toque.training.distributed.accelerate import ignored_settings
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.process_group import (
    joined,
    refuse_different_ranks,
    versions,
    while_others_wait,
)
from toque.training.observers.metrics_log import write_after
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
from toque.workflows.run_folder import (
    LoggedReporter,
    begin_from,
    checkpoint_to_continue,
    claimed_folder,
    refuse_small_disk,
    start_folder,
    take_up,
    write_config,
)


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
    """Train from the beginning, or continue from the run folder's newest whole checkpoint.

    Arguments and errors are those of `toque.api.train`; `clock` runs since the command began.
    """
    clock = clock or CommandClock()
    _refuse_early(config.config, resume, start, upload=upload)
    with joined(strategy=config.config.train.strategy) as ranks:
        if ranks.is_distributed:
            said = config_sha256(config.config)[:12]
            refuse_different_ranks(ranks, versions() | {"the configuration (its SHA-256)": said})
        config = _on_this_machine(config)
        settings, folder = config.config, Path(config.config.run_dir)
        refuse_links(folder, CheckpointError)
        refuse_users_folder(folder)
        # Every rank computes; the first also speaks, writes and uploads.
        logged = LoggedReporter(reporter if ranks.is_main else SILENT)
        reporter = logged if ranks.is_main else SILENT
        watchers = _watchers(settings, callbacks) if ranks.is_main else None
        weights = None if start is None else start_folder(start)
        with ExitStack() as stack:
            # The store, the folder and the bucket are held before anything is written there.
            store = _hold_store(settings, ranks, reporter, stack, prepare=prepare)
            say = reporter.notice
            if ranks.is_main:
                stack.enter_context(claimed_folder(folder))
                stack.enter_context(logged.writing(folder))
            if ranks.is_distributed:
                refuse_unshared_folder(folder, ranks)
            # Going back, fetching and uploading are the first rank's.
            begin = partial(take_up, config, store, say, resume=resume, start=weights)
            begun = _begun(settings, begin if ranks.is_main else None, say=say, upload=upload)
            uploads = stack.enter_context(begun)
            if watchers is not None:
                stack.enter_context(_tracked(watchers, reporter))

            newest = partial(checkpoint_to_continue, settings, store, say, start=weights)
            found = broadcast_checkpoint(newest, ranks)  # the same on all ranks
            run = build_run(
                settings,
                store,
                ranks,
                watchers=watchers,
                uploads=uploads,
                clock=clock,
                reporter=reporter,
                found=found,
            )
            was_over = found is not None and run.trainer.is_over
            _announce(run, reporter, was_over=was_over)
            if weights is not None and found is None:
                begin_from(run.trainer, store, weights, say)
                if run.evaluator.limit is not None:
                    run.evaluator.limit.from_scratch = False
            if ranks.is_main:
                refuse_small_disk(run.trainer, settings)
                write_config(config)
            end = run.trainer.fit()
            result, judged = _ended(run, end, reporter)
            trained = time.perf_counter()
            if uploads is not None and not result.interrupted:
                uploads.upload_model()
        if uploads is not None:
            write_after(folder, {"uploads": time.perf_counter() - trained})
    if reporter is not SILENT and not was_over:
        _conclude(folder, judged, logged)
    return result


def _announce(run: Run, reporter: Reporter, *, was_over: bool) -> None:
    """Print the banner, or that the run is finished, and settings of Accelerate without effect."""
    if was_over:
        reporter.notice(_finished_message(run.config, run.trainer.progress))
    else:
        reporter.detail(run.banner.full)
        reporter.notice(run.banner.short)
    for note in ignored_settings(run.config.train.precision):
        reporter.notice(f"note: {note}")


def _finished_message(config: RunConfig, progress: Progress) -> str:
    """Report that a run is finished, with the settings that would continue it."""
    length = config.train.stop_after
    longer = f'raise train.stop_after, which is "{length}"'
    if config.train.time_limit is not None and not length.reached(progress):
        longer = "raise train.time_limit"
    if config.train.early_stopping is not None:
        longer += ", or train.early_stopping.patience"
    return (
        f"{config.run_dir} is finished: it was trained to step {progress.step:,}, and nothing is "
        f"left to train. To train it longer, {longer}. To start another run, choose another "
        "folder: run_dir=runs/another."
    )


def _conclude(folder: Path, judged: str, logged: LoggedReporter) -> None:
    """Print one verdict: that the model is poor, or what limits the run; log both."""
    limits = verdict_of(folder)
    if limits is None:
        return
    with logged.writing(folder):
        if judged:
            logged.notice(judged)
            logged.detail(str(limits))
        else:
            logged.notice(str(limits))


def _ended(run: Run, end: RunEnd, reporter: Reporter) -> tuple[TrainedRun, str]:
    """The result of a run and a sentence about its model, scored and written if training ended."""
    result = TrainedRun(Path(run.config.run_dir), end.progress.step, end.reason)
    if result.interrupted or result.reason == TAKEN_OVER:
        return result, ""
    alone = not run.evaluator.ranks.is_distributed
    try:
        with leaving_on_signal() if alone else nullcontext():
            return result, finish(run, reporter)
    except Interrupted:  # what was trained is saved, and the same command finishes
        return replace(result, reason=INTERRUPTED), ""


def _watchers(config: RunConfig, callbacks: Sequence[object]) -> Watchers:
    """The watchers of a run; what cannot be had is a ConfigError now."""
    return Watchers.from_settings(
        config.observe,
        config.foreign_code,
        callbacks,
        run=Path(config.run_dir),
        settings=config.model_dump(mode="json"),
        scores=RECIPE_SCORES,
        bridge=partial(_bridged, config),
    )


def _bridged(config: RunConfig, callback: object) -> object:
    """The callback; one of transformers' Trainer behind its bridge."""
    kinds = {(kind.__module__, kind.__name__) for kind in type(callback).__mro__}
    if ("transformers.trainer_callback", "TrainerCallback") not in kinds:
        return callback
    # It loads transformers' Trainer, which nothing else needs.
    from toque.training.observers.trainer_callbacks import TrainerCallbackBridge

    return TrainerCallbackBridge(cast("Any", callback), config, goal_of(config.train.best_by))


def _refuse_early(
    config: RunConfig, resume: str | None, start: Model | None, *, upload: bool
) -> None:
    """Refuse code that nobody vouches for or that cannot be imported, and words at odds."""
    refuse_foreign_code(config.foreign_code)
    ScoresByTask.from_settings(config.evaluation, config.data, config.foreign_code)
    if resume is None:
        return
    if start is not None:
        raise ConfigError(
            f"{argument('resume')} continues a run from one of its checkpoints, and "
            f"{argument('start')} begins a new one. Give one of them."
        )
    if not upload and (config.checkpoint.upload or "://" in config.run_dir):
        raise ConfigError(
            f"{argument('resume')} sets newer checkpoints aside in the bucket, too, or the next "
            "session would continue from those, and this session is told to leave the bucket "
            f"alone. Leave {argument('upload=False')} out."
        )


def _on_this_machine(resolved: Resolved) -> Resolved:
    """The same run in a folder of this machine: `run_dir: gs://...` becomes `checkpoint.upload`."""
    config = resolved.config
    try:
        remote = is_remote(config.run_dir)
    except BucketError as error:
        raise ConfigError(
            f"run_dir is {config.run_dir.partition('://')[0]}://..., a kind of address that "
            "cannot hold a run. Use a folder, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER."
        ) from error
    if not remote:
        return resolved
    address = config.run_dir.rstrip("/")
    if config.checkpoint.upload not in (None, address):
        raise ConfigError(
            f"run_dir is {address} and checkpoint.upload is {config.checkpoint.upload}: a run has "
            "one place in a bucket. Leave checkpoint.upload out."
        )
    scheme, _, rest = address.partition("://")
    parts = rest.split("/")
    if len(parts) < 2 or any(part in ("", ".", "..") for part in parts):
        raise ConfigError(
            f"run_dir is {address}, which names no folder in a bucket. Write it as "
            "gs://BUCKET/FOLDER, e.g. gs://my-bucket/runs/cookbook."
        )
    folder = cache_folder("runs").joinpath(scheme, *parts)
    checkpoint = config.checkpoint.model_copy(update={"upload": address})
    here = config.model_copy(update={"run_dir": str(folder), "checkpoint": checkpoint})
    return replace(resolved, config=here)


@contextmanager
def _begun(
    config: RunConfig,
    begin: Callable[[Bucket | None], None] | None,
    *,
    say: Callable[[str], None],
    upload: bool,
) -> Iterator[Uploads | None]:
    """Ready the folder by `begin`, hold the run's place in its bucket, and upload until the end.

    `begin` gets that place, or None without one. Ranks other than the first have no `begin`.
    """
    if begin is None:
        yield None
        return
    if config.checkpoint.upload is None or not upload:
        begin(None)
        yield None
        return
    run = Path(config.run_dir)
    bucket = open_bucket(config.checkpoint.upload.rstrip("/"), RUNS)
    refuse_users_address(bucket)
    with BucketLock(bucket) as lock:
        begin(bucket)
        uploads = Uploads(run, bucket, lock, keep_last=config.train.keep_last)
        try:
            with uploads:
                yield uploads
                say(f"uploading what is left to {bucket.address}")
        finally:
            for sentence in uploads.messages():
                say(f"warning: {sentence}")
            say(f"checkpoint.upload={bucket.address}: {uploads.counts.summary()}")


@contextmanager
def _tracked(watchers: Watchers, reporter: Reporter) -> Iterator[None]:
    """Trackers get the end of a command: the texts and scores of its model, and its report page."""
    failed = True
    try:
        yield
        failed = False
    finally:
        page, run = None, current_path(watchers.run)
        if watchers.opened:
            try:
                page = report(run).file
            except ToqueError as error:
                reporter.notice(f"note: trackers get no report page: {error}")
        for feed in watchers.opened:
            feed.finish(failed=failed, scores=run / "evaluation.json", page=page)


def _hold_store(
    config: RunConfig, ranks: Ranks, reporter: Reporter, stack: ExitStack, *, prepare: bool
) -> TokenStore:
    """The store, compared with the configuration, held against replacement until `stack` ends."""

    def look() -> None:
        if prepare:
            prepare_if_absent(config, reporter=reporter)
        if is_prepared(config):
            stack.enter_context(held_store(Path(config.data.store)))
        with reporter.working(f"hashing {config.data.store}"):
            opened.append(open_store(config))

    opened: list[TokenStore] = []
    while_others_wait(ranks, look)
    if ranks.is_main:
        return opened[0]
    stack.enter_context(held_store(Path(config.data.store)))
    return open_store(config, sources=False)


def train_in_child(config: Resolved, log: Path, *, callbacks: Sequence[object] = ()) -> int:
    """Train in a child process; the exit code of the command, whose output is appended to `log`."""
    reporter = LogReporter(log)
    try:
        run = train(config, callbacks=callbacks, reporter=reporter)
    except ToqueError as error:
        reporter.notice(f"toque: {error}")
        return error.exit_code
    return Interrupted.exit_code if run.interrupted else 0
