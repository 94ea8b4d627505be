"""Command `doctor`: this machine checked, or a run's bottleneck told and its lever tried."""

from __future__ import annotations

from contextlib import nullcontext
from json import dumps
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from toque.cli.commands_data import loading, reporter


def doctor(
    run: Path | None = None,
    /,
    *,
    try_levers: Annotated[bool, Parameter(name="--try")] = False,
    steps: int = 12,
    pairs: int = 2,
    json: bool = False,
) -> None:
    """Check this machine; or tell what limits a run, and try the lever.

    Without RUN: versions, processor, GPUs, a compile, two processes that share a sum, disk, memory,
    limits, credentials and extras, each with what to do; exit code 1 when something needed is
    broken. With RUN, also while it goes on or after a kill: what its time went into, what limits
    it, what to change and what that should give.

    Args:
        run: run folder.
        try_levers: train a few updates on the run's data as it is and with the lever, in turn, in a
            scratch folder, and print the measured gain.
        steps: updates of each turn of `--try`.
        pairs: turns of each side.
        json: print one JSON object, for programs.
    """
    from toque.workflows.doctor.diagnosis import Diagnosis
    from toque.workflows.doctor.diagnosis import doctor as workflow

    with loading() if run is None and not try_levers else nullcontext():
        from toque.cli.console import print_checkup

        if run is None and not try_levers:
            import torch  # noqa: F401 - what takes seconds
    found = workflow(run, try_levers=try_levers, steps=steps, pairs=pairs, reporter=reporter())
    if json:
        print(dumps(found.record(), indent=1))
    elif isinstance(found, Diagnosis):
        print(found)
    else:
        print_checkup(found)
    if not isinstance(found, Diagnosis):
        found.raise_if_failed()
