"""What a figure was measured with, for every benchmark's JSON."""

from __future__ import annotations

import platform
from importlib.metadata import version


def versions(*packages: str) -> dict[str, str]:
    """Python's version and those of installed packages."""
    return {"python": platform.python_version()} | {name: version(name) for name in packages}
