"""Server around an application: its address, gate, page, limits of time, and an end that waits."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import resource
import signal
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from toque.errors import ConfigError, argument

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
BACKLOG: Final = 2048  # connections that the system holds for the server until it accepts them
_LAST_PORT: Final = 65_535  # getaddrinfo takes a larger one for another port
_GUARDED: Final = ("/v1/", "/api/", "/metrics")  # beginnings of the paths that need the token
_READ_PAST: Final = 32
"""Times the limit that bodies are read and dropped, so that the client sees why it is refused."""
_TYPES: Final = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
_OTHER_FILES = 128  # open files beside the connections: weights, libraries, the log
PAGE: Final = Path(__file__).parent / "page"
_MEDIA_TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # another version of the server sends other files
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of memory and time that hold whatever is sent."""

    rows: int = 32  # texts written at a time
    queue: int = 256  # texts that wait beside them; a request beyond is answered with 429
    seconds: float = 300.0  # longest time for one request, waiting included
    texts: int = 64  # most texts of one request: its prompts times n
    body_bytes: int = 1 << 20  # longest body of a request
    body_seconds: float = 10.0  # longest time to send a request: the head, and again the body
    connections: int = 2048
    """Open connections. One more closes the one that has been silent longest; where all of them
    wait for an answer, its request is refused with 503."""
    grace_seconds: float = 30.0  # time after SIGTERM for the requests that were accepted to end


class RequestError(Exception):
    """Refusal of a request; `param` is the field it is about, `code` the protocol's word for it."""

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


@dataclass(eq=False)
class Gate:
    """ASGI application around another: host, token and stopping, and a count of the answers."""

    app: ASGIApp
    _: KW_ONLY
    token: str | None  # what requests bring as `Authorization: Bearer TOKEN`; None for none
    hosts: Collection[str] | None
    """Names that `Host` may give; None for any. On loopback this keeps out pages that make a
    browser ask a name of theirs which leads here (DNS rebinding)."""
    paths: Collection[str]  # those that are counted by name, and not together
    count: Callable[[str, int], object]  # called with the path and the status of every answer
    most: int  # requests at a time; more are refused with 503
    is_stopping: bool = False  # True once new requests are refused with 503
    _n_open: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self.paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.count(path, message["status"])
            await send(message)

        refusal = self._refusal(Request(scope))
        self._n_open += 1
        try:
            answer = self.app if refusal is None else answer_to(refusal)
            await answer(scope, receive, counted)
        finally:
            self._n_open -= 1

    def _refusal(self, request: Request) -> RequestError | None:
        # The path as the routes read it. `request.url` is made of the Host header by starlette
        # 1.0.0, where `Host: x/y?` made "/y" of every path.
        path = request.scope["path"]
        if self.is_stopping and path != "/metrics":
            return _unavailable("is stopping and takes no more requests.", retry_after=5)
        if self._n_open >= self.most and path not in ("/health", "/metrics"):
            return _unavailable(
                "has as many open requests as it takes. Try again in a moment.", retry_after=1
            )
        host = request.headers.get("host", "").rpartition(":")
        name = (host[0] if host[2].isdigit() else "".join(host)).strip("[]").lower()
        if self.hosts is not None and name not in self.hosts:
            names = ", ".join(sorted(self.hosts))
            return RequestError(
                421, f"This server answers to {names}, and the request is for {name[:100]!r}."
            )
        if self.token is None or not path.startswith(_GUARDED):
            return None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_known = hmac.compare_digest(given.encode(), self.token.encode())
        if is_known and scheme.lower() == "bearer":
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
    """Body of a request in JSON; RequestError where it is of another type, too long or too slow."""
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


