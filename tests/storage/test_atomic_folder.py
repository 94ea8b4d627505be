from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from toque.errors import CheckpointError
from toque.storage.atomic import sha256_of
from toque.storage.atomic_folder import locked, no_hook, remove_folder, sweep, whole_folder


def write_folder(target, content, after=no_hook):
    with whole_folder(target, after=after) as writer:
        return [writer.write(name, [text]) for name, text in content.items()]


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_are_durable_before_the_folder_gets_its_name(tmp_path):
    stages = []
    entries = write_folder(tmp_path / "step", {"a": b"12", "b": b"345"}, after=stages.append)
    assert stages == [
        "mkdir",
        *("open a", "write a", "fsync a"),
        *("open b", "write b", "fsync b"),
        *("fsync folder", "rename", "fsync parent"),
    ]
    assert [(e.file, e.bytes) for e in entries] == [("a", 2), ("b", 3)]
    assert entries[1].sha256 == hashlib.sha256(b"345").hexdigest()
    assert sha256_of(tmp_path / "step" / "b") == entries[1].sha256


def test_large_buffers_are_written_whole(tmp_path):
    data = os.urandom(1 << 20) * 33
    (entry,) = write_folder(tmp_path / "step", {"a": memoryview(data)})
    assert entry.bytes == len(data)
    assert entry.sha256 == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "step" / "a").read_bytes() == data


def failing_at(stage):
    def after(reached):
        if reached == stage:
            raise OSError(28, "No space left on device")

    return after


@pytest.mark.parametrize(
    "stage", ["mkdir", "open a", "write a", "fsync a", "fsync folder", "set aside"]
)
def test_a_failure_leaves_the_old_folder_and_nothing_else(tmp_path, stage):
    write_folder(tmp_path / "step", {"a": b"old"})
    with pytest.raises(OSError, match="No space"):
        write_folder(tmp_path / "step", {"a": b"new"}, after=failing_at(stage))
    sweep(tmp_path)
    assert content_of(tmp_path / "step") == {"a": b"old"}
    assert [p.name for p in tmp_path.iterdir()] == ["step"]


def test_a_folder_of_the_same_name_is_replaced(tmp_path):
    write_folder(tmp_path / "step", {"a": b"old", "b": b"old"})
    write_folder(tmp_path / "step", {"a": b"new"})
    assert content_of(tmp_path / "step") == {"a": b"new"}
    assert [p.name for p in tmp_path.iterdir()] == ["step"]


def test_sweeping_removes_leftovers_and_puts_back_what_was_set_aside(tmp_path):
    write_folder(tmp_path / "temp-step-1-77", {"a": b"half"})
    write_folder(tmp_path / "aside-step-2", {"a": b"old"})
    write_folder(tmp_path / "step-3", {"a": b"new"})
    write_folder(tmp_path / "aside-step-3", {"a": b"old"})
    assert sweep(tmp_path) == ["temp-step-1-77", "aside-step-3"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-3"]
    assert content_of(tmp_path / "step-3") == {"a": b"new"}


def test_removing_takes_the_name_away_first(tmp_path):
    write_folder(tmp_path / "step", {"a": b"1"})
    seen = []
    remove_folder(tmp_path / "step", after=lambda _s: seen.append((tmp_path / "step").exists()))
    assert seen == [False, False]
    assert list(tmp_path.iterdir()) == []


HOLD = """
import sys
from pathlib import Path
from toque.storage.atomic_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_and_a_dead_one_is_forgotten(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        message = rf"in use by another training process \(id {holder.pid}\)"
        with pytest.raises(CheckpointError, match=message), locked(tmp_path):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"), locked(tmp_path / "file" / "x"):
        pass
