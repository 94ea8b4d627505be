"""Toque trains language models that write recipes, and any other text.

From Python (docs/guides/python.md):

    from toque import configure, prepare, train, evaluate, generate

Importing this package loads next to nothing; what is named below comes when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toque.api import TrainedRun, Written, configure, evaluate, generate, prepare, train
    from toque.config import RunConfig
    from toque.cooking.recipe import Recipe

__version__ = "0.1.0"

__all__ = [
    "Recipe",
    "RunConfig",
    "TrainedRun",
    "Written",
    "__version__",
    "configure",
    "evaluate",
    "generate",
    "prepare",
    "train",
]

_HOME = {
    "Recipe": "toque.cooking.recipe",
    "RunConfig": "toque.config",
    **dict.fromkeys(
        ("TrainedRun", "Written", "configure", "evaluate", "generate", "prepare", "train"),
        "toque.api",
    ),
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'toque' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
