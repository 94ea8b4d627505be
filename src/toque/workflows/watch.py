"""Watching of runs: their report in the browser, renewed while they train."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from toque.errors import ConfigError
from toque.reporter import SILENT, Reporter
from toque.runs.places import RunFinder, is_in_a_bucket
from toque.storage.bucket import open_bucket
from toque.storage.bucket_access import BucketUse, RunBucketError
from toque.workflows.results import Model, TrainedRun, folder_of

_EVERY_SECONDS: Final = 1.0
_EVERY_SECONDS_IN_A_BUCKET: Final = 15.0
"""A look costs requests, and a run copies its metrics at every checkpoint, no oftener."""
_WATCHED: Final = BucketUse(
    "the address to watch", "list and read", "Nothing there was changed.", RunBucketError
)


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
    try:
        from toque.serving.server import Limits, Server, hosts_of, listening, url_of
        from toque.watching import Watcher, watching_app
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`toque watch` needs {error.name}, which is not installed. Run: pip install "
            "'toque[serve]'."
        ) from error
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
    """The finder of the runs, and the seconds between two looks.

    Raises:
        ConfigError: something else than runs.
        CheckpointError: the bucket cannot be read.
    """
    if not isinstance(watched, TrainedRun) and is_in_a_bucket(str(watched)):
        finder = RunFinder(open_bucket(str(watched).rstrip("/"), _WATCHED))
        finder.places()  # a wrong address or key shows at once
        return finder, _EVERY_SECONDS_IN_A_BUCKET
    folder = folder_of(watched)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file. Name a run, or a folder that holds runs.")
    if not folder.exists():
        reporter.notice(f"{folder} is not there yet. A run that begins in it appears.")
    _refuse_another_kind(folder)
    return RunFinder(folder), _EVERY_SECONDS


def _refuse_another_kind(folder: Path) -> None:
    """A store or a model holds no run, and the page would wait for ever."""
    signs = {"manifest.json": "a store or a checkpoint", "model.safetensors": "a model"}
    for name, kind in signs.items():
        if (folder / name).is_file():
            raise ConfigError(
                f"{folder} is {kind} ({name}), not a run. Name a run such as runs/mine, or the "
                "folder that holds your runs."
            )
