"""Preparation: raw data to the store of a configuration."""

from __future__ import annotations

from pathlib import Path

from toque.config import RunConfig
from toque.data.prepare import pipeline
from toque.data.prepare.pipeline import PrepareResult
from toque.reporter import SILENT, Reporter
from toque.workflows.assembly.data import prepare_settings, sources_of


def prepare(
    config: RunConfig, *, replace: bool = False, reporter: Reporter = SILENT
) -> PrepareResult:
    """Prepare the configuration's store, or reuse it.

    Arguments and errors are those of `toque.api.prepare`.
    """

    def progress(done_bytes: int, total_bytes: int, message: str) -> None:
        reporter.progress(message, done=done_bytes, total=total_bytes)

    try:
        return pipeline.prepare(
            sources_of(config, progress=progress, say=reporter.notice),
            store=Path(config.data.store),
            settings=prepare_settings(config),
            progress=progress,
            replace=replace,
            engine=config.data.engine,
        )
    finally:
        reporter.progress("")


def in_a_line(result: PrepareResult, config: RunConfig) -> str:
    """What was done."""
    if result.reused:
        return f"Reused {result.store.path}."
    cluster = " with data.engine=ray" if config.data.engine == "ray" else ""
    return f"Prepared {result.store.path}{cluster}."
