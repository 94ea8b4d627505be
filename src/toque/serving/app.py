"""Application of `toque serve`: the routes of the OpenAI protocol, health and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from toque.errors import DataError
from toque.models.generation.live_rows import Order
from toque.serving.answers import Answers, ChatAnswers, CompletionAnswers
from toque.serving.batcher import Batcher
from toque.serving.context import Serving
from toque.serving.errors import RequestError, failed
from toque.serving.gate import Gate, answer_to, read_body
from toque.serving.limits import Limits
from toque.serving.metrics import Metrics
from toque.serving.page_routes import page_routes
from toque.serving.protocol import ChatRequest, CompletionRequest, Sampling, parsed
from toque.serving.replies import Reply
from toque.serving.served import ServedModel, ServedModels


def build_app(
    models: ServedModels,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    hosts: Collection[str] | None = None,
) -> Gate:
    """The ASGI application of a server; its batch computes from start-up to shutdown.

    Args:
        models: By the names that requests give.
        limits: What one client and all together may ask.
        token: That requests must bring; None for none.
        hosts: Names under which it is asked; None for any.
    """
    limits = limits or Limits()
    batcher = Batcher(models, rows=limits.rows, queue=limits.queue)
    serving = Serving(models, batcher, limits, Metrics(batcher))

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        batcher.start()
        try:
            yield
        finally:
            batcher.close()

    routes = _routes(serving)
    app = Starlette(
        routes=routes,
        lifespan=running,
        exception_handlers={
            RequestError: _refused,
            HTTPException: _no_such_route,
            Exception: _broken,
        },
    )
    paths = [route.path for route in routes if isinstance(route, Route)]
    return Gate(
        app,
        token=token,
        hosts=hosts,
        paths=paths,
        count=serving.metrics.answered,
        most=limits.connections,
    )


def _routes(serving: Serving) -> Sequence[BaseRoute]:
    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})  # no more, for it is asked without a token

    async def metrics(_: Request) -> Response:
        return Response(serving.metrics.page(), media_type="text/plain; version=0.0.4")

    async def list_models(_: Request) -> Response:
        data = [_described(served) for served in serving.models.values()]
        return JSONResponse({"object": "list", "data": data})

    async def one_model(request: Request) -> Response:
        return JSONResponse(_described(serving.models.named(request.path_params["name"])))

    async def completions(request: Request) -> Response:
        asked = parsed(CompletionRequest, await read_body(request, serving.limits))
        served = serving.models.named(asked.model)
        # In another thread: a prompt of 1 MiB takes a second, and nobody waits for it meanwhile.
        prompts = await run_in_threadpool(
            lambda: [served.prompt_ids(p) if isinstance(p, str) else p for p in asked.prompts]
        )
        orders = orders_of(serving, served, prompts, asked, asked.max_tokens, param="prompt")
        form = CompletionAnswers(served, n_likeliest=asked.n_likeliest)
        return _reply(serving, served, orders, asked, form)

    async def chat(request: Request) -> Response:
        asked = parsed(ChatRequest, await read_body(request, serving.limits))
        served = serving.models.named(asked.model)
        prompt = await _conversation(served, asked)
        most = asked.max_completion_tokens or asked.max_tokens
        orders = orders_of(serving, served, [prompt], asked, most, param="messages")
        return _reply(
            serving, served, orders, asked, ChatAnswers(served, n_likeliest=asked.n_likeliest)
        )

    return [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", one_model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        *page_routes(serving),
    ]


async def _conversation(served: ServedModel, asked: ChatRequest) -> list[int]:
    """The prompt of a conversation: all its turns where the model takes them, else the last.

    Raises:
        RequestError: 400, nobody asks anything, or the model's template refuses the turns.
    """
    if not asked.question.strip():
        raise RequestError(
            400, "messages hold nothing that a user says; add one.", param="messages"
        )
    if served.chat is None:
        return await run_in_threadpool(lambda: served.prompt_ids(served.asked(asked.question)))
    try:
        return await asyncio.wrap_future(served.chat.ids(asked.turns))
    except DataError as error:
        raise RequestError(400, str(error), param="messages") from error


def orders_of(
    serving: Serving,
    served: ServedModel,
    prompts: Sequence[Sequence[int]],
    asked: Sampling,
    most_tokens: int | None,
    *,
    param: str,
) -> list[Order]:
    """The texts that a request wants, n for each prompt.

    Raises:
        RequestError: 400, too many of them, or a prompt that the model cannot read.
    """
    n, most = asked.n or 1, serving.limits.texts
    if n * len(prompts) > most:
        raise RequestError(
            400,
            f"{n} texts for each of {len(prompts)} prompts are more than the {most} of one "
            "request. Ask several times.",
            param="n" if n > 1 else param,
        )
    chooser = asked.chooser()
    longest = [served.most_tokens(prompt, most_tokens, param=param) for prompt in prompts]
    return [
        Order(prompt, limit, chooser, i * n + number, asked.n_likeliest)
        for i, (prompt, limit) in enumerate(zip(prompts, longest, strict=True))
        for number in range(n)
    ]


def _reply(
    serving: Serving,
    served: ServedModel,
    orders: Sequence[Order],
    asked: Sampling,
    form: Answers,
) -> Reply:
    return Reply(
        serving.batcher,
        served,
        orders,
        form=form,
        stops=asked.stops,
        stream=bool(asked.stream),
        with_usage=asked.wants_usage,
        prompt_tokens=sum(len(order.prompt) for order in orders[:: asked.n or 1]),
        seconds=serving.limits.seconds,
        metrics=serving.metrics,
    )


def _described(served: ServedModel) -> dict[str, object]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "toque",
        "parent": served.base,
        "max_model_len": served.context_tokens,
    }


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return answer_to(error)


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, method = request.scope["path"][:100], request.method
    what = f"There is nothing at {path}." if error.status_code == 404 else str(error.detail)
    if error.status_code == 405:
        what = f"{path} does not answer {method}."
    headers = dict(error.headers or {})
    return answer_to(RequestError(error.status_code, what, code="invalid_url", headers=headers))


async def _broken(_: Request, __: Exception) -> Response:
    return answer_to(failed())