class _TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose next request's head takes too long.

    uvicorn's timer is stopped by any byte, and its limit refuses good requests when the silent are
    many; here these make room. `opened`, one for all, has the longest silent first.
    """

    def __init__(
        self,
        *arguments: Any,
        head_seconds: float,
        opened: dict[_TimedProtocol, None],
        most: int,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._head_seconds, self._opened, self._most = head_seconds, opened, most
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self._opened) >= self._most:
            for one in list(self._opened):
                if one.close_if_silent():
                    break
        self._opened[self] = None
        self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self in self._opened:  # silent from now on
            self._opened[self] = self._opened.pop(self)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._opened.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()

    def _await_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(self._head_seconds, self.close_if_silent)

    def close_if_silent(self) -> bool:
        """Close the connection, and count it no more, unless a request of it is being answered."""
        is_silent = self.cycle is None or bool(self.cycle.response_complete)
        if is_silent:
            self._opened.pop(self, None)
            self.transport.close()
        return is_silent


class Server(uvicorn.Server):
    """Serves until SIGTERM or Ctrl-C, then answers what it has accepted."""

    def __init__(self, gate: Gate, limits: Limits) -> None:
        opened: dict[_TimedProtocol, None] = {}
        most, seconds = _openable(limits.connections), limits.body_seconds
        protocol: Any = partial(_TimedProtocol, head_seconds=seconds, opened=opened, most=most)
        super().__init__(
            uvicorn.Config(
                gate,
                http=protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=round(limits.grace_seconds),
            )
        )
        self._gate = gate

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse what is new, and end when what was accepted is answered; a second Ctrl-C now."""
        self._gate.is_stopping = True
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def _openable(wanted: int) -> int:
    """Most connections that can be open, with the limit of open files raised as far as may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        soft = needed
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _OTHER_FILES))


def hosts_of(host: str, *, port: int, token: str | None, risk: str) -> tuple[str, ...] | None:
    """Names under which a server at `host` may be asked; None for any.

    ConfigError where other machines reach it without a token, which is a `risk`; for no port; or
    for an empty token.
    """
    if token is not None and not token.strip():
        raise ConfigError(
            f"{argument('token')} is empty, and no request could bring it. Give one that clients "
            "must bring, or none at all: a variable that is set to nothing is not unset."
        )
    is_local = host.lower() == "localhost"
    with suppress(ValueError):  # another name may lead anywhere
        is_local = is_local or ipaddress.ip_address(host).is_loopback
    if not is_local and not token:
        raise ConfigError(
            f"{argument(f'host={host}')} can be reached by other machines, and there is no "
            f"{argument('token')}, so anyone could {risk}. Give a {argument('token')} that "
            f"clients must bring, or leave {argument('host')} out to serve this machine alone."
        )
    if not 0 <= port <= _LAST_PORT:
        raise ConfigError(
            f"{argument('port')} is {port}; it must be between 0 (any that is free) and "
            f"{_LAST_PORT}."
        )
    return tuple(dict.fromkeys((*LOOPBACK_NAMES, host.lower()))) if is_local else None


def listening(host: str, port: int) -> socket.socket:
    """A socket that accepts connections at an address; port 0 is any that is free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as stack:
            made = stack.enter_context(socket.socket(family, kind, protocol))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(BACKLOG)
            stack.pop_all()  # it stays open
    except OSError as error:
        where = f"{argument(f'host={host}')} {argument(f'port={port}')}"
        raise ConfigError(
            f"The server cannot listen at {where}: {error.strerror or error}. Name another "
            f"{argument('port')} (0 takes any that is free), or end the program that has this one."
        ) from error
    return made


def url_of(host: str, sock: socket.socket) -> str:
    """The address to type into a browser."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{sock.getsockname()[1]}"


def page_files(folder: Path = PAGE, also: Iterable[Path] = ()) -> list[Route]:
    """The page at "/" and its files below "/page/", read once: no request can name another file."""

    def sending(path: str, file: Path) -> Route:
        content, kind = file.read_bytes(), _MEDIA_TYPES[file.suffix]

        async def send(_: Request) -> Response:
            return Response(content, media_type=kind, headers=_PAGE_HEADERS)

        return Route(path, send)

    files = [*sorted(folder.iterdir()), *also]
    routes = [sending(f"/page/{file.name}", file) for file in files]
    return [sending("/", folder / "index.html"), *routes]
