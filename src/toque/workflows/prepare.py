"""Preparation: raw data to the store of a configuration."""

from __future__ import annotations

from pathlib import Path

from toque.data.prepare import pipeline
from toque.data.prepare.pipeline import PrepareResult
from toque.reporter import SILENT, Reporter
from toque.workflows.assembly.data import prepare_settings, sources_of
from toque.workflows.configure import Configured, configure


def prepare(
    config: Configured, *, replace: bool = False, reporter: Reporter = SILENT
) -> PrepareResult:
    """Turn raw data into the configuration's token store, or reuse it.

    Args:
        config: what `configure` takes.
        replace: delete a store made from other data or settings instead of refusing.
        reporter: hears of progress.

    Returns:
        The open store, the data report, and whether the store was there already.

    Raises:
        ConfigError: the configuration cannot be used.
        DataError: sources that cannot be read, or a store of other data.
    """
    settings = configure(config)

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


def in_a_line(result: PrepareResult, engine: str) -> str:
    """What was done."""
    if result.reused:
        return f"Reused {result.store.path}."
    return f"Prepared {result.store.path}{' with data.engine=ray' if engine == 'ray' else ''}."
