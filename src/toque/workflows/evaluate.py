"""Evaluation of a run or a model on held-out data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toque.config import load_config
from toque.errors import CheckpointError, ConfigError
from toque.reporter import SILENT, Reporter
from toque.storage.no_follow import refuse_links
from toque.workflows.configure import Configured, configure
from toque.workflows.results import Model, existing_folder

if TYPE_CHECKING:
    from toque.workflows.score import Evaluation


def evaluate(
    run_or_model: Model,
    config: Configured | None = None,
    *,
    trust_code: bool = False,
    reporter: Reporter = SILENT,
) -> Evaluation:
    """Score a run or a model folder on held-out data; write evaluation.json when it is a run.

    Args:
        run_or_model: what is scored.
        config: whose data to evaluate on; a run's own when None.
        trust_code: import the metrics that the run's own configuration names, as its maker wished.
        reporter: hears of progress.

    Returns:
        Its `metrics` are every score by name; as a text it is a table.

    Raises:
        ConfigError: no run folder and no configuration, or code that nobody vouches for.
        DataError: no prepared store, or one of another tokenizer.
    """
    folder = existing_folder(run_or_model)
    own = folder / "config.yaml"
    if own.exists():
        refuse_links(folder, CheckpointError)
    if config is None and not own.exists():
        raise ConfigError(
            f"{folder} is not a run folder, so it does not say what to evaluate on. Give a "
            "configuration: evaluate(model, config)."
        )
    settings = configure(load_config(own, trust_code=False).config if config is None else config)
    if trust_code:
        settings = settings.with_foreign_code({})
    with reporter.working("loading torch"):
        from toque.workflows.score import score_model

    result = score_model(folder, settings, reporter)
    if own.exists():
        result.write(folder)
    return result
