"""Gate in front of an application: limits, allowed hosts, login, and counts of responses."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import Final, final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toque.serving.request_errors import RequestError, error_response

_NEEDS_TOKEN: Final = ("/v1/", "/api/", "/metrics")
"""Prefixes of paths for which requests need the token."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on memory and time for all requests."""

    rows: int = 32
    """Maximum number of texts in a batch."""
    queue: int = 256
    """Maximum number of waiting texts. Further requests are refused with status 429."""
    seconds: float = 300.0
    """Maximum time for a request, including its time in the queue."""
    texts: int = 64
    """Maximum number of texts per request: its prompts times n."""
    body_bytes: int = 1 << 20
    """Maximum size of a request's body, in bytes."""
    body_seconds: float = 10.0
    """Maximum time to receive the head of a request, and again to receive its body."""
    connections: int = 2048
    """Maximum number of open connections. A further connection closes the one that has been idle
    for the longest time. If all connections wait for a response, it is refused with status 503."""
    grace_seconds: float = 30.0
    """Maximum time to finish requests after SIGTERM."""


@final
class Login:
    """Check of the token: in the header `Authorization`, or in the cookie of a browser.

    Args:
        token: Token of the server. None if requests need no token.
    """

    def __init__(self, token: str | None) -> None:
        self._token = token
        secret = f"toque {token}".encode()
        self._cookie_value = hashlib.sha256(secret).hexdigest()
        # Browsers send the cookies of all ports. Each server has its own cookie.
        self._cookie_name = f"toque-{self._cookie_value[:8]}"

    @property
    def cookie(self) -> str:
        """Value of the header `Set-Cookie`. Other sites cannot send the cookie or read it."""
        name, value = self._cookie_name, self._cookie_value[8:]
        return f"{name}={value}; Path=/; HttpOnly; SameSite=Strict"

    def accepts(self, token: str) -> bool:
        """Check a token. The time does not depend on the number of characters that match."""
        if self._token is None:
            return True
        return hmac.compare_digest(token.encode(), self._token.encode())

    def allows(self, request: Request) -> bool:
        """Check whether a request has the token or the cookie."""
        if self._token is None:
            return True
        authorization = request.headers.get("authorization", "")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer" and self.accepts(token):
            return True
        cookie = request.cookies.get(self._cookie_name, "")
        return hmac.compare_digest(cookie.encode(), self._cookie_value[8:].encode())


@dataclass(eq=False)
class Gate:
    """ASGI application that checks requests before it forwards them to another application."""

    app: ASGIApp
    _: KW_ONLY
    login: Login
    hosts: Collection[str] | None
    """Allowed names in the header `Host`; None for any name. On a loopback address, this prevents
    DNS rebinding: a web page cannot use a domain that resolves to this machine."""
    paths: Collection[str]
    """Paths with separate counts of requests."""
    count: Callable[[str, int], object]
    """Function that receives the path and status of every response."""
    max_requests: int
    """Maximum number of concurrent requests. Further requests are refused with status 503."""
    is_stopping: bool = False
    """True after the shutdown has begun: new requests are refused with status 503."""
    _n_open: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or forward it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self.paths else "other"

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.count(path, message["status"])
            await send(message)

        error = self._check(Request(scope))
        self._n_open += 1
        try:
            responder = self.app if error is None else error_response(error)
            await responder(scope, receive, send_and_count)
        finally:
            self._n_open -= 1

    def _check(self, request: Request) -> RequestError | None:
        """Return the error of a request that is refused."""
        # The path that the router uses. starlette 1.0.0 builds `request.url` from the Host header:
        # with `Host: x/y?`, every path became "/y".
        path = request.scope["path"]
        if self.is_stopping and path != "/metrics":
            return _unavailable("is stopping.", retry_after=5)
        if self._n_open >= self.max_requests and path not in ("/health", "/metrics"):
            return _unavailable(
                "has too many open requests. Try again in a moment.", retry_after=1
            )
        return (
            self._check_host(request)
            or _check_origin(request)
            or self._check_login(request, path)
        )

    def _check_host(self, request: Request) -> RequestError | None:
        """Return an error if the Host header has a name that is not allowed."""
        header = request.headers.get("host", "")
        host, _, port = header.rpartition(":")
        # The last colon of "[::1]" is not followed by a port.
        has_port = not port or port.isdigit()
        name = (host if has_port else header).strip("[]").lower()
        if self.hosts is None or name in self.hosts:
            return None
        names = ", ".join(sorted(self.hosts))
        return RequestError(
            421, f"The Host header must be one of {names}, not {name[:100]!r}."
        )

    def _check_login(self, request: Request, path: str) -> RequestError | None:
        """Return an error if the path needs the token and the request does not have it."""
        if not path.startswith(_NEEDS_TOKEN) or self.login.allows(request):
            return None
        return RequestError(
            401,
            "This server needs its token. Programs send it in the header `Authorization: Bearer "
            "TOKEN`, or as the client's api_key.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _check_origin(request: Request) -> RequestError | None:
    """Return an error if a page of another site sent the request.

    A page on another port of this machine is another site, but gets the cookie of this server.
    """
    origin = request.headers.get("origin")
    host = request.headers.get("host", "")
    if origin is None or origin.partition("://")[2].lower() == host.lower():
        return None
    return RequestError(
        403, f"Pages of another site may not use this server: {origin[:100]!r}."
    )


def _unavailable(state: str, *, retry_after: int) -> RequestError:
    """Create the error for a server that is stopping or full. `retry_after` is in seconds."""
    return RequestError(
        503,
        f"This server {state}",
        code="service_unavailable",
        headers={"Retry-After": str(retry_after)},
    )
