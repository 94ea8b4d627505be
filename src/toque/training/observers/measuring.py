"""Measuring observers of a run: profiler, system sampler, gradients, memory by phase."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from toque.config.schema import ObserveConfig
from toque.hardware.processor import WAIT_VARIABLES
from toque.reporter import Reporter
from toque.training.callbacks import Callback
from toque.training.distributed.sharing import Sharing
from toque.training.observers.gpu_readings import gpus_here, no_gpus
from toque.training.observers.gradients import Gradients
from toque.training.observers.profiler import Profiler, ProfileSchedule
from toque.training.observers.system_sampler import Record, SystemSampler
from toque.training.runtime import Runtime
from toque.units import Progress


def measuring_observers(
    observe: ObserveConfig,
    run: Path,
    runtime: Runtime,
    record: Record,
    warn: Callable[[Progress, str], None],
    reporter: Reporter,
) -> list[Callback]:
    """The observers that `observe.system` and `observe.profile` ask for.

    They stand before the log in the order of observers: their last records still go into it.

    Args:
        observe: names them.
        run: folder of the run.
        runtime: its device and phases.
        record: writes an event of metrics.jsonl.
        warn: takes a sentence about what could not be observed.
        reporter: hears of each trace.
    """
    on_gpu = runtime.device.type == "cuda"
    found: list[Callback] = []
    if (asked := observe.profile) is not None:
        plan = ProfileSchedule(asked.wait, asked.warmup, asked.active, asked.repeat)
        found.append(
            Profiler(
                plan,
                run,
                runtime.phases,
                warn,
                reporter.notice,
                on_gpu=on_gpu,
                stacks=asked.stacks,
                memory=asked.memory,
            )
        )
    if observe.system is not None:
        seconds = observe.system.seconds or 0.0
        gpus = gpus_here if on_gpu else no_gpus
        passive = any(name in os.environ for name in WAIT_VARIABLES)
        spinning = 0 if on_gpu or passive else torch.get_num_threads()
        found.append(SystemSampler(record, seconds, warn, gpus, spinning=spinning))
    return found


def gradients_observer(
    observe: ObserveConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    runtime: Runtime,
    sharing: Sharing,
    record: Record | None,
) -> list[Gradients]:
    """The observer of gradients by layer, if one is asked for.

    Where ranks hold parts of the weights, all of them have it; a rank without a record measures its
    part for the others.
    """
    every = observe.gradients
    if every is None:
        return []
    total = sharing.sum_of_parts if sharing.is_sharded else tuple
    return [
        Gradients(record or _unrecorded, int(every.amount), model, optimizer, runtime.phases, total)
    ]


def _unrecorded(event: str, **fields: object) -> None:
    """Take what the first rank records."""
