"""Toque trains language models that write recipes, and any other text.

Each function does the same as the command with its name (docs/guides/python.md). Functions print
nothing. A `reporter` receives the output of the command, and `ConsoleReporter()` prints it. The
package imports fast: each name is imported at its first use, and torch by the first function that
needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from toque.hardware.thread_waits import bound_spinning
from toque.version import __version__

bound_spinning()  # torch reads this setting only once, when it is loaded

if TYPE_CHECKING:
    from toque.api import train
    from toque.cli.console import ConsoleReporter
    from toque.config import RunConfig
    from toque.cooking.recipe import Recipe
    from toque.reporter import Reporter
    from toque.workflows.ablate import ablate
    from toque.workflows.average import average
    from toque.workflows.checkpoints import checkpoints
    from toque.workflows.configure import configure
    from toque.workflows.diagnosis.check import check
    from toque.workflows.diagnosis.doctor import doctor
    from toque.workflows.diagnosis.drill import drill
    from toque.workflows.evaluate import evaluate, score
    from toque.workflows.export import export
    from toque.workflows.first_config.init import init
    from toque.workflows.inference.classify import classify
    from toque.workflows.inference.generate import generate
    from toque.workflows.inference.pairs import pairs
    from toque.workflows.inference.serve import serve, watch
    from toque.workflows.plan.plan import plan
    from toque.workflows.prepare import prepare
    from toque.workflows.report import compare, report, verify
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
    "average",
    "check",
    "checkpoints",
    "classify",
    "compare",
    "configure",
    "doctor",
    "drill",
    "evaluate",
    "export",
    "generate",
    "init",
    "pairs",
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
    "check": "toque.workflows.diagnosis.check",
    "doctor": "toque.workflows.diagnosis.doctor",
    "drill": "toque.workflows.diagnosis.drill",
    "classify": "toque.workflows.inference.classify",
    "generate": "toque.workflows.inference.generate",
    **dict.fromkeys(("compare", "verify"), "toque.workflows.report"),
    "init": "toque.workflows.first_config.init",
    "pairs": "toque.workflows.inference.pairs",
    "plan": "toque.workflows.plan.plan",
    "score": "toque.workflows.evaluate",
    "train": "toque.api",
    **dict.fromkeys(("serve", "watch"), "toque.workflows.inference.serve"),
}
"""Module of each public name. Other names are each in the workflow module of the same name.
"""


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in __all__:
        raise AttributeError(f"module 'toque' has no attribute {name!r}")
    module = importlib.import_module(_HOME.get(name, f"toque.workflows.{name}"))
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
