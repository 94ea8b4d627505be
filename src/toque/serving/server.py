"""Server: uvicorn around the application, with time limits for heads and an end that waits."""

from __future__ import annotations

import asyncio
import resource
import signal
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from toque.serving.addresses import BACKLOG
from toque.serving.gate import Gate, Limits

_OTHER_FILES = 128
"""Descriptors beside the connections: weights, libraries, the log, connections that are closing."""


class _TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose next request's head takes too long.

    uvicorn's own timer runs between requests only, and any byte stops it. Its own limit refuses
    good requests when the silent are many; here they make room.

    Args:
        head_seconds: From the connection, or the last answer, to the whole head.
        opened: The open connections, the oldest first; one dictionary for all.
        most: That may be open.
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
            silent = next((one for one in self._opened if one.is_silent), None)
            if silent is not None:
                silent.close()
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
        self._head_timer = self.loop.call_later(self._head_seconds, self._close_unless_asked)

    def _close_unless_asked(self) -> None:
        if self.is_silent:
            self.close()

    @property
    def is_silent(self) -> bool:
        """Whether no request of it is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def close(self) -> None:
        """Close the connection, and count it no more."""
        self._opened.pop(self, None)
        self.transport.close()


class Server(uvicorn.Server):
    """Serves until SIGTERM or Ctrl-C, then answers what it has accepted.

    Args:
        gate: The application.
        limits: Its times and its most connections.
    """

    def __init__(self, gate: Gate, limits: Limits) -> None:
        opened: dict[_TimedProtocol, None] = {}
        protocol: Any = partial(
            _TimedProtocol,
            head_seconds=limits.body_seconds,
            opened=opened,
            most=_openable(limits.connections),
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
        """Refuse what is new, and end when what was accepted is answered; a second Ctrl-C now.

        uvicorn's own would raise the signal again in the end, and leave its exit code behind.
        """
        self._gate.is_stopping = True
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def _openable(wanted: int) -> int:
    """How many connections can be open, after the limit of open files is raised as far as may be.

    Beyond it nobody would be accepted, so that the silent would have no one to make room for.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        soft = needed
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _OTHER_FILES))
