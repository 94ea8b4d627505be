"""Application of a studio: the views of all servers, and the management of runs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from toque.runs.places import RunFinder
from toque.serving.application import build_app
from toque.serving.batcher import Batcher, ServedModels
from toque.serving.gate import Gate, Limits
from toque.serving.model_app import model_part
from toque.serving.watch_app import Watcher, watch_part
from toque.studio.jobs import Jobs
from toque.studio.model_pool import ModelPool
from toque.studio.routes import Studio
from toque.studio.workplace import Workplace

_WATCH_SECONDS: Final = 1.0
"""Seconds between two reads of the runs."""


def build_studio(
    workplace: Workplace, *, token: str, hosts: Collection[str] | None, limits: Limits
) -> Gate:
    """Build the ASGI application of a studio.

    Args:
        workplace: Folder of the studio, which must be the working folder.
        token: Token of the server; see `Login`.
        hosts: Allowed Host headers; see `Gate`.
        limits: Limits on memory and time.
    """
    models = ServedModels([])
    batcher = Batcher(models, rows=limits.rows, queue=limits.queue)
    watcher = Watcher(RunFinder(workplace.folder), every=_WATCH_SECONDS)
    studio = Studio(
        workplace,
        watcher,
        ModelPool(workplace, batcher),
        Jobs(workplace.folder, workplace.state),
    )
    return build_app(
        # The routes of the first part take precedence.
        [
            studio.part(),
            watch_part(watcher),
            model_part(models, batcher, limits, views=["use", "talk"]),
        ],
        token=token,
        hosts=hosts,
        max_requests=limits.connections,
        counts=batcher.metrics,
    )
