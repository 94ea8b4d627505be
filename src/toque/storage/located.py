"""A file on this machine and the name users know it by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Located:
    """A file to read, and its name in reports and errors."""

    name: str
    """Its path, or the remote address it was fetched from."""
    path: Path
    sha256: str | None = None
    """Checksum of its bytes, if it was already computed."""
    coming: Coming | None = field(default=None, compare=False, repr=False)
    """Of a file that is still being fetched; None when it is here."""


@dataclass(frozen=True)
class Coming:
    """A file on its way to this machine."""

    bytes: int
    """That it will have."""
    wait: Callable[[], str]
    """Returns its SHA-256 once it is whole; raises what kept it from coming."""
