"""Application of `toque serve`: the routes of OpenAI's protocol, health and metrics."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from toque.models.generation.options import Precision
from toque.serving.batcher import Batcher, ServedModels, failure
from toque.serving.page_routes import page_routes
from toque.serving.protocol import ChatRequest, CompletionRequest, TextRequest, parsed
from toque.serving.reply import Reply
from toque.serving.server import Gate, Limits, RequestError, answer_to, read_body

_log = logging.getLogger("toque.serving")
_CLIENT_GONE = 499  # nginx's status for a client that closed its connection


def build_app(
    models: ServedModels,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    hosts: Collection[str] | None = None,
    precision: Precision = "float32",
) -> Gate:
    """The ASGI application of a server; its batch computes from start-up to shutdown."""
    limits = limits or Limits()
    batcher = Batcher(models, rows=limits.rows, queue=limits.queue, precision=precision)

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        batcher.start()
        try:
            yield
        finally:
            batcher.close()

    async def gone(_: Request, _error: Exception) -> Response:
        """Count a client that left during its body; the empty answer reaches no one."""
        batcher.metrics.gone.inc()
        return Response(status_code=_CLIENT_GONE)

    routes = [*_routes(models, batcher, limits), *page_routes(models, batcher, limits)]
    app = Starlette(
        routes=routes,
        lifespan=running,
        exception_handlers={
            RequestError: _refused,
            HTTPException: _no_such_route,
            ClientDisconnect: gone,
            Exception: _refused,
        },
    )
    return Gate(
        app,
        token=token,
        hosts=hosts,
        paths=[route.path for route in routes],
        count=batcher.metrics.count_answer,
        most=limits.connections,
    )


def _routes(models: ServedModels, batcher: Batcher, limits: Limits) -> list[Route]:
    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})  # no more, for it is asked without a token

    async def metrics(_: Request) -> Response:
        return Response(batcher.metrics.page(), media_type="text/plain; version=0.0.4")

    async def list_models(_: Request) -> Response:
        data = [served.description for served in models.values()]
        return JSONResponse({"object": "list", "data": data})

    async def one_model(request: Request) -> Response:
        return JSONResponse(models.named(request.path_params["name"]).description)

    def writing(path: str, kind: type[TextRequest]) -> Route:
        async def answer(request: Request) -> Response:
            asked = parsed(kind, await read_body(request, limits))
            served = models.named(asked.model)
            prompts, held = await asked.prompt_ids(served), await asked.held(served)
            return Reply(batcher, served, prompts, asked, limits, held=held)

        return Route(path, answer, methods=["POST"])

    return [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", one_model),
        writing("/v1/completions", CompletionRequest),
        writing("/v1/chat/completions", ChatRequest),
    ]


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return answer_to(error)
    # uvicorn's own log of it is kept off the terminal with those of all libraries.
    _log.error("answering %.100r failed", request.scope["path"], exc_info=error)
    return answer_to(failure())


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, method = request.scope["path"][:100], request.method
    what = f"There is nothing at {path}." if error.status_code == 404 else str(error.detail)
    if error.status_code == 405:
        what = f"{path} does not answer {method}."
    headers = dict(error.headers or {})
    return answer_to(RequestError(error.status_code, what, code="invalid_url", headers=headers))
