"""Server: uvicorn around the application, with time limits for heads and an end that waits."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from toque.serving.gate import Gate
from toque.serving.limits import Limits

_log = logging.getLogger("toque.serving")
_BACKLOG = 2048


class _TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose next request's head takes too long.

    uvicorn's own timer runs between requests only, and any byte stops it.
    """

    def __init__(self, *arguments: Any, head_seconds: float, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_seconds = head_seconds
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._head_timer is not None:
            self._head_timer.cancel()

    def _await_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(self._head_seconds, self._close_unless_asked)

    def _close_unless_asked(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class Server(uvicorn.Server):
    """Serves until SIGTERM or Ctrl-C, then answers what it has accepted.

    Args:
        gate: The application.
        limits: Its times and its most connections.
    """

    def __init__(self, gate: Gate, limits: Limits) -> None:
        protocol: Any = partial(_TimedProtocol, head_seconds=limits.body_seconds)
        super().__init__(
            uvicorn.Config(
                gate,
                http=protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=limits.connections,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=round(limits.grace_seconds),
            )
        )
        self._gate = gate

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse what is new, and end when what was accepted is answered; a second Ctrl-C now.

        uvicorn's own would raise the signal again in the end, and leave its exit code behind.
        """
        self._gate.is_stopping = True
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def listening(host: str, port: int) -> socket.socket:
    """A socket that accepts connections at an address; port 0 is any that is free.

    Raises:
        OSError: the address is not this machine's, taken, or not allowed.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made
