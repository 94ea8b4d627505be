import hashlib

import pytest

from toque.storage.atomic import (
    atomic_file,
    atomic_folder,
    atomic_write,
    no_hook,
    sha256_of,
    sweep,
)


def write_folder(target, content, after=no_hook):
    with atomic_folder(target, after=after) as writer:
        for name, text in content.items():
            writer.put(name, text)


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_all_files_are_durable_before_the_folder_gets_its_name(tmp_path):
    stages = []
    with atomic_folder(tmp_path / "deep" / "step", after=stages.append) as writer:
        entry = writer.write("a", lambda path: path.write_bytes(b"345"))
        (writer.folder / "sub").mkdir()
        (writer.folder / "sub" / "b").write_bytes(b"2")  # by somebody else
    assert stages == [
        *("mkdir", "write a", "fsync a", "fsync b"),
        *("fsync folder", "rename", "fsync parent"),
    ]
    assert (entry.file, entry.bytes) == ("a", 3)
    assert entry.sha256 == hashlib.sha256(b"345").hexdigest()
    assert sha256_of(tmp_path / "deep" / "step" / "a") == entry.sha256
    assert (tmp_path / "deep" / "step" / "sub" / "b").read_bytes() == b"2"


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a.json"
    atomic_write(path, b"old")

    def broken():
        with atomic_file(path) as file:
            file.write(b"ne")
            assert [
                p.name for p in tmp_path.iterdir() if not p.name.startswith(".")
            ] == ["a.json"]
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        broken()
    assert content_of(tmp_path) == {"a.json": b"old"}
    atomic_write(path, b"new")
    assert content_of(tmp_path) == {"a.json": b"new"}


def failing_at(stage):
    def after(reached):
        if reached == stage:
            raise OSError(28, "No space left on device")

    return after


@pytest.mark.parametrize(
    "stage", ["mkdir", "write a", "fsync a", "fsync folder", "set aside"]
)
def test_a_failure_leaves_the_old_folder_and_nothing_else(tmp_path, stage):
    write_folder(tmp_path / "step", {"a": b"old"})
    with pytest.raises(OSError, match="No space"):
        write_folder(tmp_path / "step", {"a": b"new"}, after=failing_at(stage))
    sweep(tmp_path)
    assert content_of(tmp_path / "step") == {"a": b"old"}
    assert [p.name for p in tmp_path.iterdir()] == ["step"]


def test_sweeping_removes_leftovers_and_puts_back_what_was_set_aside(tmp_path):
    write_folder(tmp_path / "temp-step-1-77", {"a": b"half"})
    write_folder(tmp_path / "aside-step-2", {"a": b"old"})
    write_folder(tmp_path / "step-3", {"a": b"new"})
    write_folder(tmp_path / "aside-step-3", {"a": b"old"})
    assert sweep(tmp_path) == ["temp-step-1-77", "aside-step-3"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-3"]
    assert content_of(tmp_path / "step-3") == {"a": b"new"}
