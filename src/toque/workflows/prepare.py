"""`toque prepare`: raw data to store, with a progress bar and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from toque.config import RunConfig
from toque.data.prepare.pipeline import PrepareResult, prepare
from toque.storage.progress import ProgressSink
from toque.workflows.assembly.data import prepare_settings, sources_of

_REFRESH_SECONDS = 0.1


def run_prepare(config: RunConfig, *, replace: bool = False) -> PrepareResult:
    """Prepare the configuration's store, or reuse it."""
    settings = prepare_settings(config)
    with _bar() as (progress, say):
        sources = sources_of(config, progress=progress, say=say)
        return prepare(
            sources,
            store=Path(config.data.store),
            settings=settings,
            progress=progress,
            replace=replace,
            engine=config.data.engine,
        )


def told(result: PrepareResult, config: RunConfig) -> str:
    """What was done, in a line."""
    if result.reused:
        return f"Reused {result.store.path}."
    cluster = " with data.engine=ray" if config.data.engine == "ray" else ""
    return f"Prepared {result.store.path}{cluster}."


@contextmanager
def _bar() -> Iterator[tuple[ProgressSink, Callable[[str], None]]]:
    """A bar on a terminal's standard error, sentences there anyway; standard output stays clean."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        auto_refresh=False,  # by a thread, and only a process of one thread can be forked
    )
    shown = 0.0
    with bar:
        task = bar.add_task("preparing", total=None)

        def show(done_bytes: int, total_bytes: int, message: str) -> None:
            nonlocal shown
            now = time.monotonic()
            late = now - shown > _REFRESH_SECONDS
            shown = now if late else shown
            total = total_bytes or None
            bar.update(task, completed=done_bytes, total=total, description=message, refresh=late)

        def say(sentence: str) -> None:
            console.print(sentence, markup=False, highlight=False, soft_wrap=True)

        yield show, say
