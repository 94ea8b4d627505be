"""Checks from Python: verify, report, check, drill."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toque.reporter import SILENT, Reporter
from toque.workflows.configure import Configured, configure
from toque.workflows.results import Model, folder_of

if TYPE_CHECKING:
    from toque.workflows.check.equivalence import Check
    from toque.workflows.drill.run import DrillResult
    from toque.workflows.report import Page
    from toque.workflows.verify import Verified


def verify(path: Model) -> Verified:
    """Compare every file of a store, a checkpoint or a run with its SHA-256.

    Raises:
        ConfigError: the folder is not one of the three.
        DataError: a store's file is missing or changed; file and cause are named.
        CheckpointError: a checkpoint's is.
    """
    from toque.workflows.verify import verify as workflow

    return workflow(folder_of(path))


def report(path: Model, *, out: str | Path | None = None) -> Page:
    """Write one offline HTML page about a store or a run, finished or not.

    Args:
        path: a store folder, or a run.
        out: the file to write; report.html in the folder when None.

    Raises:
        ConfigError: neither a store nor a run, or `out` cannot be written.
        DataError: the store is unfinished or damaged.
    """
    from toque.workflows.report import report as workflow

    return workflow(folder_of(path), out=None if out is None else Path(out))


def check(config: Configured, *, examples: int = 16) -> Check:
    """Compute one update in every way and compare each with transformers' own.

    Args:
        config: what `configure` takes; its store must be prepared.
        examples: examples in the update, from the shortest to the longest of the store.

    Returns:
        `passed` tells whether all agree; as a text it is a table.

    Raises:
        ConfigError: fewer than two examples, or a configuration that cannot be used.
        DataError: no prepared store.
    """
    from toque.workflows.check.equivalence import check as workflow

    return workflow(configure(config), examples=examples)


def drill(
    run: Model, *, kills: int = 10, steps: int = 24, seed: int = 1, reporter: Reporter = SILENT
) -> DrillResult:
    """Do the crash test to short copies of a run, on its disk; the run itself is only read.

    Sessions are forked: call this in a process that has not computed with torch yet.

    Args:
        run: what is copied.
        kills: times a copy is killed with SIGKILL at a random moment.
        steps: updates of each copy.
        seed: where random moments and bits come from.
        reporter: hears what is being done.

    Returns:
        `outcomes` of every fault, and the names of those that `failed`.

    Raises:
        ConfigError: no run there, or numbers that make no drill.
        CheckpointError: no room, or the run does not train undisturbed.
    """
    from toque.workflows.drill.run import drill as workflow

    return workflow(folder_of(run), kills=kills, steps=steps, seed=seed, reporter=reporter)
