"""Settings of a run as they are resolved, what its checkpoints take, how its rate goes."""

from __future__ import annotations

from pathlib import Path

from toque.config import Resolved, RunConfig, resolved_yaml
from toque.errors import ConfigError, DataError


def show(config: Resolved, *, plot: bool = False) -> str:
    """The resolved configuration as YAML, the origin of each value and the space in comments.

    Args:
        config: the configuration and the origin of its values.
        plot: draw the learning rate instead.

    Raises:
        ConfigError: the rate cannot be placed without prepared data.
    """
    if plot:
        return _drawn(config.config)
    text = resolved_yaml(config).rstrip("\n")
    run = Path(config.config.run_dir)
    # Before data is prepared nobody knows the vocabulary; `show` then answers without torch.
    prepared = (Path(config.config.data.store) / "manifest.json").exists()
    if not prepared and not any((run / "checkpoints").glob("step-*")):
        return text
    try:
        from toque.workflows.forecast import space_of

        return f"{text}\n# {space_of(config.config).in_words()}"
    except (ConfigError, DataError) as error:
        return f"{text}\n# What a checkpoint takes is not known yet: {error}"


def _drawn(config: RunConfig) -> str:
    from toque.reports.terminal_plot import WIDTH, plot
    from toque.workflows.forecast import course_of

    course = course_of(config, WIDTH)
    return plot(
        course.rates,
        title=f"learning rate ({config.optim.schedule})",
        unit=course.unit,
        length=course.length,
        marks=course.stages,
    )
