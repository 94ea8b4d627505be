"""Limits of a server: what one client, and all together, may ask of the machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds memory and time, whatever is sent."""

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
    connections: int = 512
    """Open connections; one more is answered with 503."""
    grace_seconds: float = 30.0
    """After SIGTERM, time for the requests that were accepted to end."""
