"""Commands that inspect machines and runs without changing them: doctor, plan, watch, compare."""

from __future__ import annotations

from json import dumps
from typing import Annotated

from cyclopts import Parameter

from toque.cli.commands_data import Overrides, load, loading
from toque.cli.console import ConsoleReporter, print_checkup


def doctor(run: str | None = None, /, *, json: bool = False) -> None:
    """Check this machine, or find the bottleneck of a run.

    Without RUN: checks versions, processor, GPUs, compilation, communication of two processes,
    disk, memory, limits, credentials and extras, and prints how to fix each problem. The exit code
    is 1 if a required part is broken. With RUN, which may be training or killed: prints where its
    time went, what limits its speed, and the expected gain of each change.

    Args:
        run: run folder.
        json: print one JSON object.
    """
    from toque.workflows.diagnosis.doctor import Diagnosis
    from toque.workflows.diagnosis.doctor import doctor as workflow

    if run is None:
        with loading():
            import torch  # noqa: F401 - the slow import
    result = workflow(run, reporter=ConsoleReporter())
    if json:
        print(dumps(result.record(), indent=1))
    elif isinstance(result, Diagnosis):
        print(result)
    else:
        print_checkup(result)
    if not isinstance(result, Diagnosis):
        result.raise_if_failed()


def plan(
    config: str,
    /,
    *overrides: Overrides,
    hardware: str | None = None,
    gpus: int = 1,
    utilisation: float | None = None,
    json: bool = False,
) -> None:
    """Estimate the cost of a run: memory by part, hours, disk space, traffic of a bucket.

    Also suggests changes, with an estimate for each. Reads no weights. If the store is prepared,
    the estimate uses the lengths of its examples.

    Args:
        config: YAML file or preset.
        overrides: settings to change, as section.field=value.
        hardware: a GPU such as rtx-4090 or h100, from its data sheet, with the settings that CONFIG
            has for it. Default: this machine, measured.
        gpus: number of these GPUs that share every update. Memory is per GPU.
        utilisation: per cent of peak FLOP/s to assume. Default: a measured value or a guess. The
            output names the source.
        json: print one JSON object instead of a table.
    """
    from toque.config.resolve import names_card
    from toque.hardware.cards import card_named

    settings_for = None
    if hardware is not None:
        hardware = card_named(hardware).name
        if names_card(config, hardware):  # CONFIG has settings for this GPU
            settings_for = hardware
    settings = load(config, overrides, hardware=settings_for).config
    with loading():
        from toque.workflows.plan.plan import plan as workflow

    share = None if utilisation is None else utilisation / 100.0
    result = workflow(
        settings,
        hardware=hardware,
        utilisation=share,
        gpus=gpus,
        reporter=ConsoleReporter(),
    )
    print(dumps(result.record(), indent=1) if json else result)


def checkpoints(run: str, /, *, json: bool = False) -> None:
    """List checkpoints and best models of a run: training time, scores, size, reason to keep each.

    Every entry is a model that you can use: `toque generate RUN/best/step-00000200 --prompt soup`.

    Args:
        run: run folder, or its address in a bucket (gs:// or s3://). It may be training.
        json: print one JSON object instead of a table.
    """
    from toque.workflows.checkpoints import checkpoints as workflow

    steps = workflow(run, reporter=ConsoleReporter())
    print(dumps(steps.record(), indent=1) if json else steps)


def studio(
    folder: str = ".",
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: Annotated[str | None, Parameter(env_var="TOQUE_TOKEN")] = None,
    no_browser: bool = False,
) -> None:
    """Train, watch and use models of a folder on a web page.

    Training runs in processes of their own. They continue if the page or this command ends.

    Args:
        folder: the folder with your files, which also gets the runs. Default: this folder.
        host: the address to listen on.
        port: the port to listen on. If it is in use, the next free port is used.
        token: secret of the page. Default: a random one, which the printed address contains.
            Prefer the environment variable TOQUE_TOKEN, because `ps` shows flags.
        no_browser: do not open the page in the browser.
    """
    from toque.studio.server import run_studio

    run_studio(
        folder,
        host=host,
        port=port,
        token=token,
        browser=not no_browser,
        reporter=ConsoleReporter(),
    )


def watch(
    run_or_folder: str,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8001,
    token: Annotated[str | None, Parameter(env_var="TOQUE_TOKEN")] = None,
) -> None:
    """Show a run, or all runs in a folder, on a live page in the browser.

    The runs may be training, finished or killed. They are only read.

    Args:
        run_or_folder: run folder, or a folder of runs, on this machine or at gs:// or s3://.
        host: the address to listen on. An address that other machines can reach needs a token.
        port: the port to listen on. 0 chooses a free port.
        token: secret that the browser must send. Prefer the environment variable TOQUE_TOKEN,
            because `ps` shows flags.
    """
    from toque.workflows.inference.serve import watch as workflow

    workflow(
        run_or_folder, host=host, port=port, token=token, reporter=ConsoleReporter()
    )


def compare(*runs: str, out: str | None = None, json: bool = False) -> None:
    """Compare runs with the first one: different settings, scores with intervals, cost, curves.

    Args:
        runs: two or more runs or checkpoints, as folders or addresses at gs:// or s3://. Runs may
            be unfinished or killed.
        out: the page to write. Default: comparison.html next to the first run.
        json: print all numbers as JSON instead of tables.
    """
    from toque.workflows.report import compare as workflow

    result = workflow(*runs, out=out, reporter=ConsoleReporter())
    print(dumps(result.record, indent=1) if json else result)
