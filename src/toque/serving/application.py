"""Application of `toque serve`: the routes of OpenAI's protocol, health and metrics."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from toque.models.generation.options import Precision
from toque.serving.batcher import Batcher, ServedModels, internal_error
from toque.serving.gate import Gate, Limits, read_body
from toque.serving.page_routes import page_routes
from toque.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    TextRequest,
    parse_request,
)
from toque.serving.reply import Reply
from toque.serving.request_errors import RequestError, answer_http_error, error_response

_log = logging.getLogger("toque.serving")
_CLIENT_GONE: Final = 499
"""nginx's status for a client that closed its connection."""


def build_app(
    models: ServedModels,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    hosts: Collection[str] | None = None,
    precision: Precision = "float32",
) -> Gate:
    """Build the ASGI application of a server. Its batch runs from startup to shutdown.

    Args:
        models: The served models.
        limits: Limits on memory and time.
        token: Token that requests must send; see `Gate`.
        hosts: Allowed Host headers; see `Gate`.
        precision: Precision of the matmuls.
    """
    limits = limits or Limits()
    batcher = Batcher(models, rows=limits.rows, queue=limits.queue, precision=precision)

    @asynccontextmanager
    async def run_batch(_: Starlette) -> AsyncIterator[None]:
        batcher.start()
        try:
            yield
        finally:
            batcher.close()

    async def count_disconnect(_: Request, _error: Exception) -> Response:
        """Count a client that disconnected before the end of its request."""
        batcher.metrics.gone.inc()
        return Response(status_code=_CLIENT_GONE)

    routes = [*_routes(models, batcher, limits), *page_routes(models, batcher, limits)]
    app = Starlette(
        routes=routes,
        lifespan=run_batch,
        exception_handlers={
            RequestError: _answer_error,
            HTTPException: answer_http_error,
            ClientDisconnect: count_disconnect,
            Exception: _answer_error,
        },
    )
    return Gate(
        app,
        token=token,
        hosts=hosts,
        paths=[route.path for route in routes],
        count=batcher.metrics.count_answer,
        max_requests=limits.connections,
    )


def _routes(models: ServedModels, batcher: Batcher, limits: Limits) -> list[Route]:
    """Build the routes of OpenAI's protocol, health and metrics."""

    async def health(_: Request) -> Response:
        # No details, because this route needs no token.
        return JSONResponse({"status": "ok"})

    async def metrics(_: Request) -> Response:
        return Response(batcher.metrics.page(), media_type="text/plain; version=0.0.4")

    async def list_models(_: Request) -> Response:
        data = [served.description for served in models.values()]
        return JSONResponse({"object": "list", "data": data})

    async def describe_model(request: Request) -> Response:
        return JSONResponse(models.get_model(request.path_params["name"]).description)

    def text_route(path: str, kind: type[TextRequest]) -> Route:
        async def answer(http_request: Request) -> Response:
            request = parse_request(kind, await read_body(http_request, limits))
            served = models.get_model(request.model)
            prompts = await request.prompt_ids(served)
            constraint = await request.compile_constraint(served)
            return Reply(
                batcher, served, prompts, request, limits, constraint=constraint
            )

        return Route(path, answer, methods=["POST"])

    return [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", describe_model),
        text_route("/v1/completions", CompletionRequest),
        text_route("/v1/chat/completions", ChatRequest),
    ]


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer a refused request, or log the error of a failed one."""
    if isinstance(error, RequestError):
        return error_response(error)
    # Library logs do not appear on the terminal, not even uvicorn's log of this error.
    _log.error("answering %.100r failed", request.scope["path"], exc_info=error)
    return error_response(internal_error())
