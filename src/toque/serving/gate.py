"""Gate of a server: who may ask, and how much may be sent, before a request is looked at."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Collection

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toque.serving.errors import RequestError, stopping, too_many
from toque.serving.limits import Limits

GUARDED = ("/v1/", "/api/", "/metrics")
"""What lies below them needs it."""
_ALWAYS = ("/health", "/metrics")
"""Answered however many requests there are."""
_READ_PAST = 32
"""Bodies are read up to so many times the limit, and dropped: a client that is still sending when
the connection closes would not see why."""


class Gate:
    """ASGI application around another: host, token and stopping, and a count of the answers.

    Args:
        app: What the requests go to.
        token: That they must bring as `Authorization: Bearer TOKEN`; None for none.
        hosts: Names that `Host` may say; None for any. On loopback this keeps out pages that make
            a browser ask a name of theirs which leads here (DNS rebinding).
        paths: Paths that are counted by name; requests for others are counted together.
        count: Is told the path and the status of every answer.
        most: Requests at a time; more are refused with 503.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        hosts: Collection[str] | None,
        paths: Collection[str],
        count: Callable[[str, int], object],
        most: int,
    ) -> None:
        self._app, self._token, self._hosts = app, token, hosts
        self._paths, self._count = frozenset(paths), count
        self._most, self._n_open = most, 0
        self.is_stopping = False
        """Whether new requests are refused with 503."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(path, message["status"])
            await send(message)

        refusal = self._refusal(Request(scope))
        self._n_open += 1
        try:
            answer = self._app if refusal is None else answer_to(refusal)
            await answer(scope, receive, counted)
        finally:
            self._n_open -= 1

    def _refusal(self, request: Request) -> RequestError | None:
        # As the routes read it. `request.url` is made of the Host header by starlette 1.0.0, where
        # `Host: x/y?` made "/y" of every path.
        path = request.scope["path"]
        if self.is_stopping and path != "/metrics":
            return stopping()
        if self._n_open >= self._most and path not in _ALWAYS:
            return too_many()
        host = request.headers.get("host", "").rpartition(":")
        name = (host[0] if host[2].isdigit() else "".join(host)).strip("[]").lower()
        if self._hosts is not None and name not in self._hosts:
            return RequestError(
                421,
                f"This server answers to {', '.join(sorted(self._hosts))}, and the request is "
                f"for {name[:100]!r}.",
            )
        if self._token is None or not path.startswith(GUARDED):
            return None
        given = request.headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return None
        return RequestError(
            401,
            "This server needs its token: send the header `Authorization: Bearer TOKEN`, or name "
            "it as the client's api_key.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def answer_to(error: RequestError) -> JSONResponse:
    """The response that an error is."""
    return JSONResponse(error.record(), status_code=error.status, headers=error.headers)


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body of a request in JSON.

    Raises:
        RequestError: 415, 413 or 408: another type, too long, or too slow.
        ClientDisconnect: the client went away.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A browser sends no JSON to another site's address without asking it first.
        raise RequestError(
            415, f"The body is {kind[:100] or 'of no type'}; send Content-Type: application/json."
        )
    body, n = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                n += len(part)
                if n <= limits.body_bytes:
                    body += part
                elif n > _READ_PAST * limits.body_bytes:
                    break
    except TimeoutError:
        raise RequestError(
            408,
            f"The body had not arrived after {limits.body_seconds:g} seconds.",
            headers={"Connection": "close"},
        ) from None
    if n > limits.body_bytes:
        raise RequestError(
            413,
            f"The body is longer than the {limits.body_bytes:,} bytes this server reads. Send "
            "less.",
            headers={"Connection": "close"},
        )
    return bytes(body)
