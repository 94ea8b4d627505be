"""Address that a server listens on: this machine's alone or not, free or taken."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

from toque.errors import ConfigError, argument

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
_LAST_PORT: Final = 65_535
"""getaddrinfo takes a larger one for another port."""


def hosts_of(host: str, *, port: int, token: str | None, risk: str) -> tuple[str, ...] | None:
    """Names under which a server at `host` may be asked; None for any.

    Args:
        host: address to listen on.
        port: to listen on.
        token: that requests must bring; None for none.
        risk: what others could do without one, after "so anyone could".

    Raises:
        ConfigError: other machines reach the address and there is no token, or no such port.
    """
    is_local = is_loopback(host)
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
    return LOOPBACK_NAMES if is_local else None


def is_loopback(host: str) -> bool:
    """Whether an address leads to this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # another name, which may lead anywhere


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        ConfigError: the address is not this machine's, taken, or not allowed.
    """
    from toque.serving.server import listening

    where = f"{argument(f'host={host}')} {argument(f'port={port}')}"
    try:
        return listening(host, port)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"The server cannot listen at {where}: {reason}. Name another {argument('port')} (0 "
            "takes any that is free), or end the program that has this one."
        ) from error


def url_of(host: str, sock: socket.socket) -> str:
    """The address to type into a browser."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{sock.getsockname()[1]}"
