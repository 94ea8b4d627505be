"""Command `toque serve`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from toque.cli.commands_data import reporter


def serve(
    *models: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: Annotated[str | None, Parameter(env_var="TOQUE_TOKEN")] = None,
    rows: int = 32,
    queue: int = 256,
    seconds: float = 300.0,
) -> None:
    """Serve models to people and programs: a page, and the protocol that OpenAI's clients speak.

    Args:
        models: run folders, model folders or adapter folders. Each is asked for by its folder's
            name, or by one of your own: NAME=FOLDER.
        host: the address to listen on; one that other machines reach needs a token.
        port: 0 takes any that is free.
        token: what clients must bring; better in the environment, where `ps` does not show it.
        rows: texts written at a time.
        queue: texts that wait beside them; what comes then is refused with 429.
        seconds: longest time for one request.
    """
    from toque.workflows.serve import serve as workflow

    workflow(
        models,
        host=host,
        port=port,
        token=token,
        rows=rows,
        queue=queue,
        seconds=seconds,
        reporter=reporter(),
    )
