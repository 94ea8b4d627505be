"""Command `doctor`: this machine checked, or what limits a run."""

from __future__ import annotations

from contextlib import nullcontext
from json import dumps
from pathlib import Path

from toque.cli.commands_data import loading, reporter


def doctor(run: Path | None = None, /, *, json: bool = False) -> None:
    """Check this machine; or say what limits a run.

    Without RUN: versions, processor, GPUs, a compile, two processes that share a sum, disk, memory,
    limits, credentials and extras, each with what to do; exit code 1 when something needed is
    broken. With RUN, also while it continues or after a kill: what its time went into, what limits
    it, what to change and what that should give.

    Args:
        run: run folder.
        json: print one JSON object, for programs.
    """
    from toque.workflows.doctor import Diagnosis
    from toque.workflows.doctor import doctor as workflow

    with loading() if run is None else nullcontext():
        from toque.cli.console import print_checkup

        if run is None:
            import torch  # noqa: F401 - what takes seconds
    found = workflow(run, reporter=reporter())
    if json:
        print(dumps(found.record(), indent=1))
    elif isinstance(found, Diagnosis):
        print(found)
    else:
        print_checkup(found)
    if not isinstance(found, Diagnosis):
        found.raise_if_failed()
