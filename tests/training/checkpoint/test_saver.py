"""Background saves: the same checkpoints, each skipped save reported, no error lost."""

import threading

import pytest
import torch

from toque.training.checkpoint.saved import MANIFEST
from toque.training.checkpoint.saver import SnapshotBuffers
from toque.training.checkpoint.store import CheckpointStore, SaveError


def run_with(make_run, after=lambda _stage: None, **options):
    store = CheckpointStore(
        make_run.folder / "checkpoints", keep_last=1000, after=after
    )
    return make_run(background_saves=True, store=store, **options)


class Gate:
    """Holds the writer before the first file of a step until it is opened."""

    def __init__(self):
        self.opened, self.reached = threading.Event(), threading.Event()

    def __call__(self, stage):
        if (
            stage == "mkdir"
            and threading.current_thread() is not threading.main_thread()
        ):
            self.reached.set()
            assert self.opened.wait(60)


def test_checkpoints_are_those_of_the_foreground_and_training_goes_on_meanwhile(
    make_run,
):
    plain = make_run(folder=make_run.folder / "plain", steps=6, save_every="2 steps")
    plain.trainer.fit()
    gate = Gate()
    run = run_with(make_run, gate, steps=6, save_every="2 steps")
    # The save of step 2 is held until step 5 is done: that of step 4 finds it unfinished.
    steps = run.recorder.on_step

    def on_step(info):
        steps(info)
        if info.progress.step == 5:
            assert gate.reached.wait(60)
            gate.opened.set()

    run.recorder.on_step = on_step
    end = run.trainer.fit()
    assert run.losses == plain.losses
    assert (end.saves.written, end.saves.skipped) == (2, 1)
    assert "the save at step 4 is skipped" in run.recorder.warnings[0]
    folder, whole = (r.trainer.checkpoints.folder for r in (run, plain))
    assert sorted(p.name for p in folder.glob("step-*")) == [
        "step-00000002",
        "step-00000006",
    ]
    for name in ("model.safetensors", "optimizer.safetensors"):
        for step in ("step-00000002", "step-00000006"):
            assert (folder / step / name).read_bytes() == (
                whole / step / name
            ).read_bytes()


def failing_in_background(stage):
    if (
        stage == f"fsync {MANIFEST}"
        and threading.current_thread() is not threading.main_thread()
    ):
        raise OSError(28, "No space left on device")


def test_an_error_in_the_background_is_a_warning_and_counted(make_run):
    run = run_with(make_run, failing_in_background, steps=6, save_every="3 steps")
    end = run.trainer.fit()
    assert (end.saves.failed, end.saves.written) == (2, 1)  # and the best model
    assert any("Cannot save step 3" in text for text in run.recorder.warnings)
    assert run.trainer.checkpoints.newest_valid().step == 6


def test_an_error_that_comes_with_the_end_is_not_lost(make_run):
    def after(stage):
        if stage.startswith("fsync model"):
            raise OSError(28, "No space left on device")

    run = run_with(make_run, after, steps=4, save_every="2 steps")
    with pytest.raises(SaveError, match="Cannot save step 4"):
        run.trainer.fit()
    assert run.recorder.ends[0].saves.failed == 3  # the best model too
    assert [
        p for p in run.trainer.checkpoints.folder.iterdir() if p.name != ".lock"
    ] == []


def test_a_mistake_of_the_program_is_raised_and_not_called_a_full_disk(make_run):
    def after(_stage):
        if threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError("a mistake")

    run = run_with(make_run, after, steps=6, save_every="2 steps")
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        run.trainer.fit()


def test_without_memory_for_a_copy_the_save_is_waited_for(make_run, monkeypatch):
    monkeypatch.setattr("toque.training.checkpoint.saver.SHARE_OF_MEMORY", 0.0)
    run = run_with(make_run, steps=4, save_every="2 steps")
    end = run.trainer.fit()
    assert (end.saves.written, end.saves.waited) == (2, 1)


def test_copies_are_taken_into_the_same_memory():
    slot, weight = SnapshotBuffers(), torch.tensor([1.0, 2.0])
    first = slot.copy({"model": {"w": weight}})["model"]["w"]
    weight.add_(1.0)
    assert first.tolist() == [1.0, 2.0]
    second = slot.copy({"model": {"w": weight}})["model"]["w"]
    assert (second.data_ptr(), second.tolist()) == (first.data_ptr(), [2.0, 3.0])
    assert slot.bytes == 8
