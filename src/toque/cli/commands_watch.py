"""Commands that look at runs: `toque watch`, `toque compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from toque.cli.commands_data import reporter


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
    from toque.workflows.watch import watch as workflow

    workflow(run_or_folder, host=host, port=port, token=token, reporter=reporter())


def compare(*runs: str, out: Path | None = None, json: bool = False) -> None:
    """Hold runs against the first: settings that differ, scores with intervals, cost, curves.

    Args:
        runs: two or more runs, unfinished, ended or killed: folders, or addresses at gs:// or s3://.
        out: the page to write; comparison.html beside the first run when left out.
        json: print every number as JSON instead of tables.
    """
    from toque.workflows.compare import compare as workflow

    found = workflow(*runs, out=out, reporter=reporter())
    print(found.json() if json else found)
