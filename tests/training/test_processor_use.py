"""Threads that wait on a busy machine; what others do is told by readings made up here."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from toque.training.events import RunEnd, RunStart, StepInfo
from toque.training.observers.busy_machine import BusyMachine
from toque.training.processor_use import (
    WAIT_VARIABLES,
    ProcessorUse,
    contended,
    usable_cores,
    wait_without_spinning,
)
from toque.training.short_waits import ShortWaits
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
    return StepInfo(before, after, zero, zero, 1e-3, 10, 20, 2, 20, 0.1)


def watched(others: list[float], *, threads: int = 2, environment=None) -> tuple[list, list]:
    """What is said in a run of one second an update beside `others` busy cores, and each switch."""
    told, is_on = [], []
    at = busy = 0.0

    def read() -> ProcessorUse:
        return ProcessorUse(at, busy, 0.0)

    waits = ShortWaits(threads, cores=2)
    observer = BusyMachine(
        lambda _at, text: told.append(text),
        waits,
        read=read,
        look=lambda: others[0],
        environment=environment or {},
    )
    observer.on_fit_start(RunStart(Progress(), Duration(100, "steps")))
    for step, cores in enumerate(others, start=1):
        is_on.append(waits.is_on)
        at, busy = at + 1.0, busy + cores
        observer.on_step(info(step))
    observer.on_fit_end(RunEnd("finished", Progress(), 1.0))
    assert not waits.is_on
    return told, is_on


def test_threads_sleep_while_others_are_busy_and_spin_again_afterwards():
    told, is_on = watched([0.0] * 4 + [1.0] * 4 + [0.0] * 4 + [2.0] * 2 + [0.0])
    assert is_on == [False] * 6 + [True] * 4 + [False] * 4 + [True]
    (message,) = told  # once
    assert "other programs keep 1.0 of 2 cores busy: while they do" in message


def test_a_run_that_begins_beside_others_sleeps_from_its_first_update():
    assert watched([1.0] * 3)[1] == [True] * 3


@pytest.mark.parametrize(
    ("threads", "environment"),
    [(1, {}), (2, {"OMP_WAIT_POLICY": "passive"}), (2, {"GOMP_SPINCOUNT": "300000"})],
)
def test_nothing_is_switched_for_one_thread_or_where_somebody_has_chosen(threads, environment):
    told, is_on = watched([2.0] * 8, threads=threads, environment=environment)
    assert told == []
    assert not any(is_on)


def test_a_moment_is_no_verdict():
    assert watched([0.0] * 3 + [0.4] + [0.0] * 3) == ([], [False] * 7)


@pytest.mark.parametrize(("threads", "cores"), [(2, 2), (2, 5), (3, 8), (8, 8), (9, 8), (1, 4)])
def test_idle_teams_make_more_threads_than_cores_and_none_too_many(threads, cores):
    """Each holder comes with a team of its own, of which it is a member already."""
    n = ShortWaits(threads, cores).n_holders
    if threads == 1:
        assert n == 0
        return
    assert threads + n * (threads - 1) > cores
    assert n == 0 or threads + (n - 1) * (threads - 1) <= cores


def test_the_switch_goes_on_and_off_and_changes_no_number():
    x = torch.randn(64, 4096)
    waits, before = ShortWaits(2, 2), threading.active_count()
    spun = torch.mm(x, x.t())
    for _ in range(2):
        waits.on()
        waits.on()
        assert waits.is_on
        assert threading.active_count() == before + 1
        assert torch.equal(torch.mm(x, x.t()), spun)
        waits.off()
        waits.off()
        assert threading.active_count() == before


SETS_BEFORE_TORCH = """
import os, sys
import toque.training.processor_use as use
use.others_now = lambda: 9.0
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
