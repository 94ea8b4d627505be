"""Preparation of a configuration's token store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from toque.config import RunConfig
from toque.data.prepare import pipeline
from toque.data.prepare.pipeline import PrepareResult, check_store_folder
from toque.data.store.store_manifest import read_manifest
from toque.data.store.token_store import LOCK, TokenStore, store_to_write
from toque.errors import ConfigError, DataError, argument, in_shell
from toque.reporter import SILENT, Reporter
from toque.runs.run_files import refuse_users_folder
from toque.sources.memory_rows import ROWS, forget_rows, write_rows
from toque.sources.own_tasks import refuse_absent
from toque.user_paths import named_path
from toque.workflows.configure import Columns, Configured, configure, source_columns
from toque.workflows.prepared_store import (
    is_prepared,
    open_sources,
    prepare_settings,
    refuse_other_tokenizer,
)
from toque.workflows.results import Model, refuse_absent_start


def prepare(
    config: Configured,
    *,
    data: object = None,
    validation: object = None,
    columns: Columns | None = None,
    replace: bool = False,
    reporter: Reporter = SILENT,
) -> PrepareResult:
    """Prepare a configuration's token store, or reuse it. Check that the store fits the model.

    Args:
        config: A configuration, as for `configure`.
        data: Rows to train on, in place of data.sources: a list or another iterable of dicts or
            texts, a datasets.Dataset, a pandas or polars DataFrame, or a pyarrow Table. They are
            saved in the folder of the store, in a file named after their content.
        validation: Rows to hold out, in place of data.validation.
        columns: Field of each part of a row, e.g. {"prompt": "question", "target": "answer"}, as
            `columns` of a source. With None, well-known names are recognised.
        replace: Delete a store of other data or settings. By default it is refused.
        reporter: Receives the progress.

    Returns:
        The open store, the data report, and whether the store already existed.

    Raises:
        ConfigError: The configuration is not valid, or the prepared store does not fit its model.
        DataError: A source cannot be read, or the folder has a store of other data.
    """
    with save_rows(
        configure(config), data, validation, columns, reporter=reporter
    ) as settings:
        result = prepare_store(settings, replace=replace, reporter=reporter)
    if not result.reused:
        refuse_untrainable(settings, result.store)
    return result


_LARGE_BYTES = 10_000_000
"""Size of the sources, in bytes, from which one step of their preparation may take a minute."""
_ROW_ARGUMENTS = {"sources": "data", "validation": "validation"}
"""Field of `data` -> argument with rows for it."""
_ROWS_NOTE = (
    "This file has the rows of the argument data or validation. The argument columns names their "
    "fields, e.g. train(config, data=rows, columns={'prompt': 'question', 'target': 'answer'})."
)
"""Addition to errors about a file with a program's rows."""


@contextmanager
def save_rows(
    settings: RunConfig,
    data: object,
    validation: object,
    columns: Columns | None,
    *,
    reporter: Reporter = SILENT,
) -> Iterator[RunConfig]:
    """Save a program's rows as files, and yield the settings with these files as sources.

    The files are removed if the context raises an error.

    Raises:
        ConfigError: The configuration also names sources, or there are columns but no rows.
        DataError: The rows cannot be read, or the folder of the store has other files.
    """
    rows_by_field = {
        field: rows
        for field, rows in (("sources", data), ("validation", validation))
        if rows is not None
    }
    if not rows_by_field:
        if columns is not None:
            raise ConfigError(
                f"{argument('columns')} needs rows, e.g. train(config, data=rows). For a file, "
                "write its columns next to its path in data.sources."
            )
        yield settings
        return

    store = Path(settings.data.store)
    source_fields = source_columns(columns)
    sources = (*settings.data.sources, *settings.data.validation)
    earlier_files = {Path(source.path).name for source in sources}
    if check_store_folder(store):
        earlier_files |= _source_names(store)
    try:
        files = _write_sources(settings, rows_by_field, source_fields, reporter)
        yield configure(settings, data=files)
    except BaseException as error:
        # Another process may be reading the same rows.
        if is_only_rank() and not _is_in_use(store):
            forget_rows(store, earlier_files)
        if str(store / ROWS) in str(error):
            error.add_note(_ROWS_NOTE)
        raise
    # The store may have replaced a store of other rows, which are no longer needed.
    if is_only_rank() and check_store_folder(store):
        forget_rows(store, _source_names(store))


def _write_sources(
    settings: RunConfig,
    rows_by_field: Mapping[str, object],
    source_fields: Mapping[str, object],
    reporter: Reporter,
) -> dict[str, list[dict[str, object]]]:
    """Write a program's rows to files. Return the changed fields of `data` with their sources."""
    store = Path(settings.data.store)
    files: dict[str, list[dict[str, object]]] = {}
    for field, rows in rows_by_field.items():
        path = write_rows(rows, store, name=_ROW_ARGUMENTS[field], say=reporter.notice)
        _refuse_other_sources(settings, field, path)
        # A run's own config.yaml lists the file of these rows, with its columns.
        if source_fields or not getattr(settings.data, field):
            files[field] = [{"path": str(path), **source_fields}]
    return files


