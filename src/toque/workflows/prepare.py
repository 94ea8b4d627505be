"""Preparation: raw data to the store of a configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Final

from toque.config import RunConfig
from toque.data.prepare import pipeline
from toque.data.prepare.pipeline import PrepareResult, holds_a_store
from toque.data.store.store_manifest import read_manifest
from toque.data.store.token_store import LOCK, TokenStore, store_to_write
from toque.errors import ConfigError, DataError, argument, in_shell
from toque.reporter import SILENT, Reporter
from toque.runs.run_files import refuse_users_folder
from toque.sources.memory_rows import ROWS, forget_rows, write_rows
from toque.sources.own_tasks import refuse_absent
from toque.user_paths import named_path
from toque.workflows.configure import Columns, Configured, configure, source_columns
from toque.workflows.prepared_store import is_prepared, prepare_settings, sources_of
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
    """Turn raw data into the configuration's token store, or reuse it, and look whether it fits.

    Args:
        config: what `configure` takes.
        data: rows to train on, in place of data.sources: a list or another iterable of dicts or
            texts, a datasets.Dataset, a frame of pandas or polars, or a pyarrow Table. They are
            kept beside the store, named by their content.
        validation: rows to hold out, in place of data.validation.
        columns: fields that hold a part of each row, {"prompt": "question", "target": "answer"},
            as `columns` of a source; None for those that are recognised.
        replace: delete a store made from other data or settings instead of refusing.
        reporter: hears of progress.

    Returns:
        The open store, the data report, and whether the store was there already.

    Raises:
        ConfigError: the configuration cannot be used, or the model that it names cannot be trained
            on the store; the store is there then.
        DataError: sources that cannot be read, or a store of other data.
    """
    with rows_kept(configure(config), data, validation, columns, reporter=reporter) as settings:
        result = prepared(settings, replace=replace, reporter=reporter)
    if not result.reused:
        refuse_untrainable(settings, result.store)
    return result


_MUCH_BYTES: Final = 10_000_000
"""Bytes of sources from which a part of preparing them may take a minute."""


@contextmanager
def rows_kept(
    settings: RunConfig,
    data: object,
    validation: object,
    columns: Columns | None,
    *,
    reporter: Reporter = SILENT,
) -> Iterator[RunConfig]:
    """The settings with a program's rows as their sources, in files that stay if the store does.

    Raises:
        ConfigError: the configuration names sources, too, or columns are named of no rows.
        DataError: rows that cannot be read, or a folder that holds no store.
    """
    store, given = Path(settings.data.store), settings.data
    found = {"sources": ("data", data), "validation": ("validation", validation)}
    rows = {field: both for field, both in found.items() if both[1] is not None}
    if not rows:
        if columns is not None:
            raise ConfigError(
                f"{argument('columns')} names fields of rows, and none are given, as by "
                "train(config, data=rows). Those of a file stand in data.sources, beside its path."
            )
        yield settings
        return
    named = source_columns(columns)
    there = [source.path for source in (*given.sources, *given.validation)]
    before = {Path(path).name for path in there}
    if holds_a_store(store):
        before |= {Path(entry.path).name for entry in read_manifest(store).sources}
    try:
        files: dict[str, list[dict[str, object]]] = {}
        for field, (name, held) in rows.items():
            path = write_rows(held, store, name=name, say=reporter.notice)
            if (listed := getattr(given, field)) and [each.path for each in listed] != [str(path)]:
                raise ConfigError(
                    f"{argument(name)} gives rows, and data.{field} lists {listed[0].path}, too. "
                    f"Leave one out, e.g. by configure(config, data={{'{field}': []}})."
                )
            if named or not listed:  # a run's own configuration lists these rows already
                files[field] = [{"path": str(path), **named}]
        yield configure(settings, data=files)
    except BaseException as error:
        if is_alone() and not _is_being_written(store):  # by one who reads the same rows
            forget_rows(store, before)
        if str(store / ROWS) in str(error):
            error.add_note(
                "That file is made of the rows given as data or validation. Their columns are the "
                "argument columns, e.g. train(config, data=rows, columns={'prompt': 'question', "
                "'target': 'answer'})."
            )
        raise
    if is_alone() and holds_a_store(store):
        forget_rows(store, {Path(entry.path).name for entry in read_manifest(store).sources})


def _is_being_written(store: Path) -> bool:
    """True if another process prepares this store now, or trains on it."""
    try:
        with store_to_write(store) if (store / LOCK).exists() else nullcontext():
            return False
    except DataError:
        return True


def prepared(
    settings: RunConfig,
    *,
    replace: bool = False,
    names_parts_from: int = 0,
    reporter: Reporter = SILENT,
) -> PrepareResult:
    """The store of checked settings; whether a model can be trained on it is not looked at.

    Each part of the work has a line of its own if the sources have so many bytes.
    """
    n_bytes = 0

    def progress(done_bytes: int, total_bytes: int, message: str) -> None:
        # What has no count begins a part, which may be long.
        keep = not total_bytes and n_bytes >= names_parts_from
        reporter.progress(message, done=done_bytes, total=total_bytes, keep=keep)

    try:
        sources = sources_of(settings, progress=progress, say=reporter.notice)
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
    """Lay a store out for its model, as `train` will, without allocating the model.

    A model that is not on this machine passes. The store stays: most of what a ConfigError tells is
    put right without preparing again.
    """
    start = named_path(config.model.start_from)
    if config.model.start_from != "scratch" and not (start / "config.json").is_file():
        return
    from toque.data.loader.batch_stream import refuse_empty
    from toque.workflows.plan.outlined_model import outlined_stream  # with torch

    try:
        refuse_empty(store, "validation")
        outlined_stream(config, store)
    except ConfigError as error:
        raise ConfigError(
            f"{store.path} is prepared, and `toque train` would refuse it: {error}"
        ) from error


def prepare_if_absent(config: RunConfig, *, reporter: Reporter = SILENT) -> None:
    """Prepare the store of a configuration that names sources, where there is none yet; say so."""
    if is_prepared(config) or not config.data.sources:
        return
    reporter.notice(f"{config.data.store} is not prepared yet: preparing it first.")
    # Training looks whether it fits.
    result = prepared(config, names_parts_from=_MUCH_BYTES, reporter=reporter)
    # The banner of the run says how many examples there are and what was dropped.
    reporter.detail(
        f"{in_a_line(result, config.data.engine)} What was dropped and why, and which columns no "
        f"example holds: toque report {in_shell(result.store.path)}"
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
    """`prepare_if_absent` before torch is loaded: workers are then forked and begin at once.

    Of several ranks one prepares, once they have met. A `start` that is absent is refused here, and
    so is a run_dir with files of the user's.
    Returns the settings, whose sources a program's rows are.
    """
    if start is not None:
        refuse_absent_start(start)
    if "://" not in config.run_dir:
        refuse_users_folder(Path(config.run_dir))
    with rows_kept(config, data, validation, columns, reporter=reporter) as settings:
        if is_alone() and settings is not config and is_prepared(settings):
            prepared(settings, reporter=reporter)  # refused where it holds other rows
        elif is_alone():
            prepare_if_absent(settings, reporter=reporter)
    return settings


def is_alone() -> bool:
    """True if this process is the only rank."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def in_a_line(result: PrepareResult, engine: str) -> str:
    """One line on what was done."""
    if result.reused:
        return f"Reused {result.store.path}."
    return f"Prepared {result.store.path}{' with data.engine=ray' if engine == 'ray' else ''}."
