"""Toque from Python: `from toque import configure, prepare, train, evaluate, generate`.

The functions do what the commands of the same names do, with the same settings, files and errors
(`toque.errors.ToqueError`). They print nothing; a `reporter` hears what a command would print, and
`toque.ConsoleReporter()` prints it. Torch is loaded by the first function that needs it, not by
importing this.
"""

from toque.api.checks import check, drill, report, verify
from toque.api.models import classify, export, generate
from toque.api.runs import ablate, evaluate, prepare, train
from toque.workflows.configure import configure

__all__ = [
    "ablate",
    "check",
    "classify",
    "configure",
    "drill",
    "evaluate",
    "export",
    "generate",
    "prepare",
    "report",
    "train",
    "verify",
]
