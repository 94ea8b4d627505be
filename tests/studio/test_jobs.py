"""The queue of runs: one process at a time, which outlives the server."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from toque.serving.request_errors import RequestError
from toque.studio.jobs import Job, Jobs

ENDLESS = ["watch", "runs", "--port", "0"]
"""A command that runs until a signal."""
SHORT = ["presets"]
SECONDS = 60.0


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "runs").mkdir()
    folder = tmp_path / "state"
    folder.mkdir()
    yield folder
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if process.info["cwd"] == str(tmp_path):
            process.kill()


def new_jobs(state: Path) -> Jobs:
    """The queue of a server that has just started."""
    return Jobs(state.parent, state)


def until(jobs: Jobs, is_reached: Callable[[list[Job]], bool]) -> list[Job]:
    """Advance the queue until its jobs are in a state."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        jobs.advance()
        current = list(jobs.jobs)
        if is_reached(current):
            return current
        time.sleep(0.05)
    raise AssertionError(f"the queue did not change: {jobs.jobs}")


def states(jobs: list[Job]) -> list[tuple[str, str]]:
    return [(job.run, job.state) for job in jobs]


def process_ids(folder: Path) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cwd", "cmdline"])
        if process.info["cwd"] == str(folder)
        and "toque" in (process.info["cmdline"] or [])
    ]


def test_a_finished_command_leaves_the_queue(state):
    jobs = new_jobs(state)
    jobs.add("runs/a", SHORT)
    assert states(list(jobs.jobs)) == [("runs/a", "training")]
    until(jobs, lambda current: not current)
    assert "cookbook" in jobs.log("runs/a") or jobs.log("runs/a")


def test_an_error_stays_with_its_message_until_it_is_dismissed(state):
    jobs = new_jobs(state)
    job = jobs.add("runs/a", ["show", "missing.yaml"])
    [failed] = until(jobs, lambda current: current[0].state == "failed")
    assert "missing.yaml" in failed.message
    assert not failed.message.startswith("toque:")
    jobs.remove(job.id)
    assert jobs.jobs == []


def test_runs_train_one_after_another(state):
    jobs = new_jobs(state)
    jobs.add("runs/a", ENDLESS)
    waiting = jobs.add("runs/b", SHORT)
    jobs.add("runs/c", SHORT)
    jobs.advance()
    expected = [("runs/a", "training"), ("runs/b", "waiting"), ("runs/c", "waiting")]
    assert states(list(jobs.jobs)) == expected
    with pytest.raises(RequestError, match="already in the queue"):
        jobs.add("runs/b", SHORT)
    with pytest.raises(RequestError, match="Stop it first"):
        jobs.remove(jobs.jobs[0].id)
    jobs.remove(waiting.id)
    jobs.stop("runs/a")
    until(jobs, lambda current: not current)


def test_a_killed_server_loses_and_doubles_nothing(state):
    """Another object reads the files as a server that starts after a SIGKILL."""
    first = new_jobs(state)
    first.add("runs/a", ENDLESS)
    first.add("runs/b", ENDLESS)
    [pid] = process_ids(state.parent)
    second = new_jobs(state)
    for _ in range(3):
        second.advance()
    assert states(list(second.jobs)) == [("runs/a", "training"), ("runs/b", "waiting")]
    assert process_ids(state.parent) == [pid]

    os.kill(pid, signal.SIGKILL)
    first._process.wait()  # the entry of a killed server's child is removed by init
    until(second, lambda current: states(current) == [("runs/b", "training")])
    third = new_jobs(state)
    third.stop("runs/b")
    until(third, lambda current: not current)


def test_a_server_killed_before_the_process_began_starts_it_once(state):
    job = Job("1", "runs/a", ENDLESS, state="starting")
    (state / "jobs.json").write_text(json.dumps([
        {"id": job.id, "run": job.run, "command": job.command, "state": job.state}
    ]))  # fmt: skip
    jobs = new_jobs(state)
    for _ in range(3):
        jobs.advance()
    assert states(list(jobs.jobs)) == [("runs/a", "training")]
    assert len(process_ids(state.parent)) == 1
    jobs.stop("runs/a")
    until(jobs, lambda current: not current)


def test_a_killed_process_is_reported(state):
    jobs = new_jobs(state)
    jobs.add("runs/a", ENDLESS)
    os.kill(jobs.jobs[0].pid, signal.SIGKILL)
    [failed] = until(jobs, lambda current: current[0].state == "failed")
    assert failed.message.startswith("The process was killed (SIGKILL).")
    with pytest.raises(RequestError, match="does not train"):
        jobs.stop("runs/a")
    jobs.add("runs/a", SHORT)  # replaces the failed job
    until(jobs, lambda current: not current)


def test_a_process_with_a_recycled_id_is_not_stopped(state):
    other = subprocess.Popen(["sleep", "60"])
    try:
        jobs = new_jobs(state)
        jobs._jobs = [
            Job("1", "runs/a", ENDLESS, state="training", pid=other.pid, began=1.0)
        ]
        with pytest.raises(RequestError, match="does not train"):
            jobs.stop("runs/a")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
