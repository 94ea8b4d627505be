"""Locks between processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from toque.errors import CheckpointError
from toque.storage.locks import file_lock
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
