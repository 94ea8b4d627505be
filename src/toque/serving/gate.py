"""Gate of a server: who may ask, how much may be sent, and how a request is refused."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_GUARDED: Final = ("/v1/", "/api/", "/metrics")
"""Paths that need the token, with all that lies below them."""
_ALWAYS: Final = ("/health", "/metrics")
"""Paths that are answered however many requests there are."""
_READ_PAST: Final = 32
"""Bodies are read up to so many times the limit, and dropped: a client that is still sending when
the connection closes would not see why."""
_TYPES: Final = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of memory and time that hold whatever is sent."""

    rows: int = 32
    """Texts written at a time."""
    queue: int = 256
    """Texts that wait beside them; a request beyond is answered with 429."""
    seconds: float = 300.0
    """Longest time for one request, waiting included."""
    texts: int = 64
    """Most texts of one request: its prompts times n."""
    body_bytes: int = 1 << 20
    """Longest body of a request."""
    body_seconds: float = 10.0
    """Longest time for a client to send its request: the head, and again the body."""
    connections: int = 2048
    """Open connections. One more closes the one that has been silent longest; where all of them
    wait for an answer, its request is refused with 503."""
    grace_seconds: float = 30.0
    """Time after SIGTERM for the requests that were accepted to end."""


class RequestError(Exception):
    """Refusal of a request, in the form that clients of OpenAI's protocol read.

    Args:
        status: HTTP's code.
        message: what was found, what is allowed, what to do.
        param: the field of the request it is about.
        code: the protocol's own word, for programs.
        headers: sent along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.record = {
            "error": {
                "message": message,
                "type": _TYPES.get(status, "invalid_request_error"),
                "param": param,
                "code": code,
            }
        }
        """Body of the answer."""


def answer_to(error: RequestError) -> JSONResponse:
    """The response that tells a client of an error."""
    return JSONResponse(error.record, status_code=error.status, headers=error.headers)


class Gate:
    """ASGI application around another: host, token and stopping, and a count of the answers.

    Args:
        app: receives the requests that pass.
        token: what they must bring as `Authorization: Bearer TOKEN`; None for none.
        hosts: names that `Host` may give; None for any. On loopback this keeps out pages that make
            a browser ask a name of theirs which leads here (DNS rebinding).
        paths: paths that are counted by name; requests for others are counted together.
        count: called with the path and the status of every answer.
        most: requests at a time; more are refused with 503.
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
        """True once new requests are refused with 503."""

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
        # The path as the routes read it. `request.url` is made of the Host header by starlette
        # 1.0.0, where `Host: x/y?` made "/y" of every path.
        path = request.scope["path"]
        if self.is_stopping and path != "/metrics":
            return _unavailable("is stopping and takes no more requests.", retry_after=5)
        if self._n_open >= self._most and path not in _ALWAYS:
            return _unavailable(
                "has as many open requests as it takes. Try again in a moment.", retry_after=1
            )
        host = request.headers.get("host", "").rpartition(":")
        name = (host[0] if host[2].isdigit() else "".join(host)).strip("[]").lower()
        if self._hosts is not None and name not in self._hosts:
            return RequestError(
                421,
                f"This server answers to {', '.join(sorted(self._hosts))}, and the request is "
                f"for {name[:100]!r}.",
            )
        if self._token is None or not path.startswith(_GUARDED):
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


def _unavailable(reason: str, *, retry_after: int) -> RequestError:
    return RequestError(
        503,
        f"This server {reason}",
        code="service_unavailable",
        headers={"Retry-After": str(retry_after)},
    )


async def read_body(request: Request, limits: Limits) -> bytes:
    """Body of a request in JSON.

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
    closing = {"Connection": "close"}
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                n += len(part)
                if n <= limits.body_bytes:
                    body += part
                elif n > _READ_PAST * limits.body_bytes:
                    break
    except TimeoutError:
        message = f"The body had not arrived after {limits.body_seconds:g} seconds."
        raise RequestError(408, message, headers=closing) from None
    if n > limits.body_bytes:
        message = (
            f"The body is longer than the {limits.body_bytes:,} bytes this server reads. Send less."
        )
        raise RequestError(413, message, headers=closing)
    return bytes(body)
