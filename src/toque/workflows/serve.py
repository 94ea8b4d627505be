"""Serving of models and adapters to programs and people."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from toque.errors import ConfigError, argument
from toque.reporter import SILENT, Reporter
from toque.workflows.results import Model, TrainedRun, existing_folder, folder_of


def serve(
    models: Model | Sequence[Model],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    rows: int = 32,
    queue: int = 256,
    seconds: float = 300.0,
    reporter: Reporter = SILENT,
) -> None:
    """Answer requests in the OpenAI protocol until SIGTERM or Ctrl-C.

    Args:
        models: runs, model folders or adapter folders, one or several. Each is asked for by its
            folder's name, or by one of your own as "name=folder".
        host: the address to listen on; one that other machines reach needs a token.
        port: 0 takes any that is free.
        token: what requests must bring as `Authorization: Bearer TOKEN`.
        rows: texts written at a time.
        queue: texts that wait beside them; more are refused with 429.
        seconds: longest time for one request.
        reporter: hears where the server is.

    Raises:
        ConfigError: no such folder, two models of one name, an address that cannot be listened
            on, or a public one without a token.
        CheckpointError: a model that is damaged, or an adapter of another base.
    """
    try:
        from toque.serving.application import build_app
        from toque.serving.server import Limits, Server, hosts_of, listening, url_of
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`toque serve` needs {error.name}, which is not installed. Run: pip install "
            "'toque[serve]'."
        ) from error
    named = _named([models] if isinstance(models, TrainedRun | str | Path) else models)
    hosts = hosts_of(host, port=port, token=token, risk="use the models")
    for name, value, least in (("rows", rows, 1), ("queue", queue, 0), ("seconds", seconds, 1)):
        if value < least:
            raise ConfigError(f"{argument(name)} is {value:g}; it must be at least {least}.")
    from toque.workflows.open_served import open_models

    limits = Limits(rows=rows, queue=queue, seconds=seconds)
    with listening(host, port) as sock:  # before the models, which take longer
        # A thread that has computed keeps a team of OpenMP threads until it ends; beside the
        # batch's team that is more threads than cores, and libgomp's then sleep at every product:
        # a step took twice as long (lab/notes.md, 2026-11-22).
        said = "reading " + ", ".join(map(str, named.values()))
        with reporter.working(said), ThreadPoolExecutor(1) as once:
            served = once.submit(open_models, named).result()
            app = once.submit(build_app, served, limits=limits, token=token, hosts=hosts).result()
        reporter.line(f"{url_of(host, sock)} serves {', '.join(served)}.")
        reporter.notice("Programs ask below /v1, as they ask OpenAI. Ctrl-C stops.")
        with suppress(KeyboardInterrupt):
            Server(app, limits).run(sockets=[sock])
    reporter.notice("Stopped.")


def _named(models: Sequence[Model]) -> dict[str, Path]:
    """The folders by the names they are asked for.

    Raises:
        ConfigError: none, no such folder, or two of one name.
    """
    found: dict[str, Path] = {}
    for model in models:
        name, folder = _name_and_folder(model)
        if name in found:
            raise ConfigError(
                f"{found[name]} and {folder} would both be served as {name!r}. Give one of them "
                f"a name of its own: other={folder}."
            )
        found[name] = existing_folder(folder)
    if not found:
        raise ConfigError("There is nothing to serve. Name a run or a model folder.")
    return found


def _name_and_folder(model: Model) -> tuple[str, Path]:
    folder = folder_of(model)
    name, given, rest = str(model).partition("=")
    if given and name and rest and not folder.exists():
        return name, Path(rest)
    parts = folder.absolute().parts
    # The model of a run is known by its run's name.
    is_inner = parts[-1] == "model" and len(parts) > 2
    return parts[-2 if is_inner else -1], folder
