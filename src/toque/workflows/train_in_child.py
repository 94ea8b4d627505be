"""Training as the work of a child process: output in a log, errors as exit codes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from toque.config import Resolved
from toque.errors import Interrupted, ToqueError
from toque.reporter import LogReporter
from toque.workflows.train import train


def train_in_child(config: Resolved, log: Path, *, callbacks: Sequence[object] = ()) -> int:
    """The exit code that the command would have; what it would print is appended to `log`."""
    reporter = LogReporter(log)
    try:
        run = train(config, callbacks=callbacks, reporter=reporter)
    except ToqueError as error:
        reporter.notice(f"toque: {error}")
        return error.exit_code
    return Interrupted.exit_code if run.interrupted else 0
