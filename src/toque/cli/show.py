"""`toque show`: the settings of a run, what its checkpoints take, how its rate goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from toque.config import RunConfig, load_config, resolved_yaml
from toque.errors import ConfigError, DataError


def run_show(config: str, overrides: Sequence[str], *, draw: bool) -> Iterator[str]:
    """The resolved configuration as YAML; what is said besides is in comments.

    Args:
        config: a YAML file, a preset, or a run's folder.
        overrides: settings to change.
        draw: draw the learning rate instead.

    Raises:
        ConfigError: no such configuration; or the rate cannot be placed without prepared data.
    """
    own = Path(config) / "config.yaml"
    resolved = load_config(str(own) if own.exists() else config, list(overrides))
    if draw:
        yield _drawn(resolved.config)
        return
    yield resolved_yaml(resolved).rstrip("\n")
    run = Path(resolved.config.run_dir)
    # Before data is prepared nobody knows the vocabulary; `show` then answers without torch.
    if any((run / "checkpoints").glob("step-*")) or _is_prepared(resolved.config):
        try:
            from toque.workflows.forecast import space_of

            yield f"# {space_of(resolved.config).in_words()}"
        except (ConfigError, DataError) as error:
            yield f"# What a checkpoint takes is not known yet: {error}"


def _is_prepared(config: RunConfig) -> bool:
    return (Path(config.data.store) / "manifest.json").exists()


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
