"""A run as its files tell it while they grow: what is new, its state, its texts."""

import os
import subprocess
import sys
import time

import pytest

from toque.runs.places import FolderPlace
from toque.runs.run_record import _MAX_LINE_BYTES, RunRecord, Tail
from toque.runs.run_state import state_of
from watching.written_run import WrittenRun


@pytest.fixture
def written(tmp_path):
    return WrittenRun(tmp_path / "run")


def watched(written) -> RunRecord:
    run = RunRecord(FolderPlace(written.folder))
    run.refresh()
    return run


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_version_rises_with_what_is_new_alone(written):
    written.step(1)
    run = watched(written)
    before = run.version
    run.refresh()
    assert run.version == before
    written.step(2)
    run.refresh()
    assert run.history.progress.step == 2
    assert run.version > before
    before = run.version
    (written.folder / "evaluation.json").write_text('{"heldout": {"loss": 1.5}}')
    run.refresh()
    assert run.evaluation() == {"heldout": {"loss": 1.5}}
    assert run.version > before


def test_torn_and_strange_lines_cost_themselves_alone(written):
    written.step(1)
    written.raw('{"event": "step", "step": 2, "lo')
    run = watched(written)
    assert run.history.progress.step == 1
    written.raw("\n")
    written.raw('[1]\n{"event": "warning", "message": {"a": 1}}\n')
    written.step(3, loss=float("nan"))
    run.refresh()
    assert run.trouble == ""
    assert run.history.progress.step == 3
    assert run.history.curves["loss"].last == (3.0, None)


def test_a_folder_that_is_half_there(tmp_path):
    folder = tmp_path / "new"
    (folder / "checkpoints").mkdir(parents=True)
    run = RunRecord(FolderPlace(folder))
    run.refresh()
    assert state_of(run).kind == "waiting"
    WrittenRun(folder).lock(os.getpid())
    run.refresh()
    assert state_of(run).sentence == "Running, at step 0."


def test_a_killed_run_is_told_from_one_that_runs(written):
    written.step(1)
    written.save(1)
    written.step(2)
    written.lock(os.getppid())
    run = watched(written)
    assert state_of(run).kind == "running"
    written.lock(ended_process())
    run.refresh()
    state = state_of(run)
    assert state.kind == "killed"
    assert (
        "has ended without a record. The last metrics are of step 2" in state.sentence
    )
    assert "continues from step 1" in state.sentence
    written.step(3)  # so it lives, and where it does its process id is another
    time.sleep(0.01)
    run.refresh()
    assert state_of(run).kind == "running"


def test_an_id_that_another_process_has_by_now_is_gone(written):
    written.step(1)
    written.lock(os.getppid())
    long_ago = time.time() - 10**7
    os.utime(written.folder / "checkpoints" / ".lock", (long_ago, long_ago))
    assert state_of(watched(written)).kind == "killed"


def test_a_lease_that_is_not_renewed_any_more(written):
    written.step(1)
    written.lock(os.getppid())
    now = [0.0]
    lease = written.folder / "checkpoints" / ".lock.lease"
    lease.touch()
    run = RunRecord(FolderPlace(written.folder), clock=lambda: now[0])
    run.refresh()
    now[0] = 44.0
    run.refresh()
    assert run.holder.state == "alive"
    os.utime(lease, (1, 1))  # renewed
    run.refresh()
    now[0] = 88.0
    run.refresh()
    assert run.holder.state == "alive"
    now[0] = 90.0
    run.refresh()
    assert run.holder.state == "gone"


def test_without_a_lock_age_decides(written):
    written.step(1)
    run = watched(written)
    assert state_of(run, now=time.time() + 1).kind == "running"
    assert state_of(run, now=time.time() + 3600).kind == "silent"


def test_an_end_that_a_callback_asked_for_is_scored_too(written):
    written.step(10)
    written.end(10, reason="Callback")
    written.lock(os.getppid())
    assert state_of(watched(written)).kind == "scoring"
    written.end(10, reason="interrupted")
    assert state_of(watched(written)).kind == "waiting"


def test_how_it_ended(written):
    written.step(10)
    written.end(10)
    written.lock(os.getppid())
    run = watched(written)
    assert state_of(run).sentence == (
        "Finished, at step 10. Its best model is being scored and written."
    )
    (written.folder / "end.json").write_text("{}")
    run.refresh()
    assert state_of(run).sentence == "Finished, at step 10."
    written.start(10)
    run.refresh()
    assert state_of(run).kind == "running"


def test_texts_are_gathered_by_prompt_and_few_enough(written):
    for step in range(100):
        written.text(step, "soup", f"text {step}")
    run = watched(written)
    steps = [sample["step"] for sample in run.texts["soup"]]
    assert steps[-1] == 99
    assert len(steps) <= 32
    assert steps[0] < 20


def test_the_newest_text_stays_when_every_second_text_is_dropped(written):
    for step in range(33):
        written.text(step, "soup", f"text {step}")
    assert watched(written).texts["soup"][-1]["step"] == 32


def test_lines_are_given_once_and_whole(tmp_path):
    file, tail = tmp_path / "a", Tail(FolderPlace(tmp_path), "a")
    assert tail.read_lines() == []
    file.write_bytes(b'one\ntwo\n{"half')
    assert tail.read_lines() == ["one", "two"]
    assert tail.read_lines() == []
    with file.open("ab") as more:
        more.write(b'": 1}\nthree\n{torn')
    assert tail.read_lines() == ['{"half": 1}', "three"]
    with file.open("ab") as more:
        more.write(b"\ntwo\n")  # as JsonLines begins after a kill
    assert tail.read_lines() == ["{torn", "two"]
    assert not tail.restarted


def test_only_what_is_new_is_read(tmp_path, monkeypatch):
    asked, read, size = [], FolderPlace.read, 0

    def counted(self, name, start, end):
        asked.append(end - start)
        return read(self, name, start, end)

    monkeypatch.setattr(FolderPlace, "read", counted)
    tail = Tail(FolderPlace(tmp_path), "a")
    for i in range(50):
        with (tmp_path / "a").open("ab") as file:
            size += file.write(b"x" * i + b"\n")
        tail.read_lines()
        tail.read_lines()
    assert sum(asked) == size


def test_a_replaced_or_cut_file_begins_anew(tmp_path):
    file, tail = tmp_path / "a", Tail(FolderPlace(tmp_path), "a")
    file.write_bytes(b"one\ntwo\n")
    tail.read_lines()
    file.write_bytes(b"new\n")
    assert tail.read_lines() == ["new"]
    assert tail.restarted
    other = tmp_path / "b"
    other.write_bytes(b"other file, longer\n")
    other.replace(file)
    assert tail.read_lines() == ["other file, longer"]
    assert tail.restarted
    assert tail.read_lines() == []
    assert not tail.restarted


def test_a_line_without_an_end_is_passed_over(tmp_path):
    file, tail = tmp_path / "a", Tail(FolderPlace(tmp_path), "a")
    file.write_bytes(b"one\n" + b"x" * (_MAX_LINE_BYTES + 1))
    assert tail.read_lines() == ["one"]
    with file.open("ab") as more:
        more.write(b"still the same\ntwo\n")
    assert tail.read_lines() == ["two"]


def test_links_and_pipes_are_no_files(tmp_path):
    (tmp_path / "secret").write_text("secret\n")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    place = FolderPlace(tmp_path)
    assert Tail(place, "link").read_lines() == []
    assert Tail(place, "pipe").read_lines() == []
