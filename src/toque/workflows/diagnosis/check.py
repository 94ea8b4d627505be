"""Check of one update: every way to compute it must agree with transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toque.errors import ConfigError, argument
from toque.workflows.configure import Configured, configure

if TYPE_CHECKING:
    from toque.workflows.diagnosis.update_ways import UpdateCheck


def check(config: Configured, *, examples: int = 16) -> UpdateCheck:
    """Compute one update in every way, and compare each with transformers.

    Args:
        config: A configuration with a prepared store, as for `configure`.
        examples: Number of examples in the update, spread evenly over the store's lengths.

    Returns:
        The comparison. `passed` is true if all ways agree, and its text is a table.

    Raises:
        ConfigError: There are fewer than two examples, or the configuration is not valid.
        DataError: The store does not exist.
    """
    if examples < 2:
        raise ConfigError(
            f"{argument('examples')} must be at least 2, because a packed row needs several "
            "examples."
        )
    settings = configure(config)
    from toque.training.runtime import torch_as_before  # loads torch
    from toque.workflows.diagnosis.update_ways import compare_ways

    with torch_as_before():
        return compare_ways(settings, examples)
