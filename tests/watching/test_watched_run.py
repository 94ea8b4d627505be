"""What is told of a run: its figures, its state, and what a continued session undoes."""

import os
import subprocess
import sys
import time

import pytest

from toque.reports.growing_curve import GrowingCurve
from toque.storage.owner import Owner
from toque.watching.places import FolderPlace
from toque.watching.run_state import state_of
from toque.watching.watched_run import WatchedRun
from watching.written_run import WrittenRun


@pytest.fixture
def written(tmp_path):
    return WrittenRun(tmp_path / "run")


def watched(written) -> WatchedRun:
    run = WatchedRun(FolderPlace(written.folder))
    run.refresh()
    return run


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_newest_figures_and_the_time_left(written):
    for step in range(1, 5):
        written.step(step)
    written.evaluation(4, 3.0, recipe_score=0.4)
    written.save(4)
    run = watched(written)
    assert run.facts.step["loss"] == 2.5
    assert run.facts.best == (3.0, 4)
    assert run.facts.done == 0.4
    # Four updates of 2 s and half a second for the save; six updates are left.
    assert run.facts.seconds_left == pytest.approx(8.5 * 0.6 / 0.4)
    assert run.curves["loss"].points() == ([1.0, 2.0, 3.0, 4.0], [10.0, 5.0, 10 / 3, 2.5])
    assert run.curves["data_wait"].last == (4.0, 0.25)
    before = run.version
    run.refresh()
    assert run.version == before
    written.step(5)
    run.refresh()
    assert run.facts.progress.step == 5
    assert run.version > before


def test_a_continued_session_undoes_what_went_beyond_its_step(written):
    for step in range(1, 4):
        written.step(step)
    written.save(3)
    for step in range(4, 7):
        written.step(step)
    written.evaluation(6, 1.0)
    written.start(3)
    run = watched(written)
    assert run.curves["loss"].points()[0] == [1.0, 2.0, 3.0]
    assert run.facts.progress.step == 3
    assert run.facts.progress.tokens == 300
    assert run.facts.best is None
    written.step(4)
    run.refresh()
    assert run.facts.progress.tokens == 400
    assert run.facts.seconds_left == pytest.approx(2.0 * 6)  # at this session's rate


def test_torn_and_strange_lines_cost_themselves_alone(written):
    written.step(1)
    written.raw('{"event": "step", "step": 2, "lo')
    run = watched(written)
    assert run.facts.progress.step == 1
    written.raw("\n")
    for strange in (
        "[1]", "null", "{}", '{"event": "step"}', '{"event": "step", "step": "x"}',
        '{"event": "system", "gpus": 3, "seconds": "x"}', '{"event": "gradients", "groups": []}',
        '{"event": "warning", "message": {"a": 1}}', "[" * 5000,
    ):  # fmt: skip
        written.raw(strange + "\n")
    written.step(3, loss=float("nan"))
    run.refresh()
    assert run.trouble == ""
    assert run.facts.progress.step == 3
    assert run.curves["loss"].last == (3.0, None)


def test_a_folder_that_is_half_there(tmp_path):
    folder = tmp_path / "new"
    (folder / "checkpoints").mkdir(parents=True)
    run = WatchedRun(FolderPlace(folder))
    run.refresh()
    assert state_of(run).kind == "waiting"
    WrittenRun(folder).lock(os.getpid())
    run.refresh()
    assert state_of(run).said == "Running, at step 0."


def test_a_killed_run_is_told_from_one_that_runs(written):
    written.step(1)
    written.save(1)
    written.step(2)
    written.lock(os.getpid())
    run = watched(written)
    assert state_of(run).kind == "running"
    written.lock(ended_process())
    run.refresh()
    state = state_of(run)
    assert state.kind == "killed"
    assert "is gone and wrote no end. The last figures are of step 2" in state.said
    assert "continues from step 1" in state.said
    written.step(3)  # so it lives, and where it does its process id is another
    time.sleep(0.01)
    run.refresh()
    assert state_of(run).kind == "running"


def test_an_id_that_another_process_has_by_now_is_gone(written):
    written.step(1)
    written.lock(os.getpid())
    long_ago = time.time() - 10**7
    os.utime(written.folder / "checkpoints" / ".lock", (long_ago, long_ago))
    assert state_of(watched(written)).kind == "killed"


def test_a_lease_that_is_not_renewed_any_more(written):
    written.step(1)
    written.lock(os.getpid())
    now = [0.0]
    lease, owner = written.folder / "checkpoints" / ".lock.lease", Owner()
    lease.write_bytes(owner.record())
    run = WatchedRun(FolderPlace(written.folder), clock=lambda: now[0])
    run.refresh()
    now[0] = 44.0
    run.refresh()
    assert run.holder.state == "alive"
    lease.write_bytes(owner.record())
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


def test_how_it_ended(written):
    written.step(10)
    written.end(10)
    written.lock(os.getpid())
    run = watched(written)
    assert state_of(run).said == (
        "Finished, at step 10. Its best model is being scored and written."
    )
    (written.folder / "end.json").write_text("{}")
    run.refresh()
    assert state_of(run).said == "Finished, at step 10."
    written.start(10)
    run.refresh()
    assert state_of(run).kind == "running"


def test_the_machine_and_its_gpus(written):
    gpu = {"index": 0, "utilisation_percent": 90.0, "throttled": ["power cap"], "power_watts": None}
    for step in range(3):
        written.system(step, gpus=[gpu])
    run = watched(written)
    assert run.curves["system cpu_percent"].points() == ([1.0, 2.0, 3.0], [75.0] * 3)
    assert run.curves["system process_resident_bytes"].last == (3.0, 2.0)
    assert run.curves["system gpu 0 utilisation_percent"].last == (3.0, 90.0)
    assert "system gpu 0 power_watts" not in run.curves


def test_texts_are_gathered_by_prompt_and_few_enough(written):
    for step in range(100):
        written.text(step, "soup", f"text {step}")
    run = watched(written)
    steps = [sample["step"] for sample in run.texts["soup"]]
    assert steps[-1] == 99
    assert len(steps) <= 32
    assert steps[0] < 20


def test_a_growing_curve_keeps_spikes_gaps_and_both_ends():
    curve = GrowingCurve(most=100)
    for i in range(10_000):
        curve.add(float(i), {4321: 99.0, 777: -99.0, 9001: None}.get(i, 1.0))
    xs, ys = curve.points()
    assert len(curve) == 10_000
    assert len(xs) <= 160
    assert xs == sorted(xs)
    assert (xs[0], xs[-1]) == (0.0, 9999.0)
    drawn = set(zip(xs, ys, strict=True))
    assert {(4321.0, 99.0), (777.0, -99.0), (9001.0, None)} <= drawn
    curve.drop_after(5000.0)
    xs, ys = curve.points()
    assert xs[-1] <= 5000.0
    assert 99.0 in ys
    curve.add(5001.0, 7.0)
    assert curve.points()[0][-1] == 5001.0
