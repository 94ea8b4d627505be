"""`toque check`: one loss and one gradient, however an update is computed."""

from __future__ import annotations

from collections.abc import Callable

from toque.config import RunConfig
from toque.errors import CheckFailed, ConfigError
from toque.workflows.assembly.data import open_store
from toque.workflows.check.equivalence import check


def run_check(config: RunConfig, *, examples: int, say: Callable[[str], None]) -> None:
    """Compare, and print the table.

    Raises:
        CheckFailed: some way of computing gives another loss or gradient.
        ConfigError: fewer than two examples.
    """
    if examples < 2:
        raise ConfigError("--examples must be at least 2: rows are packed from several.")
    found = check(config, open_store(config), examples=examples)
    say(found.table())
    if not found.passed:
        wrong = ", ".join(f'"{o.name}"' for o in found.outcomes if o.verdict == "DIFFERENT")
        raise CheckFailed(
            f"The update computed as {wrong} is not the one that transformers computes, beyond "
            "what rounding explains. Do not trust training with it: avoid that way (train.pack, "
            "train.compile, train.precision), and report this table with your versions."
        )
