"""Reading what is new in a file that grows, is torn, replaced, or is no file."""

import os

from toque.runs.places import FolderPlace
from toque.runs.run_record import _LONGEST_LINE, Tail


def test_lines_are_given_once_and_whole(tmp_path):
    file, tail = tmp_path / "a", Tail(FolderPlace(tmp_path), "a")
    assert tail.lines() == []
    file.write_bytes(b'one\ntwo\n{"half')
    assert tail.lines() == ["one", "two"]
    assert tail.lines() == []
    with file.open("ab") as more:
        more.write(b'": 1}\nthree\n')
    assert tail.lines() == ['{"half": 1}', "three"]
    assert not tail.restarted


def test_a_torn_line_does_not_cost_the_next_one(tmp_path):
    file, tail = tmp_path / "a", Tail(FolderPlace(tmp_path), "a")
    file.write_bytes(b"one\n{torn")
    assert tail.lines() == ["one"]
    with file.open("ab") as more:
        more.write(b"\ntwo\n")  # as JsonLines begins after a kill
    assert tail.lines() == ["{torn", "two"]


def test_only_what_is_new_is_read(tmp_path):
    class Counting:
        folder = tmp_path
        address = ""
        read_bytes = 0

        def look(self, name):
            return inner.look(name)

        def read(self, name, start, end):
            self.read_bytes += end - start
            return inner.read(name, start, end)

    inner, place = FolderPlace(tmp_path), Counting()
    tail, size = Tail(place, "a"), 0
    for i in range(50):
        with (tmp_path / "a").open("ab") as file:
            size += file.write(b"x" * i + b"\n")
        tail.lines()
        tail.lines()
    assert place.read_bytes == size


def test_a_replaced_or_cut_file_begins_anew(tmp_path):
    file, tail = tmp_path / "a", Tail(FolderPlace(tmp_path), "a")
    file.write_bytes(b"one\ntwo\n")
    tail.lines()
    file.write_bytes(b"new\n")
    assert tail.lines() == ["new"]
    assert tail.restarted
    other = tmp_path / "b"
    other.write_bytes(b"other file, longer\n")
    other.replace(file)
    assert tail.lines() == ["other file, longer"]
    assert tail.restarted
    assert tail.lines() == []
    assert not tail.restarted


def test_a_line_without_an_end_is_passed_over(tmp_path):
    file, tail = tmp_path / "a", Tail(FolderPlace(tmp_path), "a")
    file.write_bytes(b"one\n" + b"x" * (_LONGEST_LINE + 1))
    assert tail.lines() == ["one"]
    with file.open("ab") as more:
        more.write(b"still the same\ntwo\n")
    assert tail.lines() == ["two"]


def test_links_and_pipes_are_no_files(tmp_path):
    (tmp_path / "secret").write_text("secret\n")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    place = FolderPlace(tmp_path)
    assert Tail(place, "link").lines() == []
    assert Tail(place, "pipe").lines() == []
