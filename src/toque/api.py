"""Training from Python, with what the command gives its workflow; other names are workflows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from toque.errors import ConfigError, argument
from toque.reporter import SILENT, Reporter
from toque.training.distributed.accelerate import refuse_lone_process
from toque.workflows.configure import Columns, Configured, configure, with_origins
from toque.workflows.prepare import prepare_before_torch
from toque.workflows.prepared_store import refuse_unprepared
from toque.workflows.results import Model, TrainedRun

_ONE_AT_A_TIME: Final = threading.RLock()
"""Held while this process trains: torch's random numbers and settings are the whole process's."""


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
    """Train, or continue a run; prepare its data first where that was not done.

    One thread of a process trains at a time; another waits. Torch's settings and random numbers are
    afterwards as they were.

    Args:
        config: what `configure` takes.
        data: rows to train on, as of `prepare`; the same rows find their store again.
        validation: rows to hold out, in place of data.validation.
        columns: fields that hold a part of each row, as of `prepare`.
        start: a run or checkpoint whose weights a new run begins with.
        resume: continue exactly from this older checkpoint of the run, e.g. "step-00000200"; newer
            ones are set aside, and nothing is deleted.
        callbacks: objects that watch the run, besides those of observe.callbacks.
        upload: fetch from checkpoint.upload and copy to it, if there is one.
        prepare: prepare the store where it is absent; otherwise that is an error.
        trust_code: where `config` is a run's own config.yaml, import the metrics and callbacks it
            names.
        reporter: hears of progress.

    Raises:
        ConfigError: the configuration cannot be used.
        DataError: the data cannot, or the store was prepared from other data or settings.
        CheckpointError: the run folder belongs to another run, or is in use.
        NonFiniteError: the loss is not a number.
    """
    with _ONE_AT_A_TIME:
        began = time.monotonic()
        if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
            raise ConfigError(
                f"callbacks is a {type(callbacks).__name__}, no list. Give one, such "
                "as [MyCallback()]."
            )
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
        elif any(given is not None for given in (data, validation, columns)):
            raise ConfigError(
                f"{argument('prepare=False')} leaves rows as they are, and they are trained on "
                "from a store. Leave it out."
            )
        else:
            refuse_unprepared(settings)
        from toque.training.runtime import torch_as_before
        from toque.training.stopping import CommandClock
        from toque.workflows.train import train as workflow

        with torch_as_before():
            run = workflow(
                with_origins(settings),
                start=start,
                resume=None if resume is None else str(resume),  # a Path is refused by name
                callbacks=callbacks,
                upload=upload,
                prepare=prepare,
                clock=CommandClock(began=began),
                reporter=reporter,
            )
        return replace(run, folder=run.folder.absolute())  # the program may go to another folder
