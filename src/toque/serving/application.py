"""Application of Toque's servers: one web page with several views, and the routes of its parts."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass
from itertools import chain
from typing import Final, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from toque.serving.gate import Gate, Login
from toque.serving.request_errors import (
    RequestError,
    answer_http_error,
    error_response,
    internal_error,
)
from toque.serving.static_files import site_routes

_log = logging.getLogger("toque.serving")
_CLIENT_GONE: Final = 499
"""nginx's status for a client that closed its connection."""


class RequestCounts(Protocol):
    """Receiver of the number of responses and of lost clients."""

    def count_answer(self, path: str, status: int, /) -> None:
        """Count a response."""

    def count_lost_client(self) -> None:
        """Count a client that disconnected before the end of its request."""


class _NoCounts:
    def count_answer(self, path: str, status: int, /) -> None: ...

    def count_lost_client(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of the application: views of the page, and the routes that they need."""

    views: Sequence[str]
    """Names of the views, which are files in `site`."""
    routes: Sequence[Route]
    run: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
    """Context of the part's work in the background, from startup to shutdown."""


def build_app(
    parts: Sequence[Part],
    *,
    token: str | None,
    hosts: Collection[str] | None,
    max_requests: int,
    counts: RequestCounts | None = None,
) -> Gate:
    """Build the ASGI application of a server.

    Args:
        parts: Parts of the application. The first view of the first part is at the start.
        token: Token of the server, or None; see `Login`.
        hosts: Allowed Host headers; see `Gate`.
        max_requests: Maximum number of concurrent requests.
        counts: Receiver of the numbers of responses by path.
    """
    counts = counts or _NoCounts()
    login = Login(token)
    views = list(chain.from_iterable(part.views for part in parts))
    routes = [
        *site_routes(views, login),
        Route("/health", _answer_health),
        *chain.from_iterable(part.routes for part in parts),
    ]

    @asynccontextmanager
    async def run_parts(_: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for part in parts:
                await stack.enter_async_context(part.run())
            yield

    async def count_disconnect(_: Request, _error: Exception) -> Response:
        counts.count_lost_client()
        return Response(status_code=_CLIENT_GONE)

    app = Starlette(
        routes=routes,
        lifespan=run_parts,
        exception_handlers={
            RequestError: _answer_error,
            HTTPException: answer_http_error,
            ClientDisconnect: count_disconnect,
            Exception: _answer_error,
        },
    )
    return Gate(
        app,
        login=login,
        hosts=hosts,
        paths=[route.path for route in routes],
        count=counts.count_answer,
        max_requests=max_requests,
    )


async def _answer_health(_: Request) -> Response:
    # No details, because this route needs no token.
    return JSONResponse({"status": "ok"})


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer a refused request, or log the error of a failed one."""
    if isinstance(error, RequestError):
        return error_response(error)
    # Library logs do not appear on the terminal, not even uvicorn's log of this error.
    _log.error("answering %.100r failed", request.scope["path"], exc_info=error)
    return error_response(internal_error())
