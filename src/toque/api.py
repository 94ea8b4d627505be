"""The function `toque.train`: training from Python. Other public functions are workflows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from toque.errors import ConfigError, argument
from toque.reporter import SILENT, Reporter
from toque.training.distributed.accelerate import refuse_lone_process
from toque.workflows.configure import Columns, Configured, configure, with_origins
from toque.workflows.prepare import prepare_before_torch
from toque.workflows.prepared_store import refuse_unprepared
from toque.workflows.results import Model, TrainedRun

_ONE_AT_A_TIME = threading.RLock()
"""Lock for training, because torch's random state and settings belong to the process."""


def train(
    config: Configured,
    *,
    data: object = None,
    validation: object = None,
    columns: Columns | None = None,
    start: Model | None = None,
    resume: str | None = None,
    callbacks: Sequence[object] = (),
    upload: bool = True,
    prepare: bool = True,
    trust_code: bool = False,
    reporter: Reporter = SILENT,
) -> TrainedRun:
    """Train a model, or continue a run. Prepare its data first, if necessary.

    Only one thread of a process trains at a time. Torch's settings and random numbers are restored
    at the end.

    Args:
        config: A configuration, as for `configure`.
        data: Rows to train on, as for `prepare`. The same rows find their store again.
        validation: Rows to hold out, instead of data.validation.
        columns: Fields of each row, as for `prepare`.
        start: A run or checkpoint with the first weights of a new run.
        resume: An older checkpoint of the run to continue from, e.g. "step-00000200". Newer
            checkpoints are set aside. Nothing is deleted.
        callbacks: Callbacks in addition to the classes in observe.callbacks.
        upload: Download from checkpoint.upload and copy to it, if it is set.
        prepare: Prepare the store if it is missing. Otherwise a missing store is an error.
        trust_code: Import the metrics and callbacks of a run's own config.yaml.
        reporter: Receives messages and progress.

    Raises:
        ConfigError: The configuration is invalid.
        DataError: The data is invalid, or the store was prepared from other data or settings.
        CheckpointError: The run folder belongs to another run, or is in use.
        NonFiniteError: The loss is not a number.
    """
    with _ONE_AT_A_TIME:
        began = time.monotonic()
        _check_callbacks(callbacks)
        settings = configure(config)
        refuse_lone_process(settings.train.strategy)
        if trust_code:
            settings = settings.with_foreign_code({})
        if prepare:
            settings = prepare_before_torch(
                settings,
                start=start,
                data=data,
                validation=validation,
                columns=columns,
                reporter=reporter,
            )
        else:
            _refuse_rows(data, validation, columns)
            refuse_unprepared(settings)
        from toque.training.runtime import restoring_torch
        from toque.training.stopping import CommandClock
        from toque.workflows.train import train as workflow

        # A Path is not a name, so the run refuses it with a message about the name.
        step_name = None if resume is None else str(resume)
        with restoring_torch():
            run = workflow(
                with_origins(settings),
                start=start,
                resume=step_name,
                callbacks=callbacks,
                upload=upload,
                prepare=prepare,
                clock=CommandClock(began=began),
                reporter=reporter,
            )
        # The program may change its working directory afterwards.
        return replace(run, folder=run.folder.absolute())


def _refuse_rows(*arguments: object) -> None:
    """Raise a ConfigError if rows were passed to a call that does not prepare a store."""
    if any(rows is not None for rows in arguments):
        raise ConfigError(
            f"{argument('prepare=False')} does not store rows, but training reads rows from a "
            f"store. Leave {argument('prepare')} out."
        )


def _check_callbacks(callbacks: object) -> None:
    """Raise a ConfigError if the callbacks are not a list, e.g. a single callback."""
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        raise ConfigError(
            f"callbacks must be a list, not a {type(callbacks).__name__}, e.g. [MyCallback()]."
        )
