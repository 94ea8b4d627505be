"""Part of the application that serves models: OpenAI's protocol and the requests of the page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from toque.models.generation.options import Precision
from toque.serving.application import Part, build_app
from toque.serving.batcher import Batcher, ServedModels
from toque.serving.completions import ChatRequest, CompletionRequest
from toque.serving.embeddings import EmbeddingReply, EmbeddingRequest
from toque.serving.gate import Gate, Limits
from toque.serving.page_routes import page_routes
from toque.serving.protocol import TextRequest
from toque.serving.reply import Reply
from toque.serving.request_body import read_request
from toque.serving.responses import ResponseRequest

_EMBEDDING_BODIES: Final = 4
"""Multiple of `body_bytes` for embeddings: clients send 300,000 tokens per request."""


def build_model_app(
    models: ServedModels,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    hosts: Collection[str] | None = None,
    precision: Precision = "float32",
) -> Gate:
    """Build the ASGI application of `toque serve`. Its batch runs from startup to shutdown.

    Args:
        models: The served models.
        limits: Limits on memory and time.
        token: Token that requests must send; see `Login`.
        hosts: Allowed Host headers; see `Gate`.
        precision: Precision of the matmuls.
    """
    limits = limits or Limits()
    batcher = Batcher(models, rows=limits.rows, queue=limits.queue, precision=precision)

    writes_recipes = any(served.record.knows_recipes for served in models.values())
    view = "use" if writes_recipes else "talk"
    return build_app(
        [model_part(models, batcher, limits, views=[view])],
        token=token,
        hosts=hosts,
        max_requests=limits.connections,
        counts=batcher.metrics,
    )


def model_part(
    models: ServedModels, batcher: Batcher, limits: Limits, *, views: Sequence[str]
) -> Part:
    """Build the part of the application that generates texts. It runs the batch."""

    @asynccontextmanager
    async def run_batch() -> AsyncIterator[None]:
        batcher.start()
        try:
            yield
        finally:
            batcher.close()

    routes = [
        *_protocol_routes(models, batcher, limits),
        *page_routes(models, batcher, limits),
    ]
    return Part(views=views, routes=routes, run=run_batch)


def _protocol_routes(
    models: ServedModels, batcher: Batcher, limits: Limits
) -> list[Route]:
    """Build the routes of OpenAI's protocol and of the metrics."""

    async def metrics(_: Request) -> Response:
        return Response(batcher.metrics.page(), media_type="text/plain; version=0.0.4")

    async def list_models(_: Request) -> Response:
        data = [served.description for served in models.values()]
        return JSONResponse({"object": "list", "data": data})

    async def describe_model(request: Request) -> Response:
        return JSONResponse(models.get_model(request.path_params["name"]).description)

    def text_route(path: str, kind: type[TextRequest]) -> Route:
        async def answer(http_request: Request) -> Response:
            request = await read_request(kind, http_request, limits)
            served = models.get_model(request.model)
            served.check_ids(map(int, request.logit_bias or ()), "logit_bias")
            prompts = await request.prompt_ids(served)
            constraint = await request.compile_constraint(served)
            return Reply(
                batcher, served, prompts, request, limits, constraint=constraint
            )

        return Route(path, answer, methods=["POST"])

    embedding_limits = replace(limits, body_bytes=_EMBEDDING_BODIES * limits.body_bytes)

    async def embed(http_request: Request) -> Response:
        request = await read_request(EmbeddingRequest, http_request, embedding_limits)
        served = models.get_model(request.model)
        texts = await request.texts(served)
        return EmbeddingReply(batcher, served, texts, request, limits)

    return [
        Route("/metrics", metrics),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", describe_model),
        text_route("/v1/completions", CompletionRequest),
        text_route("/v1/chat/completions", ChatRequest),
        text_route("/v1/responses", ResponseRequest),
        Route("/v1/embeddings", embed, methods=["POST"]),
    ]
