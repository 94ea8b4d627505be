"""Locks between processes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

import pytest

from toque.errors import CheckpointError
from toque.storage.locks import file_lock, is_shared, shared_lock
from toque.training.checkpoint.store import run_lock

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
        assert os.fstat(held).st_ino == lock.stat().st_ino
