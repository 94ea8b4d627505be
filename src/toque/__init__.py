"""Toque trains language models that write recipes, and any other text.

From Python (docs/guides/python.md):

    from toque import configure, prepare, train, evaluate, generate

Importing this package loads next to nothing; what is named below comes when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from toque.version import __version__

if TYPE_CHECKING:
    from toque.api import (
        ablate,
        check,
        classify,
        compare,
        configure,
        doctor,
        drill,
        evaluate,
        export,
        generate,
        init,
        plan,
        prepare,
        report,
        score,
        serve,
        train,
        verify,
        watch,
    )
    from toque.cli.console import ConsoleReporter
    from toque.config import RunConfig
    from toque.cooking.recipe import Recipe
    from toque.reporter import Reporter
    from toque.workflows.results import Answer, TrainedRun, Written

__all__ = [
    "Answer",
    "ConsoleReporter",
    "Recipe",
    "Reporter",
    "RunConfig",
    "TrainedRun",
    "Written",
    "__version__",
    "ablate",
    "check",
    "classify",
    "compare",
    "configure",
    "doctor",
    "drill",
    "evaluate",
    "export",
    "generate",
    "init",
    "plan",
    "prepare",
    "report",
    "score",
    "serve",
    "train",
    "verify",
    "watch",
]

_HOME = {
    "ConsoleReporter": "toque.cli.console",
    "Recipe": "toque.cooking.recipe",
    "Reporter": "toque.reporter",
    "RunConfig": "toque.config",
    **dict.fromkeys(("Answer", "TrainedRun", "Written"), "toque.workflows.results"),
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'toque' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME.get(name, "toque.api")), name)


def __dir__() -> list[str]:
    return __all__
