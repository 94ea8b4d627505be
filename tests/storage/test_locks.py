"""Locks between processes."""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from toque.errors import CheckpointError
from toque.storage import locks
from toque.storage.locks import file_lock, is_shared, shared_lock
from toque.training.checkpoint.store import CheckpointStore, run_lock

HOLD = """
import sys
import time
from pathlib import Path
import toque.storage.locks as locks
locks.HEARTBEAT, folder = 0.1, Path(sys.argv[1])
with locks.file_lock(folder / ".lock", print):
    print("held", flush=True)
    sys.stdin.read()
    time.sleep(0.3)
    (folder / "done").touch()
"""
FLOCK = fcntl.flock
NO_FLOCK = """
import errno, fcntl, os

def refuse(descriptor, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

fcntl.flock = refuse
"""


@contextlib.contextmanager
def holding(folder):
    """A process that holds the lock of `folder` until its input ends."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)} | os.environ
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def no_flock(monkeypatch, tmp_path):
    """A folder of a file system without flock, here and in the processes that `holding` starts."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_FLOCK)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), *sys.path])
    )
    exec(NO_FLOCK, {})  # noqa: S102
    monkeypatch.setattr(locks, "HEARTBEAT", 0.1)
    yield tmp_path / "run"
    fcntl.flock = FLOCK


@pytest.fixture(params=["flock", "lease"])
def run(request, tmp_path):
    """A folder whose lock is held by one means or the other."""
    if request.param == "lease":
        return request.getfixturevalue("no_flock")
    return tmp_path / "run"


def test_faults_36_and_66_a_second_process_is_refused_and_a_dead_one_is_forgotten(run):
    with holding(run) as first:
        message = rf"in use by another training process \(id {first.pid} on .+ since 20.+ UTC\)"
        with pytest.raises(CheckpointError, match=message), run_lock(run):
            pass
        first.kill()
        first.wait()
        began = time.monotonic()
        with run_lock(run) as lock:
            assert time.monotonic() - began < locks.STALE  # not watched: it ran here
            if lock.lease is not None:
                assert "has no file locks (No locks available)" in lock.note
                assert "renewed every" in lock.note
            with (
                pytest.raises(CheckpointError, match="in use by another"),
                run_lock(run),
            ):
                pass
    assert sorted(p.name for p in run.iterdir()) == [".lock"]


def test_faults_36_and_66_who_does_not_refuse_waits_until_the_lock_is_free(run):
    with holding(run) as first:
        seen = []

        def wait(holder_id):
            seen.append((holder_id, first.poll()))
            first.stdin.close()  # it ends by itself

        with file_lock(run / ".lock", wait):
            assert (run / "done").exists()
            text = (run / ".lock").read_text()
            assert text.startswith(f"{os.getpid()} on {socket.gethostname()}")
        assert [(said.split()[0], code) for said, code in seen] == [
            (str(first.pid), None)
        ]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match="Cannot write"),
        run_lock(tmp_path / "file" / "x"),
    ):
        pass


def refuse(holder: str) -> None:
    raise BlockingIOError(holder)


def test_readers_share_a_lock_and_keep_a_writer_away(tmp_path):
    lock = tmp_path / ".lock"
    with shared_lock(lock, refuse), shared_lock(lock, refuse):
        assert is_shared(lock)
        with pytest.raises(BlockingIOError), file_lock(lock, refuse):
            pass
    with file_lock(lock, refuse):
        assert not is_shared(lock)
        with (
            pytest.raises(BlockingIOError, match=str(os.getpid())),
            shared_lock(lock, refuse),
        ):
            pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_reader_of_a_folder_of_somebody_else_goes_without(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o500)
    with shared_lock(tmp_path / "theirs" / ".lock", refuse):
        assert not list((tmp_path / "theirs").iterdir())


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path):
    """Who waited for it must not hold a file that nobody else will find."""
    lock = tmp_path / ".lock"
    descriptors = []

    def removed(_holder: str) -> None:
        lock.unlink()
        os.close(descriptors.pop())  # the holder lets go

    descriptors.append(os.open(lock, os.O_RDWR | os.O_CREAT))
    fcntl.flock(descriptors[0], fcntl.LOCK_EX)
    with (
        file_lock(lock, removed),
        pytest.raises(BlockingIOError),
        file_lock(lock, refuse),
    ):
        pass


def elsewhere(path):
    """A lease of a process of another machine, which cannot be asked whether it lives."""
    path.unlink(missing_ok=True)
    path.write_text(
        f"filelock/2\npid=1\nhost=another\nmode=lease\ntoken=x\nduration={float(locks.STALE)!r}\n"
    )


def test_fault_66_a_lease_of_another_machine_is_watched_until_it_is_stale(
    no_flock, monkeypatch
):
    monkeypatch.setattr(locks, "STALE", 0.5)
    no_flock.mkdir()
    elsewhere(no_flock / ".lock.lease")
    began = time.monotonic()
    with run_lock(no_flock) as lock:
        assert time.monotonic() - began > 0.5
        assert lock.is_mine()
        elsewhere(
            no_flock / ".lock.lease"
        )  # it took this one over while it was stopped
        assert not lock.is_mine()
    assert "host=another" in (no_flock / ".lock.lease").read_text()


def test_fault_66_a_lease_of_another_machine_that_is_renewed_is_refused(no_flock):
    no_flock.mkdir()
    path = no_flock / ".lock.lease"
    elsewhere(path)
    renewing = threading.Timer(0.5, lambda: os.utime(path))
    renewing.start()
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="in use by another"), run_lock(no_flock):
        pass
    assert time.monotonic() - began < locks.STALE
    renewing.join()


def test_fault_66_of_two_that_take_a_stale_lease_over_one_gets_it(
    no_flock, monkeypatch
):
    monkeypatch.setattr(locks, "STALE", 0.5)
    no_flock.mkdir()
    elsewhere(no_flock / ".lock.lease")
    got, refused, done = [], [], threading.Event()

    def take():
        try:
            with file_lock(no_flock / ".lock", refuse) as lock:
                got.append(lock.is_mine())
                done.wait(30)
        except BlockingIOError:
            refused.append(1)

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    while len(refused) < len(threads) - 1:
        time.sleep(0.01)
    done.set()
    for thread in threads:
        thread.join()
    assert got == [True]
    assert not (no_flock / ".lock.lease").exists()


def test_fault_66_a_run_that_was_taken_over_saves_nothing_more(no_flock):
    store = CheckpointStore(no_flock / "checkpoints")
    with run_lock(store.folder):
        assert len(store.notes) == 1
        store.save(1, {}, {"progress": {"step": 1}})
        elsewhere(store.folder / ".lock.lease")
        with pytest.raises(CheckpointError, match="Another process has taken"):
            store.save(2, {}, {"progress": {"step": 2}})
    assert sorted(p.name for p in store.folder.glob("step-*")) == ["step-00000001"]
