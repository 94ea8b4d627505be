"""Servers of models, and of the pages of runs while they train."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from toque.errors import ConfigError, needing
from toque.hardware.ending_thread import call_in_ending_thread
from toque.models.generation.options import (
    GenerationOptions,
    Precision,
    refuse_below,
)
from toque.reporter import SILENT, Reporter
from toque.runs.places import RunFinder, is_in_a_bucket
from toque.storage.bucket import BucketUse, RunBucketError, open_bucket
from toque.workflows.results import Model, TrainedRun, model_folder
from toque.workflows.saved_steps import run_of
from toque.workflows.trained_model.folders import check_model

if TYPE_CHECKING:
    from toque.serving.batcher import ServedModels
    from toque.serving.gate import Gate

_LOCAL_INTERVAL: Final = 1.0
"""Seconds between reads of a local run."""
_BUCKET_INTERVAL: Final = 15.0
"""Seconds between reads of a bucket. A run uploads its metrics only at checkpoints."""
_WATCHED: Final = BucketUse(
    "the address to watch",
    "list and read",
    "Nothing there was changed.",
    RunBucketError,
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
    """Serve models over an OpenAI-compatible API, until SIGTERM or Ctrl-C.

    Args:
        models: One or several runs, checkpoints, model folders or adapter folders. Requests name a
            model by its folder. To choose another name, write "name=folder".
        host: Address to listen on. An address that other machines can reach needs a token.
        port: Port to listen on, or 0 for any free port.
        token: Token of every request, as `Authorization: Bearer TOKEN`.
        rows: Maximum number of texts generated at the same time.
        queue: Maximum number of waiting texts. Further requests are refused with status 429.
        seconds: Maximum time for one request.
        device: auto (the GPU, if present), cpu, cuda or cuda:N.
        precision: Precision of the matmuls, as for `generate`. bf16 is faster if the
            processor supports it, but a text can then depend on other texts in its batch.
        reporter: Receives the server's address.

    Raises:
        ConfigError: A folder does not exist, two models have the same name, the server cannot
            listen on the address, or a public address has no token.
        CheckpointError: A model is damaged, or an adapter belongs to another base.
    """
    with needing("serve", "`toque serve`"):
        from toque.serving.gate import Limits
        from toque.serving.server import Server, allowed_hosts, open_socket, url_of
    if isinstance(models, TrainedRun | str | Path):
        models = [models]
    folders = name_models(models)
    hosts = allowed_hosts(host, port=port, token=token, risk="use the models")
    GenerationOptions(precision=precision)  # checks the precision
    refuse_below(1, rows=rows, seconds=seconds)
    refuse_below(0, queue=queue)
    limits = Limits(rows=rows, queue=queue, seconds=seconds)
    with open_socket(host, port) as sock:  # fails before the slow import of torch
        with reporter.working("loading torch"):
            from toque.models.generation.engine import (
                choose_program,
                describe_emulation,
            )
            from toque.serving.model_app import build_model_app
            from toque.workflows.inference.open_served import open_models

        def open_app() -> tuple[ServedModels, Gate]:
            served = open_models(folders, device=device, reporter=reporter)
            for model in served.values():
                choose_program(precision, model.model)  # refuses models without int8
            app = build_model_app(
                served, limits=limits, token=token, hosts=hosts, precision=precision
            )
            return served, app

        message = "reading " + ", ".join(map(str, folders.values()))
        with reporter.working(message):
            served, app = call_in_ending_thread(open_app)

        notes = {
            describe_emulation(precision, model.model) for model in served.values()
        }
        for note in filter(None, notes):
            reporter.notice(note)
        reporter.line(f"{url_of(host, sock)} serves {', '.join(served)}.")
        reporter.notice("The OpenAI API is below /v1. Press Ctrl-C to stop.")
        with suppress(KeyboardInterrupt):
            Server(app, limits).run(sockets=[sock])
    reporter.notice("Stopped.")


def name_models(models: Sequence[Model]) -> dict[str, Path]:
    """Choose the name of each model in requests, and return the folders by name.

    Raises:
        ConfigError: Two models have the same name, or `models` is empty.
    """
    folders: dict[str, Path] = {}
    for model in models:
        name, _, path = str(model).partition("=")
        has_name = bool(name and path) and not model_folder(model).exists()
        folder = check_model(path if has_name else model)
        if not has_name:
            name = _default_name(folder)
        if name in folders:
            raise ConfigError(
                f"{folders[name]} and {folder} would both be served as {name!r}. Give one of them "
                f"another name, e.g. other={folder}."
            )
        folders[name] = folder
    if not folders:
        raise ConfigError("There is nothing to serve. Name a run or a model folder.")
    return folders


def _default_name(folder: Path) -> str:
    """Return a model's name if the user chose none. RUN/model has the name of its run."""
    folder = folder.absolute()
    if (run := run_of(folder)) is not None:
        return f"{run.name}-{folder.name}"
    is_in_run = folder.name == "model" and len(folder.parts) > 2
    return folder.parent.name if is_in_run else folder.name


