"""HTTP server for an application: its address, its connections, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import signal
import socket
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from toque.errors import ConfigError, argument
from toque.serving.gate import Gate, Limits

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
BACKLOG: Final = 2048
"""Maximum number of connections that the system queues until the server accepts them."""
_MAX_PORT: Final = 65_535
_OTHER_FILES: Final = 128
"""Number of open files in addition to the connections: weights, libraries, the log."""


class _TimedProtocol(H11Protocol):
    """HTTP/1.1 connection that closes if the head of a request does not arrive in time.

    In uvicorn, any byte stops this timer. If idle clients use up the connections, uvicorn's
    connection limit refuses new requests. Here, a new connection closes an idle one instead.

    Args:
        head_seconds: Maximum time to receive the head of a request.
        open_connections: All open connections of the server, as an ordered set. The connection that
            has been idle for the longest time is first.
        max_connections: Maximum number of open connections.
    """

    def __init__(
        self,
        *arguments: Any,
        head_seconds: float,
        open_connections: dict[_TimedProtocol, None],
        max_connections: int,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._head_seconds = head_seconds
        self._open_connections = open_connections
        self._max_connections = max_connections
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self._open_connections) >= self._max_connections:
            for connection in list(self._open_connections):
                if connection.close_if_idle():
                    break
        self._open_connections[self] = None
        self._start_head_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self in self._open_connections:  # move to the end
            self._open_connections[self] = self._open_connections.pop(self)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._open_connections.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()

    def _start_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(self._head_seconds, self.close_if_idle)

    def close_if_idle(self) -> bool:
        """Close the connection if none of its requests waits for a response."""
        is_idle = self.cycle is None or bool(self.cycle.response_complete)
        if is_idle:
            self._open_connections.pop(self, None)
            self.transport.close()
        return is_idle


class Server(uvicorn.Server):
    """Server that runs until SIGTERM or Ctrl-C, and finishes accepted requests before it exits."""

    def __init__(self, gate: Gate, limits: Limits) -> None:
        open_connections: dict[_TimedProtocol, None] = {}
        protocol: Any = partial(
            _TimedProtocol,
            head_seconds=limits.body_seconds,
            open_connections=open_connections,
            max_connections=_raise_file_limit(limits.connections),
        )
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
        """Refuse new requests, and finish accepted ones. A second Ctrl-C exits immediately."""
        self._gate.is_stopping = True
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def _raise_file_limit(connections: int) -> int:
    """Raise the limit on open files if some connections would exceed it.

    Returns:
        The number of connections that the limit allows, at most `connections`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft == resource.RLIM_INFINITY:
        return connections
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        soft = needed
    return max(1, min(connections, soft - _OTHER_FILES))


def allowed_hosts(
    host: str, *, port: int, token: str | None, risk: str
) -> tuple[str, ...] | None:
    """Check a server's address and token, and return the allowed names in the Host header.

    None allows any name.

    Args:
        host: The address to listen on.
        port: The port to listen on.
        token: Token that requests must send, or None.
        risk: Risk without a token, as a verb phrase for the error message: "use the models".

    Raises:
        ConfigError: Other machines can reach the server without a token, the token is empty, or
            the port is impossible.
    """
    if token is not None and not token.strip():
        raise ConfigError(
            f"{argument('token')} is empty. Choose a token that clients must send, or leave it out "
            "(unset the variable TOQUE_TOKEN)."
        )
    is_local = _is_loopback(host)
    if not is_local and not token:
        raise ConfigError(
            f"{argument(f'host={host}')} can be reached by other machines, so without a "
            f"{argument('token')} anyone could {risk}. Add a {argument('token')} that clients must "
            f"send, or leave {argument('host')} out to serve only this machine."
        )
    if not 0 <= port <= _MAX_PORT:
        raise ConfigError(
            f"{argument('port')} must be between 0 (any free port) and {_MAX_PORT}, not {port}."
        )
    if not is_local:
        return None
    return tuple(dict.fromkeys((*LOOPBACK_NAMES, host.lower())))


def _is_loopback(host: str) -> bool:
    """Check whether only this machine can reach a host."""
    if host.lower() == "localhost":
        return True
    with suppress(ValueError):  # another name, which may resolve to any address
        return ipaddress.ip_address(host).is_loopback
    return False


def open_socket(host: str, port: int) -> socket.socket:
    """Open a socket that listens at an address. Port 0 chooses a free port.

    Raises:
        ConfigError: The address is not available.
    """
    try:
        addresses = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = addresses[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        flags = f"{argument(f'host={host}')} {argument(f'port={port}')}"
        raise ConfigError(
            f"Cannot listen on {flags}: {error.strerror or error}. Choose another "
            f"{argument('port')} (0 for any free port), or stop the program that uses this one."
        ) from error
    return sock


def url_of(host: str, sock: socket.socket) -> str:
    """Return the URL of a server that listens on a socket."""
    shown_host = f"[{host}]" if ":" in host else host
    return f"http://{shown_host}:{sock.getsockname()[1]}"
