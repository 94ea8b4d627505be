"""Locks between processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from toque.errors import CheckpointError
from toque.storage.lease import STALE, Lease
from toque.storage.locks import file_lock, is_shared, shared_lock
from toque.training.checkpoint.store import CheckpointStore, run_lock

HOLD = """
import sys
import time
from pathlib import Path
from toque.training.checkpoint.store import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
    time.sleep(0.3)
    (Path(sys.argv[1]) / "done").touch()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `tmp_path` until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_and_a_dead_one_is_forgotten(holder, tmp_path):
    try:
        message = rf"in use by another training process \(id {holder.pid}\)"
        with pytest.raises(CheckpointError, match=message), run_lock(tmp_path):
            pass
    finally:
        holder.kill()
        holder.wait()
    with run_lock(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match="cannot be written"),
        run_lock(tmp_path / "file" / "x"),
    ):
        pass


def test_who_does_not_refuse_waits_until_the_lock_is_free(holder, tmp_path):
    seen = []

    def wait(holder_id):
        seen.append((holder_id, holder.poll()))
        holder.stdin.close()  # it ends by itself

    with file_lock(tmp_path / ".lock", wait):
        assert (tmp_path / "done").exists()
        assert (tmp_path / ".lock").read_text() == str(os.getpid())
    assert seen == [(str(holder.pid), None)]


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
        with pytest.raises(BlockingIOError, match=str(os.getpid())), shared_lock(lock, refuse):
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
    with file_lock(lock, removed) as held:
        assert os.fstat(held.descriptor).st_ino == lock.stat().st_ino


@pytest.fixture
def no_flock(monkeypatch, tmp_path):
    """A file system without flock, here and in the processes that `holder` starts."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_FLOCK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), *sys.path]))
    exec(NO_FLOCK, {})  # noqa: S102
    monkeypatch.setattr("toque.storage.lease._SETTLE", 0.01)
    monkeypatch.setattr("toque.storage.lease.HEARTBEAT", 0.1)
    yield tmp_path / "run"
    fcntl.flock = FLOCK


FLOCK = fcntl.flock
NO_FLOCK = """
import errno, fcntl, os

def refuse(descriptor, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

fcntl.flock = refuse
"""
HOLD_LEASE = "import toque.storage.lease as lease\nlease.HEARTBEAT = 0.1\n" + HOLD


@contextlib.contextmanager
def holding(folder):
    """A process that holds the lock of `folder`."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_LEASE, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


def test_fault_66_without_flock_a_second_process_is_refused_and_a_dead_one_is_forgotten(no_flock):
    with holding(no_flock) as first:
        message = rf"in use by another training process \(id {first.pid}\)"
        with pytest.raises(CheckpointError, match=message), run_lock(no_flock):
            pass
        first.kill()
        first.wait()
        began = time.monotonic()
        with run_lock(no_flock) as lock:
            assert time.monotonic() - began < STALE  # not watched: it ran here
            assert "has no file locks (No locks available)" in lock.note
            assert "renewed every" in lock.note
            with pytest.raises(CheckpointError, match="in use by another"), run_lock(no_flock):
                pass
    assert sorted(p.name for p in no_flock.iterdir()) == [".lock"]


def test_fault_66_who_does_not_refuse_waits_for_the_lease(no_flock):
    with holding(no_flock) as first:
        seen = []

        def wait(holder_id):
            seen.append(holder_id)
            first.stdin.close()  # it ends by itself

        with file_lock(no_flock / ".lock", wait):
            assert (no_flock / "done").exists()
        assert seen == [str(first.pid)]


def elsewhere(lease, **changes):
    """A lease of a process that cannot be asked whether it lives."""
    record = {"id": "x", "machine": "another", "pid": 1, "beat": 0, **changes}
    lease.write_text(json.dumps(record))


def test_fault_66_a_lease_of_another_machine_is_watched_until_it_is_stale(no_flock):
    no_flock.mkdir()
    path = no_flock / ".lock.lease"
    elsewhere(path)
    lease = Lease(path, heartbeat=0.05, stale=0.3, settle=0.01)
    began = time.monotonic()
    lease.take(pytest.fail)
    assert time.monotonic() - began > 0.3
    assert lease.is_mine()
    elsewhere(path, id="y")  # it took this one over while it was stopped
    assert lease.lost.wait(10)
    assert not lease.is_mine()
    lease.release()
    assert json.loads(path.read_text())["id"] == "y"


def test_fault_66_of_two_that_take_a_stale_lease_over_one_gets_it(no_flock):
    no_flock.mkdir()
    path = no_flock / ".lock.lease"
    elsewhere(path)
    leases = [Lease(path, heartbeat=0.05, stale=0.3, settle=0.2) for _ in range(6)]
    refused = []

    class BusyError(Exception):
        pass

    def busy(_holder):
        raise BusyError

    def take(lease):
        try:
            lease.take(busy)
        except BusyError:
            refused.append(lease)

    threads = [threading.Thread(target=take, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == len(leases) - 1
    assert [lease.is_mine() for lease in leases if lease not in refused] == [True]
    for lease in leases:
        lease.release()
    assert not path.exists()


def test_fault_66_a_run_that_was_taken_over_saves_nothing_more(no_flock):
    store = CheckpointStore(no_flock / "checkpoints")
    with store.claimed():
        assert len(store.notes) == 1
        store.save(1, {}, {"progress": {"step": 1}})
        elsewhere(store.folder / ".lock.lease")
        with pytest.raises(CheckpointError, match="Another process has taken"):
            store.save(2, {}, {"progress": {"step": 2}})
    assert sorted(p.name for p in store.folder.glob("step-*")) == ["step-00000001"]
