"""Evaluation of a run or a model on held-out data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toque.errors import CheckpointError, ConfigError
from toque.reporter import SILENT, Reporter
from toque.storage.atomic import atomic_write, disk_faults
from toque.storage.no_follow import refuse_links
from toque.workflows.configure import Configured, configure
from toque.workflows.results import Model, existing_folder

if TYPE_CHECKING:
    from toque.workflows.score import Evaluation


def evaluate(
    run_or_model: Model, config: Configured | None = None, *, reporter: Reporter = SILENT
) -> Evaluation:
    """Score a run or a model folder on held-out data; write evaluation.json when it is a run.

    Args:
        run_or_model: what is scored.
        config: whose data to evaluate on; a run's own when None.
        reporter: hears of progress.

    Returns:
        Its `metrics` are every score by name; as a text it is a table.

    Raises:
        ConfigError: no run folder and no configuration.
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
    settings = configure(own if config is None else config)
    with reporter.working("loading torch"):
        from toque.workflows.score import score_model

    result = score_model(folder, settings, reporter)
    if own.exists():
        with disk_faults(folder, "writing the scores", setting="run_dir", error=CheckpointError):
            atomic_write(folder / "evaluation.json", result.to_json().encode())
    return result
