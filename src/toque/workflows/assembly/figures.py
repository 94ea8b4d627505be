"""Figures of the machine and the gradients, assembled: who takes them while a run trains."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from toque.hardware.processor import WAIT_VARIABLES
from toque.reporter import Reporter
from toque.training.callbacks import Callback
from toque.training.observers.gpu_readings import gpus_here, no_gpus
from toque.training.observers.gradients import Gradients
from toque.training.observers.phase_memory import CudaAllocator, PhaseMemory
from toque.training.observers.profiler import Profiler, ProfileSchedule
from toque.training.observers.system_sampler import Record, SystemSampler
from toque.training.runtime import Runtime
from toque.units import Progress
from toque.workflows.assembly.setup import Setup


def build_figures(
    setup: Setup,
    record: Record,
    warn: Callable[[Progress, str], None],
    reporter: Reporter,
    optimizer: Callable[[], torch.optim.Optimizer],
) -> list[Callback]:
    """What `observe.system`, `observe.gradients` and `observe.profile` ask for.

    They stand before the log in the order of observers: their last figures still go into it.

    Args:
        setup: of the run.
        record: writes an event of metrics.jsonl.
        warn: takes a sentence about what could not be observed.
        reporter: hears of each trace.
        optimizer: returns the loop's.
    """
    observe, runtime = setup.config.observe, setup.runtime
    on_gpu = runtime.device.type == "cuda"
    found: list[Callback] = []
    if (asked := observe.profile) is not None:
        plan = ProfileSchedule(asked.wait, asked.warmup, asked.active, asked.repeat)
        found.append(
            Profiler(
                plan,
                Path(setup.config.run_dir),
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
    return found + build_gradients(setup, record, optimizer)


def build_gradients(
    setup: Setup, record: Record, optimizer: Callable[[], torch.optim.Optimizer]
) -> list[Gradients]:
    """The one that tells of gradients by layer; where ranks hold parts, all of them have it."""
    every, sharded = setup.config.observe.gradients, setup.sharded
    if every is None:
        return []
    total = tuple if sharded is None else sharded.sum_of_parts
    phases, model = setup.runtime.phases, setup.model
    return [Gradients(record, int(every.amount), model, optimizer, phases, total)]


def phase_memory(runtime: Runtime) -> list[PhaseMemory]:
    """The one that tells peak memory by phase; none where the device is no GPU."""
    if runtime.device.type != "cuda":
        return []
    allocator = CudaAllocator(runtime.device)
    return [PhaseMemory(runtime.phases, allocator.begin, allocator.peak)]
