"""Check: one update of the user's model and data, computed in every way and compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toque.errors import ConfigError, argument
from toque.workflows.configure import Configured, configure

if TYPE_CHECKING:
    from toque.workflows.diagnosis.update_ways import UpdateCheck


def check(config: Configured, *, examples: int = 16) -> UpdateCheck:
    """Compute one update in every way and compare each with transformers' own.

    Args:
        config: what `configure` takes; its store must be prepared.
        examples: examples in the update, from the shortest to the longest of the store.

    Returns:
        `passed` tells whether all agree; as a text it is a table.

    Raises:
        ConfigError: fewer than two examples, or a configuration that cannot be used.
        DataError: no prepared store.
    """
    if examples < 2:
        raise ConfigError(
            f"{argument('examples')} must be at least 2: rows are packed from several."
        )
    settings = configure(config)
    from toque.training.runtime import torch_as_before  # with torch
    from toque.workflows.diagnosis.update_ways import compare_ways

    with torch_as_before():
        return compare_ways(settings, examples)
