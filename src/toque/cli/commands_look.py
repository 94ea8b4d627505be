"""Commands that look at machines and runs and change nothing: doctor, plan, watch, compare."""

from __future__ import annotations

from contextlib import nullcontext
from json import dumps
from typing import Annotated

from cyclopts import Parameter

from toque.cli.commands_data import Overrides, load, loading
from toque.cli.console import ConsoleReporter, print_checkup


def doctor(run: str | None = None, /, *, json: bool = False) -> None:
    """Check this machine; or say what limits a run.

    Without RUN: versions, processor, GPUs, a compile, two processes that share a sum, disk, memory,
    limits, credentials and extras, each with what to do; exit code 1 when something needed is
    broken. With RUN, also while it continues or after a kill: what its time went into, what limits
    it, what to change and what that should give.

    Args:
        run: run folder.
        json: print one JSON object, for programs.
    """
    from toque.workflows.diagnosis.doctor import Diagnosis
    from toque.workflows.diagnosis.doctor import doctor as workflow

    with loading() if run is None else nullcontext():
        if run is None:
            import torch  # noqa: F401 - what takes seconds
    found = workflow(run, reporter=ConsoleReporter())
    if json:
        print(dumps(found.record(), indent=1))
    elif isinstance(found, Diagnosis):
        print(found)
    else:
        print_checkup(found)
    if not isinstance(found, Diagnosis):
        found.raise_if_failed()


def plan(
    config: str,
    /,
    *overrides: Overrides,
    hardware: str | None = None,
    gpus: int = 1,
    utilisation: float | None = None,
    json: bool = False,
) -> None:
    """Say what a run will take before it begins: memory by part, hours, disk, bucket traffic.

    No weight is read. What to change is worked out too, each change with its own figures. With a
    prepared store the lengths are those of its examples.

    Args:
        config: YAML file or preset.
        overrides: settings to change, as section.field=value.
        hardware: a card such as rtx-4090 or h100, by its maker's data sheet; without it, this
            machine, measured. Where CONFIG says what changes on that card, it is changed.
        gpus: how many of the card share every update: memory of each, and what they exchange.
        utilisation: per cent of the peak to assume; what is known, or a stated guess, when left
            out.
        json: print one JSON object instead of a table.
    """
    from toque.config.resolve import names_card
    from toque.hardware.cards import card_named

    changed = None
    if hardware is not None:
        hardware = card_named(hardware).name
        changed = hardware if names_card(config, hardware) else None
    settings = load(config, overrides, hardware=changed).config
    with loading():
        from toque.workflows.plan.plan import plan as workflow

    share = None if utilisation is None else utilisation / 100.0
    found = workflow(
        settings, hardware=hardware, utilisation=share, gpus=gpus, reporter=ConsoleReporter()
    )
    print(dumps(found.record(), indent=1) if json else found)


def checkpoints(run: str, /, *, json: bool = False) -> None:
    """List the checkpoints and best models of a run: training time, scores, size, why each is kept.

    Each is a model: `toque generate RUN/best/step-00000200 --prompt soup` writes with it.

    Args:
        run: run folder, or its address at gs:// or s3://; it may be training.
        json: print one JSON object instead of a table.
    """
    from toque.workflows.checkpoints import checkpoints as workflow

    steps = workflow(run, reporter=ConsoleReporter())
    print(dumps(steps.record(), indent=1) if json else steps)


def watch(
    run_or_folder: str,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8001,
    token: Annotated[str | None, Parameter(env_var="TOQUE_TOKEN")] = None,
) -> None:
    """Show a run, or all runs in a folder, as a page in the browser that moves while they train.

    The runs are only read: they may continue, have ended, or have been killed.

    Args:
        run_or_folder: run folder, folder that holds runs, or one of the two at gs:// or s3://.
        host: the address to listen on; one that other machines reach needs a token.
        port: 0 takes any that is free.
        token: what readers must give; better in the environment, where `ps` does not show it.
    """
    from toque.workflows.inference.serve import watch as workflow

    workflow(run_or_folder, host=host, port=port, token=token, reporter=ConsoleReporter())


def compare(*runs: str, out: str | None = None, json: bool = False) -> None:
    """Hold runs against the first: settings that differ, scores with intervals, cost, curves.

    Args:
        runs: two or more runs, unfinished, ended or killed, or checkpoints of runs: folders, or
            addresses at gs:// or s3://.
        out: the page to write; comparison.html beside the first run when left out.
        json: print every number as JSON instead of tables.
    """
    from toque.workflows.report import compare as workflow

    found = workflow(*runs, out=out, reporter=ConsoleReporter())
    print(dumps(found.record, indent=1) if json else found)
