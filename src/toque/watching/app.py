"""Application of `toque watch`: the page, and its stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from toque.reports.html import STYLE
from toque.serving.page_files import FOLDER as SERVED_PAGE
from toque.serving.page_files import page_files
from toque.serving.server import Gate, RequestError, answer_to
from toque.watching.view import Chosen, View, Viewer
from toque.watching.watched_run import WatchedRun
from toque.watching.watcher import Watcher

_PAGE: Final = Path(__file__).parent / "page"
_SHARED: Final = (
    STYLE,
    SERVED_PAGE / "stream.js",
    SERVED_PAGE / "toque.svg",
)
"""The report's look, and what the page of `toque serve` reads its stream with."""
_MOST_READERS: Final = 64
_SHARE_OF_A_CORE: Final = 0.02
"""Most of a processor's core that one reader may take from the run beside it."""
_TICK_SECONDS: Final = 0.25
"""Between two looks at whether the server ends."""
_ALIVE_SECONDS: Final = 15.0
"""Silence after which a line shows that the server is there."""
_LONGEST_NAMES: Final = 20_000


def build_app(watcher: Watcher, *, token: str | None, hosts: Collection[str] | None) -> Gate:
    """The ASGI application.

    Args:
        watcher: of the runs.
        token: that requests for figures must bring; None for none.
        hosts: names under which it is asked; None for any.
    """
    viewer = Viewer(watcher.finder.address)

    def looked(chosen: Chosen, before: object) -> tuple[View | None, object]:
        """The page, unless it is as it was `before`; and what to give for that the next time."""

        def make(runs: Mapping[str, WatchedRun]) -> tuple[View | None, object]:
            key = viewer.key(runs, watcher.trouble)
            same = key == before
            return (None if same else viewer.view(runs, chosen, watcher.trouble)), key

        watcher.refresh()
        return watcher.seen(make)

    async def stream(request: Request) -> Response:
        events = _events(
            looked, _chosen(request), every=watcher.every, over=lambda: gate.is_stopping
        )
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def now(request: Request) -> Response:
        view, _ = await run_in_threadpool(looked, _chosen(request), None)
        assert view is not None
        return JSONResponse({"title": view.title, "said": view.said, "loss": view.loss})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    routes = [
        *page_files(_PAGE, _SHARED),
        Route("/api/stream", stream),
        Route("/api/now", now),
        Route("/health", health),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={RequestError: _refused, HTTPException: _no_such_page},
    )
    gate = Gate(app, token=token, hosts=hosts, paths=(), count=lambda *_: None, most=_MOST_READERS)
    return gate


async def _events(
    looked: Callable[[Chosen, object], tuple[View | None, object]],
    chosen: Chosen,
    *,
    every: float,
    over: Callable[[], bool],
) -> AsyncIterator[str]:
    """What changed on the page, again and again, until `over` or the reader leaves."""
    sent: dict[str, Any] = {}
    key: object = None
    told = time.monotonic()
    while not over():
        began = time.monotonic()
        view, key = await run_in_threadpool(looked, chosen, key)
        took = time.monotonic() - began
        if view is not None and (changed := _changes(sent, view)):
            told = time.monotonic()
            yield f"data: {json.dumps(changed)}\n\n"
        elif time.monotonic() - told > _ALIVE_SECONDS:
            told = time.monotonic()
            yield ": nothing new\n\n"
        pause = max(every, took / _SHARE_OF_A_CORE)
        for _ in range(math.ceil(pause / _TICK_SECONDS)):
            if not over():
                await asyncio.sleep(min(_TICK_SECONDS, pause))


def _changes(sent: dict[str, Any], view: View) -> dict[str, Any]:
    """What a page must be told that was `sent` all that came before; notes it there."""
    parts: Mapping[str, str] = {
        name: html for name, html in view.parts.items() if sent.get(name) != html
    }
    sent.update(parts)
    changed: dict[str, Any] = {"parts": parts} if parts else {}
    for name, value in (("title", view.title), ("said", view.said), ("loss", view.loss)):
        if sent.get(f"its {name}") != value:
            sent[f"its {name}"] = changed[name] = value
    return changed


def _chosen(request: Request) -> Chosen:
    asked = request.query_params
    if len(str(asked)) > _LONGEST_NAMES:
        raise RequestError(414, "The names of the runs are longer than this server reads.")
    over = tuple(asked.getlist("over")) if "over" in asked else None
    return Chosen(asked.get("show"), over)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return answer_to(error)


async def _no_such_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"There is nothing at {request.scope['path'][:100]}."
    return answer_to(RequestError(error.status_code, said, code="invalid_url"))
