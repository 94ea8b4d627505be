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
from toque.training.short_waits import FewerCores, ShortWaits, sleeping_beside_others
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


def watched(
    others: list[float], *, threads: int = 2, idle: float = 0.0, environment=None
) -> tuple[list, list, list]:
    """What is said in a run of one second an update beside `others` busy cores, and each switch."""
    told, is_on, kept = [], [], []
    at = busy = own = 0.0

    def read() -> ProcessorUse:
        return ProcessorUse(at, busy, own)

    waits, fewer = ShortWaits(threads, cores=2), FewerCores(threads, [0, 1])
    observer = BusyMachine(
        lambda _at, text: told.append(text),
        waits,
        fewer,
        read=read,
        look=lambda: others[0],
        environment=environment or {},
    )
    observer.on_fit_start(RunStart(Progress(), Duration(100, "steps")))
    for step, cores in enumerate(others, start=1):
        is_on.append(waits.is_on)
        kept.append(fewer.kept is not None)
        at, busy, own = at + 1.0, busy + 2.0 - idle, own + 2.0 - idle - cores
        observer.on_step(info(step))
    observer.on_fit_end(RunEnd("finished", Progress(), 1.0))
    assert not waits.is_on
    assert fewer.kept is None
    return told, is_on, kept


def test_threads_sleep_while_others_are_busy_and_spin_again_afterwards():
    told, is_on, _ = watched([0.0] * 4 + [1.0] * 4 + [0.0] * 4 + [2.0] * 2 + [0.0])
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
    told, is_on, kept = watched([2.0] * 8, threads=threads, environment=environment)
    assert told == []
    assert not any(is_on + kept)


def test_threads_keep_to_fewer_cores_while_others_fill_the_rest():
    assert watched([0.5] * 4 + [1.0] * 4 + [0.5] * 3 + [0.0] * 3)[2] == (
        [False] * 6 + [True] * 6 + [False] * 2
    )


def test_cores_that_others_leave_idle_are_taken_again():
    assert watched([1.0] * 8, idle=0.5)[2] == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2


def test_cores_that_were_chosen_by_hand_stay():
    _, is_on, kept = watched([1.0] * 8, environment={"OMP_PROC_BIND": "true"})
    assert all(is_on)
    assert not any(kept)


def test_a_moment_is_no_verdict():
    assert watched([0.0] * 3 + [0.4] + [0.0] * 3) == ([], [False] * 7, [False] * 7)


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


def test_threads_sleep_beside_others_and_only_there():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for others, environment, on in (
            (99.0, {}, True), (0.0, {}, False), (99.0, {"OMP_WAIT_POLICY": "active"}, False),
        ):  # fmt: skip
            with sleeping_beside_others(environment, look=lambda n=others: n) as waits:
                assert waits.is_on is on
            assert not waits.is_on
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(CORES < 2, reason="one core leaves nothing to choose")
def test_all_threads_keep_to_fewer_cores_and_change_no_number():
    x = torch.randn(64, 4096)
    spread = torch.mm(x, x.t())
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    fewer = FewerCores(2, usable_cores())
    try:
        fewer.on()
        assert fewer.kept is not None
        assert len(fewer.kept) == 1
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id) == fewer.kept
        assert usable_cores() == tuple(fewer.cores)  # of the process, whatever it keeps to
        assert torch.equal(torch.mm(x, x.t()), spread)
        fewer.off()
        assert os.sched_getaffinity(0) == set(usable_cores())
        assert os.sched_getaffinity(other.native_id) == set(usable_cores())
    finally:
        fewer.off()
        end.set()
        other.join()


@pytest.mark.parametrize(("threads", "left"), [(1, 0), (2, 2), (4, 2), (5, 1), (8, 0), (9, 0)])
def test_others_are_left_what_two_threads_to_a_core_do_not_take(threads, left):
    assert FewerCores(threads, range(4 if threads > 2 else 3)).n_left == left


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
