"""Address that a server listens on: this machine's alone or not, free or taken."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

from toque.errors import ConfigError, argument

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
BACKLOG: Final = 2048
"""Connections that the system holds for the server until it accepts them."""
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
    is_local = _is_loopback(host)
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


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # another name, which may lead anywhere


def listening(host: str, port: int) -> socket.socket:
    """A socket that accepts connections at an address; port 0 is any that is free.

    Raises:
        ConfigError: the address is not this machine's, taken, or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(BACKLOG)
        except OSError:
            made.close()
            raise
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
