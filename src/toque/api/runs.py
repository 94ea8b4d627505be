"""Runs from Python: prepare, train, evaluate, ablate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toque.config import resolved_yaml
from toque.errors import ConfigError
from toque.reporter import SILENT, Reporter
from toque.storage.atomic import atomic_write
from toque.workflows.configure import Configured, configure, with_origins
from toque.workflows.results import Model, TrainedRun, folder_of

if TYPE_CHECKING:
    from toque.data.prepare.pipeline import PrepareResult
    from toque.workflows.ablate.run import Ablation
    from toque.workflows.evaluate import Evaluation


def prepare(
    config: Configured, *, replace: bool = False, reporter: Reporter = SILENT
) -> PrepareResult:
    """Turn raw data into the configuration's token store, or reuse it.

    Args:
        config: what `configure` takes.
        replace: delete a store made from other data or settings instead of refusing.
        reporter: hears of progress.

    Returns:
        The open store, the data report, and whether the store was there already.

    Raises:
        ConfigError: the configuration cannot be used.
        DataError: sources that cannot be read, or a store of other data.
    """
    from toque.workflows.prepare import prepare as workflow

    return workflow(configure(config), replace=replace, reporter=reporter)


def train(
    config: Configured,
    *,
    start: Model | None = None,
    callbacks: Sequence[object] = (),
    upload: bool = True,
    reporter: Reporter = SILENT,
) -> TrainedRun:
    """Train, or continue a run that was interrupted; prepare first where that was not done.

    Args:
        config: what `configure` takes.
        start: a run or checkpoint whose weights a new run begins with.
        callbacks: objects that watch the run, besides those of observe.callbacks.
        upload: fetch from checkpoint.upload and copy to it, if there is one.
        reporter: hears of progress.

    Raises:
        ConfigError: the configuration cannot be used.
        DataError: the data cannot.
        CheckpointError: the run folder belongs to another run, or is in use.
        NonFiniteError: the loss is not a number.
    """
    settings = configure(config)
    if settings.data.sources:
        prepare(settings, reporter=reporter)
    from toque.workflows.train import train as workflow

    return workflow(
        with_origins(settings),
        start=None if start is None else folder_of(start),
        callbacks=callbacks,
        upload=upload,
        reporter=reporter,
    )


def evaluate(
    run_or_model: Model, config: Configured | None = None, *, reporter: Reporter = SILENT
) -> Evaluation:
    """Score a run or a model folder on held-out data.

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
    folder = folder_of(run_or_model)
    if config is None and not (folder / "config.yaml").exists():
        raise ConfigError(
            f"{folder} is not a run folder, so it does not say what to evaluate on. Give a "
            "configuration: evaluate(model, config)."
        )
    from toque.workflows.evaluate import evaluate as workflow

    settings = configure(folder / "config.yaml" if config is None else config)
    return workflow(folder, settings, reporter=reporter)


def ablate(
    config: Configured,
    *,
    seeds: int = 5,
    steps: int | None = None,
    budget: str | None = None,
    out: str | Path = "runs/ablation",
    reporter: Reporter = SILENT,
) -> Ablation:
    """Measure what each improvement is worth on your data: on and off, over several seeds.

    Args:
        config: what `configure` takes.
        seeds: runs of each combination.
        steps: updates of each run; the configuration's length when None.
        budget: time for all runs together instead, e.g. "90 minutes".
        out: folder of the runs and the results; runs that are done there are not done again.
        reporter: hears of each run.

    Raises:
        ConfigError: a configuration or a number that cannot be used.
        Interrupted: a run was stopped by a signal; the same call goes on.
    """
    from toque.workflows.ablate.run import ablate as workflow

    folder = Path(out)
    if not isinstance(config, str | Path):
        folder.mkdir(parents=True, exist_ok=True)
        text = resolved_yaml(with_origins(configure(config)))
        config = folder / "ablation.yaml"
        atomic_write(config, text.encode())
    return workflow(
        str(config), out=folder, seeds=seeds, steps=steps, budget=budget, reporter=reporter
    )