def _refuse_other_sources(settings: RunConfig, field: str, path: Path) -> None:
    """Raise a ConfigError if a list of sources has other files than the rows saved at `path`."""
    configured = getattr(settings.data, field)
    if configured and [source.path for source in configured] != [str(path)]:
        raise ConfigError(
            f"{argument(_ROW_ARGUMENTS[field])} cannot be combined with data.{field}, which lists "
            f"{configured[0].path}. Use one of them, e.g. with configure(config, "
            f"data={{'{field}': []}})."
        )


def _source_names(store: Path) -> set[str]:
    """Return the names of a store's source files."""
    return {Path(entry.path).name for entry in read_manifest(store).sources}


def _is_in_use(store: Path) -> bool:
    """Return whether another process is preparing this store or training on it."""
    if not (store / LOCK).exists():
        return False
    try:
        with store_to_write(store):
            return False
    except DataError:
        return True


def prepare_store(
    settings: RunConfig,
    *,
    replace: bool = False,
    log_steps_from: int = 0,
    reporter: Reporter = SILENT,
) -> PrepareResult:
    """Prepare the store of valid settings. Do not check that it fits the model.

    Args:
        settings: Valid settings with a store.
        replace: Delete a store of other data or settings.
        log_steps_from: Size of the sources in bytes from which each step is logged as a line.
        reporter: Receives the progress.
    """
    n_bytes = 0

    def progress(done_bytes: int, total_bytes: int, message: str) -> None:
        # A message without a count begins a step.
        keep = not total_bytes and n_bytes >= log_steps_from
        reporter.progress(message, done=done_bytes, total=total_bytes, keep=keep)

    refuse_other_tokenizer(settings)
    try:
        sources = open_sources(settings, progress=progress, say=reporter.notice)
        files = chain.from_iterable(source.files or () for source in sources)
        n_bytes = sum(file.path.stat().st_size for file in files)
        refuse_absent(sources, settings.data.own_tasks)
        return pipeline.prepare(
            sources,
            store=Path(settings.data.store),
            settings=prepare_settings(settings),
            progress=progress,
            replace=replace,
            engine=settings.data.engine,
        )
    finally:
        reporter.progress("")


def refuse_untrainable(config: RunConfig, store: TokenStore) -> None:
    """Check that a prepared store fits its model, without loading the model.

    The check is skipped if the model is not on this machine.

    Raises:
        ConfigError: `train` would refuse the store. The store remains, because most errors need
            only other settings.
    """
    start = named_path(config.model.start_from)
    if config.model.start_from != "scratch" and not (start / "config.json").is_file():
        return
    from toque.data.loader.batch_stream import refuse_empty
    from toque.workflows.plan.outlined_model import outline_stream  # loads torch

    try:
        refuse_empty(store, "validation")
        outline_stream(config, store)
    except ConfigError as error:
        raise ConfigError(
            f"{store.path} is prepared, but `toque train` would refuse it: {error}"
        ) from error


def prepare_if_absent(config: RunConfig, *, reporter: Reporter = SILENT) -> None:
    """Prepare the store of a configuration with sources if it does not exist yet."""
    if is_prepared(config) or not config.data.sources:
        return
    reporter.notice(
        f"{config.data.store} is not prepared yet, so it is prepared first."
    )
    # Training itself checks that the store fits the model.
    result = prepare_store(config, log_steps_from=_LARGE_BYTES, reporter=reporter)
    # The banner of the run reports the numbers of examples and dropped records.
    reporter.detail(
        f"{describe_result(result, config.data.engine)} See the dropped records and the unused "
        f"columns with: toque report {in_shell(result.store.path)}"
    )


def prepare_before_torch(
    config: RunConfig,
    *,
    start: Model | None = None,
    data: object = None,
    validation: object = None,
    columns: Columns | None = None,
    reporter: Reporter = SILENT,
) -> RunConfig:
    """Prepare an absent store before torch is loaded, so that its workers start fast.

    Several ranks prepare later, when they are connected. Check `start` first, and refuse a run_dir
    with files of the user.

    Returns:
        The settings, with a program's rows as their sources.
    """
    if start is not None:
        refuse_absent_start(start)
    if "://" not in config.run_dir:
        refuse_users_folder(Path(config.run_dir))
    with save_rows(config, data, validation, columns, reporter=reporter) as settings:
        if is_only_rank():
            has_rows = settings is not config
            if has_rows and is_prepared(settings):
                # Reuse the store, or refuse it if it has other rows.
                prepare_store(settings, reporter=reporter)
            else:
                prepare_if_absent(settings, reporter=reporter)
    return settings


def is_only_rank() -> bool:
    """Return whether this process is the only rank."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def describe_result(result: PrepareResult, engine: str) -> str:
    """Describe in one line whether a store was prepared or reused."""
    if result.reused:
        return f"Reused {result.store.path}."
    with_engine = " with data.engine=ray" if engine == "ray" else ""
    return f"Prepared {result.store.path}{with_engine}."
