"""Threads that wait on a busy machine; what others do is told by readings made up here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from toque.training.events import RunStart, StepInfo
from toque.training.observers.busy_machine import BusyMachine
from toque.training.processor_use import (
    WAIT_VARIABLES,
    ProcessorUse,
    contended,
    usable_cores,
    wait_without_spinning,
)
from toque.units import Duration, Progress

CORES = len(usable_cores())
THREADS = {"OMP_NUM_THREADS": str(max(2, CORES))}


def test_readings_grow_with_work():
    before = ProcessorUse.now()
    total = 0
    while ProcessorUse.now().own - before.own < 0.1:
        total += sum(range(1000))
    after = ProcessorUse.now()
    assert after.at > before.at
    assert after.busy >= before.busy
    assert after.others_since(before) >= 0.0


@pytest.mark.parametrize(
    ("environment", "others", "is_set"),
    [
        (THREADS, 1.0, True),
        (THREADS, 0.0, False),
        ({"OMP_NUM_THREADS": "1"}, 4.0, False),
        (THREADS | {"OMP_WAIT_POLICY": "ACTIVE"}, 4.0, False),
        (THREADS | {"GOMP_SPINCOUNT": "9"}, 4.0, False),
    ],
)
def test_threads_sleep_where_others_are_busy_and_nobody_has_chosen(environment, others, is_set):
    held = dict(environment)
    found = wait_without_spinning(held, look=lambda: others)
    assert (found is not None) is is_set
    assert held == environment | ({"OMP_WAIT_POLICY": "PASSIVE"} if is_set else {})


def test_spare_cores_are_no_contention():
    assert not contended(threads=2, others=1.5, cores=4)
    assert contended(threads=4, others=0.5, cores=4)
    assert not contended(threads=1, others=9.0, cores=2)


def info(step: int) -> StepInfo:
    before, after = Progress(step=step - 1), Progress(step=step)
    zero = torch.zeros(())
    return StepInfo(before, after, zero, zero, 1e-3, 10, 20, 2, 20, 0.1, 0.0)


def watched(others: list[float], *, threads: int = 8 * CORES, environment=None) -> list[str]:
    """The warnings of a run that takes four seconds an update, beside `others` busy cores."""
    told: list[str] = []
    at = busy = 0.0

    def read() -> ProcessorUse:
        return ProcessorUse(at, busy, 0.0)

    observer = BusyMachine(
        lambda _at, text: told.append(text), threads, read=read, environment=environment or {}
    )
    observer.on_fit_start(RunStart(Progress(), Duration(100, "steps")))
    for step, cores in enumerate(others, start=1):
        at, busy = at + 4.0, busy + 4.0 * cores
        observer.on_step(info(step))
    return told


def test_a_run_beside_a_busy_program_is_told_what_to_type_once():
    (message,) = watched([0.0] * 6 + [1.0] * 12, threads=CORES if CORES > 1 else 2)
    assert f"other programs keep 1.0 of {CORES} cores busy" in message
    assert "`OMP_WAIT_POLICY=PASSIVE toque train ...`" in message


def test_no_warning_where_there_is_nothing_to_do():
    assert watched([1.0] * 12, threads=1) == []
    assert watched([1.0] * 2) == []  # a moment is no verdict
    assert watched([1.0] * 12, environment={"OMP_WAIT_POLICY": "passive"}) == []


SETS_BEFORE_TORCH = """
import os, sys
import toque.training.processor_use as use
use._others_now = lambda: 9.0
from toque.cli.launch import suit_waiting_to_machine
said = []
suit_waiting_to_machine(said.append)
assert "torch" not in sys.modules
print(os.environ.get("OMP_WAIT_POLICY"), *said)
"""


def test_the_command_line_chooses_before_torch_is_loaded():
    environment = {k: v for k, v in os.environ.items() if k not in WAIT_VARIABLES} | {
        "PYTHONPATH": os.pathsep.join(sys.path), **THREADS
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SETS_BEFORE_TORCH],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PASSIVE other programs keep 9.0 of")
