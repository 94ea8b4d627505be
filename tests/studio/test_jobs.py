"""The queue of runs: one process at a time, which outlives the server."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from toque.errors import ConfigError
from toque.serving.request_errors import RequestError
from toque.studio import jobs as jobs_module
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
    owner = new_jobs(state)._owner
    job = Job("1", "runs/a", ENDLESS, state="starting", owner=owner)
    (state / "jobs.json").write_bytes(msgspec.json.encode([job]))
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


def test_a_run_is_stopped_once(state, monkeypatch):
    jobs = new_jobs(state)
    jobs.add("runs/a", ENDLESS)
    signals = []
    monkeypatch.setattr(os, "kill", lambda *sent: signals.append(sent))
    jobs.stop("runs/a")
    jobs.stop("runs/a")
    assert signals == [(jobs.jobs[0].pid, signal.SIGTERM)]


def test_a_process_with_a_recycled_id_is_not_stopped(state):
    other = subprocess.Popen(["sleep", "60"])
    try:
        jobs = new_jobs(state)
        jobs._jobs = [Job("1", "runs/a", ENDLESS, state="training", pid=other.pid)]
        with pytest.raises(RequestError, match="does not train"):
            jobs.stop("runs/a")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_jobs_of_another_folder_are_not_started(state):
    """The folder may be a copy, or come from someone else."""
    job = Job("1", "runs/a", SHORT, owner="123")
    (state / "jobs.json").write_bytes(msgspec.json.encode([job]))
    jobs = new_jobs(state)
    jobs.advance()
    assert states(list(jobs.jobs)) == [("runs/a", "failed")]
    assert process_ids(state.parent) == []


def write_pipe(path: Path) -> None:
    os.mkfifo(path)


def write_deep_json(path: Path) -> None:
    path.write_text('[{"id": "1", "run": "a", "command": [], "x": ' + "[" * 100_000)


@pytest.mark.parametrize("write", [write_pipe, write_deep_json, Path.mkdir])
def test_a_damaged_queue_is_reported(state, write):
    write(state / "jobs.json")
    with pytest.raises(ConfigError, match="Move it away"):
        new_jobs(state)


def test_a_run_that_an_earlier_server_stopped_is_not_a_failure(state):
    jobs = new_jobs(state)
    jobs._jobs = [Job("1", "runs/a", SHORT, state="training", is_stopping=True)]
    (state / "logs" / "runs%a.log").write_text("toque: Stopped by a signal.\n")
    jobs.advance()
    assert jobs.jobs == []


def test_a_job_that_cannot_be_written_is_refused(state, monkeypatch):
    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    jobs = new_jobs(state)
    monkeypatch.setattr(jobs_module, "atomic_write", write)
    with pytest.raises(RequestError, match="No space left on device"):
        jobs.add("runs/a", SHORT)
    assert jobs.jobs == []
