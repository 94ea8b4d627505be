"""Training: a run from its folder's state to its finished model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from toque.config import Resolved, RunConfig, config_sha256
from toque.config.user_code import refuse_foreign_code
from toque.cooking.recipe_scores import RECIPE_SCORES
from toque.data.store.held_store import held_store
from toque.data.store.token_store import TokenStore
from toque.errors import CheckpointError, ConfigError, Interrupted, ToqueError, argument
from toque.evaluation.text_scores import TextScores
from toque.reporter import SILENT, LogReporter, Reporter
from toque.reports.verdict import verdict_of
from toque.storage.no_follow import place_of, refuse_links
from toque.training.checkpoint.layout_choice import refuse_unshared_folder
from toque.training.checkpoint.resume import broadcast_checkpoint
from toque.training.checkpoint.upload import Uploads
from toque.training.distributed.alike import refuse_unlike, versions
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.process_group import joined, while_others_wait
from toque.training.observers.metrics_log import write_after
from toque.training.observers.watchers import Watchers
from toque.training.time_limit import CommandClock
from toque.workflows.bucket_run import on_this_machine, uploading
from toque.workflows.build import build_run
from toque.workflows.final_model import finish, is_finished
from toque.workflows.forecast import refuse_small_disk
from toque.workflows.prepare import prepare_if_absent
from toque.workflows.prepared_store import is_prepared, open_store
from toque.workflows.report import report
from toque.workflows.results import Model, TrainedRun
from toque.workflows.run_folder import (
    checkpoint_to_continue,
    claimed_folder,
    go_back,
    load_start,
    start_folder,
    write_config,
)
from toque.workflows.run_log import LoggedReporter


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
    _refuse_resume(config.config, resume, start, upload=upload)
    refuse_foreign_code(config.config.foreign_code)
    # A metric that cannot be imported is refused now.
    TextScores.from_settings(config.config.evaluation, config.config.foreign_code)
    with joined(strategy=config.config.train.strategy) as ranks:
        if ranks.is_distributed:
            said = config_sha256(config.config)[:12]
            refuse_unlike(ranks, versions() | {"the configuration (its SHA-256)": said})
        config = on_this_machine(config)
        refuse_links(Path(config.config.run_dir), CheckpointError)
        # Every rank computes; the first also speaks, writes and uploads.
        logged = LoggedReporter(reporter if ranks.is_main else SILENT)
        reporter = logged if ranks.is_main else SILENT
        watchers = _watchers(config.config, callbacks) if ranks.is_main else None
        if start is not None:
            start_folder(start)
        with ExitStack() as stack:
            store = _hold_store(config.config, ranks, reporter, stack, prepare=prepare)
            if ranks.is_main:  # before anything is written there
                folder = Path(config.config.run_dir)
                stack.enter_context(claimed_folder(folder))
                stack.enter_context(logged.writing(folder))
            if ranks.is_distributed:
                refuse_unshared_folder(Path(config.config.run_dir), ranks)
            back, say, on = None, reporter.notice, upload and ranks.is_main
            if resume is not None and ranks.is_main:
                back = partial(go_back, config, store, resume, say)
            uploads = stack.enter_context(uploading(config.config, say=say, on=on, go_back=back))
            if watchers is not None:
                stack.enter_context(tracked(watchers, reporter))
            run = _train(config, store, ranks, watchers, uploads, clock, reporter, start=start)
            trained = time.perf_counter()
            if uploads is not None and not run.interrupted:
                uploads.finished()
        if uploads is not None:
            write_after(run.folder, {"uploads": time.perf_counter() - trained})
    if reporter is not SILENT and (verdict := verdict_of(run.folder)) is not None:
        reporter.notice(str(verdict))
    return run


def _refuse_resume(
    config: RunConfig, resume: str | None, start: Model | None, *, upload: bool
) -> None:
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


def _watchers(config: RunConfig, own: Sequence[object]) -> Watchers:
    """The watchers that `observe` names, and a user's objects; refused if they cannot be had."""
    return Watchers.from_settings(
        config.observe,
        config.foreign_code,
        own,
        run=Path(config.run_dir),
        settings=config.model_dump(mode="json"),
        scores=RECIPE_SCORES,
    )


@contextmanager
def tracked(watchers: Watchers, reporter: Reporter) -> Iterator[None]:
    """Trackers get the end of a command: the texts and scores of its model, and its report page."""
    failed = True
    try:
        yield
        failed = False
    finally:
        page, run = None, place_of(watchers.run)
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


def _train(
    resolved: Resolved,
    store: TokenStore,
    ranks: Ranks,
    watchers: Watchers | None,
    uploads: Uploads | None,
    clock: CommandClock,
    reporter: Reporter,
    *,
    start: Model | None,
) -> TrainedRun:
    config, folder = resolved.config, Path(resolved.config.run_dir)
    say = reporter.notice
    find = partial(checkpoint_to_continue, config, store, say)
    found = broadcast_checkpoint(find, ranks)
    if start is not None and found is not None:
        raise CheckpointError(
            f"{folder} already holds a run at step {found.step}, and {argument('start')} begins a "
            "new one. Choose another folder: run_dir=runs/another."
        )
    run = build_run(
        config,
        store,
        ranks,
        watchers=watchers,
        uploads=uploads,
        clock=clock,
        reporter=reporter,
        found=found,
    )
    reporter.notice(run.banner)
    trainer = run.trainer
    if found is not None:
        trainer.load(found)
    elif start is not None:
        load_start(trainer.model, start)
    if ranks.is_main:
        refuse_small_disk(trainer, config)
        write_config(resolved)
    end = trainer.fit()
    result = TrainedRun(folder, end.progress.step, end.reason)
    if not result.interrupted and not ranks.broadcast(is_finished(folder, end.progress.step)):
        began = time.perf_counter()
        finish(run, reporter)
        if ranks.is_main:
            write_after(folder, {"finishing": time.perf_counter() - began})
    return result
