"""A file on this machine and the name users know it by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Located:
    """A file to read, and its name in reports and errors."""

    name: str
    """The path, or the remote address it was fetched from."""
    path: Path
    sha256: str | None = None
    """Checksum of its bytes, if it was already computed."""
