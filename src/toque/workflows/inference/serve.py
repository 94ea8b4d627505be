"""Serving of models to programs and people, and of the pages of runs while they train."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from toque.errors import ConfigError, argument, needing
from toque.models.generation.options import GenerationOptions, Precision
from toque.reporter import SILENT, Reporter
from toque.runs.places import RunFinder, is_in_a_bucket
from toque.storage.bucket import BucketUse, RunBucketError, open_bucket
from toque.workflows.asking import model_to_open
from toque.workflows.results import Model, TrainedRun, folder_of
from toque.workflows.saved_steps import run_of

_EVERY_SECONDS: Final = 1.0
_EVERY_SECONDS_IN_A_BUCKET: Final = 15.0
"""A look costs requests, and a run copies its metrics at every checkpoint, no oftener."""
_WATCHED: Final = BucketUse(
    "the address to watch", "list and read", "Nothing there was changed.", RunBucketError
)


def serve(
    models: Model | Sequence[Model],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    rows: int = 32,
    queue: int = 256,
    seconds: float = 300.0,
    device: str = "auto",
    precision: Precision = "float32",
    reporter: Reporter = SILENT,
) -> None:
    """Answer requests in the OpenAI protocol until SIGTERM or Ctrl-C.

    Args:
        models: runs, checkpoints, model folders or adapter folders, one or several. Each is asked
            for by its folder's name, or by one of your own as "name=folder".
        host: the address to listen on; one that other machines reach needs a token.
        port: 0 takes any that is free.
        token: what requests must bring as `Authorization: Bearer TOKEN`.
        rows: texts written at a time.
        queue: texts that wait beside them; more are refused with 429.
        seconds: longest time for one request.
        device: auto, the GPU where there is one; or cpu, cuda, cuda:N.
        precision: of the matrix products, as of `generate`. bf16 is faster where the processor has
            it, and a text then depends more often on those that are written beside it.
        reporter: hears where the server is.

    Raises:
        ConfigError: no such folder, two models of one name, an address that cannot be listened
            on, or a public one without a token.
        CheckpointError: a model that is damaged, or an adapter of another base.
    """
    with needing("serve", "`toque serve`"):
        from toque.serving.gate import Limits
        from toque.serving.server import Server, hosts_of, listening, url_of
    named = named_models([models] if isinstance(models, TrainedRun | str | Path) else models)
    hosts = hosts_of(host, port=port, token=token, risk="use the models")
    GenerationOptions(precision=precision)  # refuses another than the three
    for name, value, least in (("rows", rows, 1), ("queue", queue, 0), ("seconds", seconds, 1)):
        if not value >= least:  # NaN is no number
            raise ConfigError(f"{argument(name)} is {value:g}; it must be at least {least}.")
    limits = Limits(rows=rows, queue=queue, seconds=seconds)
    with listening(host, port) as sock:  # before torch and the models, which take longer
        with reporter.working("loading torch"):
            from toque.models.generation.engine import emulation_in_words
            from toque.serving.application import build_app
            from toque.workflows.inference.open_served import open_models

        # A thread that has computed keeps a team of OpenMP threads until it ends; beside the
        # batch's team that is more threads than cores, and libgomp's then sleep at every product:
        # a step took twice as long (lab/notes.md, 2026-11-22).
        said = "reading " + ", ".join(map(str, named.values()))
        with reporter.working(said), ThreadPoolExecutor(1) as once:
            opening = once.submit(open_models, named, device=device, reporter=reporter)
            served = opening.result()
            asked = partial(build_app, limits=limits, token=token, hosts=hosts, precision=precision)
            app = once.submit(asked, served).result()
        for said in {emulation_in_words(precision, one.model) for one in served.values()} - {""}:
            reporter.notice(said)
        reporter.line(f"{url_of(host, sock)} serves {', '.join(served)}.")
        reporter.notice("Programs ask below /v1, as they ask OpenAI. Ctrl-C stops.")
        with suppress(KeyboardInterrupt):
            Server(app, limits).run(sockets=[sock])
    reporter.notice("Stopped.")


def named_models(models: Sequence[Model]) -> dict[str, Path]:
    """The folders by the names they are asked for; refuses one name for two."""
    found: dict[str, Path] = {}
    for model in models:
        name, given, rest = str(model).partition("=")
        has_name = bool(given and name and rest) and not folder_of(model).exists()
        folder = model_to_open(rest if has_name else model)
        if not has_name:
            parts = folder.absolute().parts
            run = run_of(folder)
            # The model of a run is known by its run's name.
            name = parts[-2 if parts[-1] == "model" and len(parts) > 2 else -1]
            name = name if run is None else f"{run.name}-{name}"
        if name in found:
            raise ConfigError(
                f"{found[name]} and {folder} would both be served as {name!r}. Give one of them "
                f"a name of its own: other={folder}."
            )
        found[name] = folder
    if not found:
        raise ConfigError("There is nothing to serve. Name a run or a model folder.")
    return found


def watch(
    run_or_folder: Model,
    *,
    host: str = "127.0.0.1",
    port: int = 8001,
    token: str | None = None,
    reporter: Reporter = SILENT,
) -> None:
    """Show a run, or all runs in a folder, as a live page until SIGTERM or Ctrl-C.

    The runs are read and never touched: they may continue, have ended, or have been killed.

    Args:
        run_or_folder: a run, a folder that holds runs or will, or one of the two at gs:// or s3://.
        host: the address to listen on; one that other machines reach needs a token.
        port: 0 takes any that is free.
        token: what readers must give.
        reporter: hears where the page is.

    Raises:
        ConfigError: something else than runs, an address that cannot be listened on, or a public
            one without a token.
        CheckpointError: the bucket cannot be read.
    """
    with needing("serve", "`toque watch`"):
        from toque.serving.gate import Limits
        from toque.serving.server import Server, hosts_of, listening, url_of
        from toque.serving.watch_app import Watcher, watching_app
    hosts = hosts_of(host, port=port, token=token, risk="read the texts and metrics of the runs")
    finder, every = _finder(run_or_folder, reporter)
    with listening(host, port) as sock:
        app = watching_app(Watcher(finder, every=every), token=token, hosts=hosts)
        reporter.line(f"{url_of(host, sock)} shows {finder.address}.")
        reporter.notice("The page follows the runs by itself. Ctrl-C stops it; the runs continue.")
        with suppress(KeyboardInterrupt):
            Server(app, Limits(connections=256)).run(sockets=[sock])
    reporter.notice("Stopped.")


def _finder(watched: Model, reporter: Reporter) -> tuple[RunFinder, float]:
    """The finder of the runs, and the seconds between two looks."""
    if not isinstance(watched, TrainedRun) and is_in_a_bucket(str(watched)):
        finder = RunFinder(open_bucket(str(watched).rstrip("/"), _WATCHED))
        finder.places()  # a wrong address or key shows at once
        return finder, _EVERY_SECONDS_IN_A_BUCKET
    folder = folder_of(watched)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file. Name a run, or a folder that holds runs.")
    if not folder.exists():
        reporter.notice(f"{folder} is not there yet. A run that begins in it appears.")
    # A store or a model holds no run, and the page would wait for ever.
    signs = {"manifest.json": "a store or a checkpoint", "model.safetensors": "a model"}
    for name, kind in signs.items():
        if (folder / name).is_file():
            raise ConfigError(
                f"{folder} is {kind} ({name}), not a run. Name a run such as runs/mine, or the "
                "folder that holds your runs."
            )
    return RunFinder(folder), _EVERY_SECONDS