def watch(
    run_or_folder: Model,
    *,
    host: str = "127.0.0.1",
    port: int = 8001,
    token: str | None = None,
    reporter: Reporter = SILENT,
) -> None:
    """Show a run, or all runs in a folder, on a live page, until SIGTERM or Ctrl-C.

    The runs may still be training. Their files are only read.

    Args:
        run_or_folder: A run, or a folder of runs, which may appear later, on this machine or at
            gs:// or s3://.
        host: Address to listen on. An address that other machines can reach needs a token.
        port: Port to listen on, or 0 for any free port.
        token: Token that readers must send.
        reporter: Receives the address of the page.

    Raises:
        ConfigError: The folder has no runs, the server cannot listen on the address, or a public
            address has no token.
        CheckpointError: The bucket cannot be read.
    """
    with needing("serve", "`toque watch`"):
        from toque.serving.gate import Limits
        from toque.serving.server import Server, allowed_hosts, open_socket, url_of
        from toque.serving.watch_app import Watcher, build_watch_app
    hosts = allowed_hosts(
        host, port=port, token=token, risk="read the texts and metrics of the runs"
    )
    finder, interval = _find_runs(run_or_folder, reporter)
    with open_socket(host, port) as sock:
        app = build_watch_app(Watcher(finder, every=interval), token=token, hosts=hosts)
        reporter.line(f"{url_of(host, sock)} shows {finder.address}.")
        reporter.notice(
            "The page updates itself. Ctrl-C stops the page, but not the runs."
        )
        with suppress(KeyboardInterrupt):
            Server(app, Limits(connections=256)).run(sockets=[sock])
    reporter.notice("Stopped.")


def _find_runs(watched: Model, reporter: Reporter) -> tuple[RunFinder, float]:
    """Return a finder of the runs, and the seconds between two reads.

    Raises:
        ConfigError: The path is not a run or a folder of runs.
        CheckpointError: The bucket cannot be read.
    """
    if not isinstance(watched, TrainedRun) and is_in_a_bucket(str(watched)):
        finder = RunFinder(open_bucket(str(watched).rstrip("/"), _WATCHED))
        finder.places()  # report a wrong address or key immediately
        return finder, _BUCKET_INTERVAL
    folder = model_folder(watched)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder} is a file. Name a run, or a folder that contains runs."
        )
    if not folder.exists():
        reporter.notice(
            f"{folder} does not exist yet. Runs appear on the page as they begin."
        )
    # The page of a store or a model would wait for runs forever.
    signs = {"manifest.json": "a store or a checkpoint", "model.safetensors": "a model"}
    for name, kind in signs.items():
        if (folder / name).is_file():
            raise ConfigError(
                f"{folder} is {kind} ({name}), not a run. Name a run such as runs/my, or the "
                "folder that contains your runs."
            )
    return RunFinder(folder), _LOCAL_INTERVAL
