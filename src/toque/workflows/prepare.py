"""Preparation: raw data to the store of a configuration."""

from __future__ import annotations

import os
from pathlib import Path

from toque.config import RunConfig
from toque.data.prepare import pipeline
from toque.data.prepare.pipeline import PrepareResult
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError, in_shell
from toque.reporter import SILENT, Reporter
from toque.workflows.configure import Configured, configure
from toque.workflows.prepared_store import is_prepared, prepare_settings, sources_of
from toque.workflows.results import Model, refuse_absent_start


def prepare(
    config: Configured, *, replace: bool = False, reporter: Reporter = SILENT
) -> PrepareResult:
    """Turn raw data into the configuration's token store, or reuse it, and look whether it fits.

    Args:
        config: what `configure` takes.
        replace: delete a store made from other data or settings instead of refusing.
        reporter: hears of progress.

    Returns:
        The open store, the data report, and whether the store was there already.

    Raises:
        ConfigError: the configuration cannot be used, or the model that it names cannot be trained
            on the store; the store is there then.
        DataError: sources that cannot be read, or a store of other data.
    """
    settings = configure(config)
    result = prepared(settings, replace=replace, reporter=reporter)
    if not result.reused:
        refuse_untrainable(settings, result.store)
    return result


def prepared(
    settings: RunConfig, *, replace: bool = False, reporter: Reporter = SILENT
) -> PrepareResult:
    """The store of checked settings; whether a model can be trained on it is not looked at."""

    def progress(done_bytes: int, total_bytes: int, message: str) -> None:
        # What has no count begins a part, which may be long.
        reporter.progress(message, done=done_bytes, total=total_bytes, keep=not total_bytes)

    try:
        return pipeline.prepare(
            sources_of(settings, progress=progress, say=reporter.notice),
            store=Path(settings.data.store),
            settings=prepare_settings(settings),
            progress=progress,
            replace=replace,
            engine=settings.data.engine,
        )
    finally:
        reporter.progress("")


def refuse_untrainable(config: RunConfig, store: TokenStore) -> None:
    """Lay a store out for its model, as `train` will, without allocating the model.

    A model that is not on this machine passes. The store stays: most of what a ConfigError tells is
    put right without preparing again.
    """
    start = Path(config.model.start_from).expanduser()
    if config.model.start_from != "scratch" and not (start / "config.json").is_file():
        return
    from toque.data.loader.batch_stream import refuse_empty
    from toque.runs.outlined_update import outlining  # with torch
    from toque.workflows.build import build_stream
    from toque.workflows.plan.outlined_model import outlined_model

    try:
        refuse_empty(store, "validation")
        with outlining():
            plain = config.model_copy(update={"adapter": None})
            outline = outlined_model(plain, store.codec(), where="cuda", precision="float32")
        build_stream(config, store, outline)
    except ConfigError as error:
        raise ConfigError(
            f"{store.path} is prepared, and `toque train` would refuse it: {error}"
        ) from error


def prepare_if_absent(config: RunConfig, *, reporter: Reporter = SILENT) -> None:
    """Prepare the store of a configuration that names sources, where there is none yet; say so."""
    if is_prepared(config) or not config.data.sources:
        return
    reporter.notice(f"{config.data.store} is not prepared yet: preparing it first.")
    result = prepared(config, reporter=reporter)  # training looks whether it fits
    splits = result.store.manifest.splits
    reporter.notice(
        f"{in_a_line(result, config.data.engine)} {splits.train:,} examples to train on, "
        f"{splits.validation:,} held out; what was dropped and why, and which columns no example "
        f"holds, `toque report {in_shell(result.store.path)}` makes a page of."
    )


def prepare_before_torch(
    config: RunConfig, *, start: Model | None = None, reporter: Reporter = SILENT
) -> None:
    """`prepare_if_absent` before torch is loaded: workers are then forked and begin at once.

    Of several ranks one prepares, once they have met. A `start` that is absent is refused here.
    """
    if start is not None:
        refuse_absent_start(start)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        prepare_if_absent(config, reporter=reporter)


def in_a_line(result: PrepareResult, engine: str) -> str:
    """One line on what was done."""
    if result.reused:
        return f"Reused {result.store.path}."
    return f"Prepared {result.store.path}{' with data.engine=ray' if engine == 'ray' else ''}."
