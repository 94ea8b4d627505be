"""`toque prepare`: raw data to store, with a progress bar and the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from toque.build.data import prepare_settings, sources_of
from toque.config import RunConfig
from toque.data.prepare import PrepareResult, prepare
from toque.data.settings import ProgressSink


def run_prepare(config: RunConfig, *, replace: bool = False) -> PrepareResult:
    """Prepare the configuration's store, or reuse it."""
    sources, settings = sources_of(config), prepare_settings(config)
    with _bar() as progress:
        return prepare(
            sources,
            store=Path(config.data.store),
            settings=settings,
            progress=progress,
            replace=replace,
        )


def told(result: PrepareResult) -> str:
    """What was done, in a line."""
    verb = "Reused" if result.reused else "Prepared"
    return f"{verb} {result.store.path}."


@contextmanager
def _bar() -> Iterator[ProgressSink]:
    """A bar on a terminal's standard error, nothing elsewhere; standard output stays clean."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("preparing", total=None)

        def show(done_bytes: int, total_bytes: int, message: str) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes or None, description=message)

        yield show
