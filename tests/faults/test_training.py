"""Faults of the loop itself, with small real runs in this process."""

import json
import os
import signal
import time

import pytest
import torch

from fixtures.runs import Recorder
from toque.errors import NonFiniteError
from toque.training.callbacks import Callback, Callbacks
from toque.training.checkpoint.store import CheckpointStore
from toque.training.observers.watchers import DataBound, Overfitting, UserCallback
from toque.training.runtime import Runtime
from toque.training.stopping import INTERRUPTED, Interrupt
from toque.training.update_guard import SkipStep, UpdateGuard
from toque.units import Cursor, Progress


def test_fault_07_a_signal_while_a_save_is_being_written(make_run):
    whole = make_run(folder=make_run.folder / "whole", save_every=None)
    whole.trainer.fit()
    stages = []

    def after(stage):
        stages.append(stage)
        if stage == "fsync model.safetensors" and stages.count(stage) == 1:
            os.kill(
                os.getpid(), signal.SIGTERM
            )  # from the writer's thread, in mid save

    store = CheckpointStore(make_run.folder / "checkpoints", keep_last=9, after=after)
    run = make_run(
        save_every="4 steps",
        store=store,
        background_saves=True,
        callbacks=(Interrupt(),),
    )
    end = run.trainer.fit()
    assert end.reason == INTERRUPTED
    steps = sorted(
        int(p.name.removeprefix("step-")) for p in store.folder.glob("step-*")
    )
    assert steps[0] == 4  # the save that was under way
    assert steps[-1] == end.progress.step  # and the step the signal found
    assert end.saves.failed == 0
    again = make_run(save_every=None)
    again.trainer.fit()
    assert run.losses + again.losses == whole.losses


class Spikes(Callback):
    """Multiplies loss and gradient of some updates."""

    def __init__(self, run, *steps, by=1e4):
        self.run, self.steps, self.by = run, steps, by
        self.plain = run.trainer.loss_fn
        run.trainer.loss_fn = self.loss_sum

    def loss_sum(self, model, batch):
        loss = self.plain(model, batch)
        return loss * self.by if self.run.trainer.progress.step in self.steps else loss


class StoreSurvey(Callback):
    """What the weights were before each step, and at each save."""

    def __init__(self):
        self.run, self.before, self.saved = None, {}, {}

    def on_before_step(self, at):
        scaler = self.run.trainer.runtime.scaler
        self.before[at.step] = (self.run.weights(), scaler and scaler.get_scale())

    def on_save(self, at, saved):
        self.saved.setdefault(saved.step, self.run.weights())


def equal(some, others):
    return all(some[name].equal(others[name]) for name in some)


def outlying(run, *steps, by=1e4, **options):
    """`run`, with a policy and with outliers at `steps`."""
    options = {"window": 8, "roll_back_after": 3} | options
    run.trainer.guard.skip_step = SkipStep(**options)
    newest = run.trainer.checkpoints.newest_valid()
    if newest is not None:
        run.trainer.load(newest)
    Spikes(run, *steps, by=by)
    return run


@pytest.mark.parametrize("by", [1e4, float("nan"), float("inf")])
def test_fault_27_an_outlier_is_left_out_and_named(make_run, by):
    look = StoreSurvey()
    run = outlying(make_run(save_every=None, steps=12, callbacks=(look,)), 8, by=by)
    look.run = run
    end = run.trainer.fit()
    assert end.reason == "finished"
    assert end.skipped_updates == 1
    same = [equal(look.before[n][0], look.before[n + 1][0]) for n in range(11)]
    assert [n for n, unchanged in enumerate(same) if unchanged] == [8]
    assert "update 8 is not applied" in run.recorder.warnings[0]
    record = run.trainer.guard.run_folder / "skipped_updates.jsonl"
    (told,) = map(json.loads, record.read_text().splitlines())
    assert told["step"] == 8
    assert len(told["example_ids"]) == run.recorder.steps[8].n_examples


class Lowest:
    """A user's callback whose state before the first evaluation is no JSON."""

    def __init__(self):
        self.lowest = float("inf")

    def on_evaluate_end(self, state):
        self.lowest = min(self.lowest, state.metrics["loss"])

    def state_dict(self):
        return {"lowest": self.lowest}


def test_fault_27_what_watchers_keep_of_an_outlier_stops_no_save(make_run):
    warnings = []

    def warn(at, text):
        warnings.append((at.step, text))

    watchers = (
        Overfitting(warn=warn),
        UserCallback(Lowest(), name="m:Lowest", warn=warn),
    )
    run = make_run(
        save_every="4 steps", evaluate_every="6 steps", steps=8, callbacks=watchers
    )
    outlying(run, 2, by=float("nan"))
    assert run.trainer.fit().reason == "finished"
    assert [e for e in run.recorder.events if e.startswith("save")] == [
        "save 4",
        "save 8",
    ]
    ((step, said),) = warnings
    assert step == 4
    assert "m:Lowest raised in state_dict" in said


def test_fault_27_without_outliers_nothing_is_left_out(make_run):
    plain = make_run(folder=make_run.folder / "plain", save_every=None)
    plain.trainer.fit()
    run = outlying(make_run(save_every=None))
    end = run.trainer.fit()
    assert run.losses == plain.losses
    assert end.skipped_updates == 0


def test_fault_27_several_in_a_row_go_back_to_a_checkpoint_and_on(make_run):
    look, bad = StoreSurvey(), (9, 10, 11)
    run = outlying(make_run(save_every="4 steps", callbacks=(look,)), *bad, window=6)
    look.run = run
    end = run.trainer.fit()
    assert (end.reason, end.progress.step, end.skipped_updates) == (
        "finished",
        18,
        len(bad),
    )
    assert any(
        "continues with the weights of step 8" in w for w in run.recorder.warnings
    )
    assert equal(look.before[12][0], look.saved[8])
    assert not equal(look.before[9][0], look.saved[8])


def test_fault_27_a_save_of_the_same_weights_is_not_gone_back_to(make_run):
    """A save between the update that spoilt the weights and the outliers that show it."""
    look = StoreSurvey()
    run = outlying(
        make_run(save_every="2 steps", callbacks=(look,)), 9, 10, 11, window=6
    )
    look.run = run
    assert run.trainer.fit().reason == "finished"
    assert equal(look.before[9][0], look.saved[10])
    assert any(
        "continues with the weights of step 8" in w for w in run.recorder.warnings
    )
    assert equal(look.before[12][0], look.saved[8])


def test_fault_27_the_judgement_is_that_of_the_docstring(row_stream):
    batch, warnings = row_stream.at(Cursor()).batch, Recorder()
    policy = SkipStep(sigma=2.0, window=4, roll_back_after=2)
    guard = UpdateGuard(Runtime(), Callbacks([warnings]), policy)

    def applied(guard, step, value):
        return bool(
            guard.should_apply(step, 0.1, torch.tensor(value), torch.tensor(1.0), batch)
        )

    # The limit over (1, 3) is 2 + 2 * 1; what lies above enters as the limit, so over (1, 3, 4)
    # it is 8/3 + 2 * 1.2472, over (1, 3, 4, 5.1) 6.29; below the mean nothing is an outlier.
    seen = [
        (1.0, True),
        (3.0, True),
        (9.0, False),
        (5.1, True),
        (6.4, False),
        (-9.0, True),
    ]
    for step, (value, expected) in enumerate(seen):
        assert applied(guard, step, value) == expected, step
    assert guard.check(Progress(step=6)) is None
    skipped = [text.split(" is not applied")[0] for text in warnings.warnings]
    assert skipped == ["update 2", "update 4"]
    assert (policy.skipped, policy.in_a_row) == (2, 0)
    first = UpdateGuard(Runtime(), skip_step=SkipStep(window=2))
    values = (float("nan"), 1.0, 1.0)
    assert [applied(first, n, value) for n, value in enumerate(values)] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    "at", [10, 12, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 9, 11, 15))]
)
def test_fault_27_killed_anywhere_the_same_updates_are_left_out(make_run, at):
    whole = outlying(make_run(folder=make_run.folder / "whole"), 9, 10, 11, window=6)
    whole.trainer.fit()
    first = outlying(make_run(stop_after=f"{at} steps"), 9, 10, 11, window=6)
    # The schedule is that of the whole run; only this session is shorter.
    first.trainer.lr_at = whole.trainer.lr_at
    first.trainer.fit()
    again = outlying(make_run(), 9, 10, 11, window=6)
    again.trainer.fit()
    assert first.losses + again.losses == whole.losses
    assert equal(again.weights(), whole.weights())


@pytest.mark.parametrize(
    ("save_every", "words"),
    [(None, "no checkpoint to go back to"), ("2 steps", "already")],
)
def test_fault_27_a_run_that_only_meets_outliers_ends(make_run, save_every, words):
    run = outlying(make_run(save_every=save_every), *range(8, 99))
    with pytest.raises(NonFiniteError, match=words) as caught:
        run.trainer.fit()
    assert "3 updates in a row" in str(caught.value)
    assert "optim.peak_lr" in str(caught.value)


def test_fault_28_a_float16_overflow_lowers_the_scale_which_is_saved(make_run):
    def in_float16(run):
        run.trainer.runtime.precision = "fp16"
        run.trainer.runtime.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        newest = run.trainer.checkpoints.newest_valid()
        if newest is not None:
            run.trainer.load(newest)
        return run

    look = StoreSurvey()
    whole = in_float16(
        make_run(folder=make_run.folder / "whole", steps=12, callbacks=(look,))
    )
    look.run = whole
    Spikes(whole, 4, by=1e9)
    assert whole.trainer.fit().reason == "finished"
    (weights, scale), (after, lower) = look.before[4], look.before[5]
    assert equal(weights, after)
    assert lower == scale / 2
    first = in_float16(make_run(stop_after="7 steps"))
    first.trainer.lr_at = whole.trainer.lr_at
    Spikes(first, 4, by=1e9)
    first.trainer.fit()
    again = in_float16(make_run(steps=12))
    assert again.trainer.runtime.scaler.get_scale() == look.before[7][1]
    again.trainer.fit()
    assert first.losses + again.losses == whole.losses


class SlowRows:
    """Batches that take their time."""

    def __init__(self, batches, seconds):
        self.batches, self.seconds, self.readers = batches, seconds, 1
        self.plan_update = batches.plan_update

    def collate(self, cursor, update):
        time.sleep(self.seconds)
        return self.batches.collate(cursor, update)


@pytest.mark.parametrize(("seconds", "said"), [(0.06, 1), (0.0, 0)])
def test_fault_41_a_run_that_waits_for_its_data_says_so_once(
    make_run, seconds, said, monkeypatch
):
    monkeypatch.setattr("toque.training.observers.watchers.DATA_SHARE", 0.6)
    warnings = []
    bound = DataBound(warn=lambda at, text: warnings.append((at.step, text)), updates=5)
    run = make_run(steps=14, save_every=None, callbacks=(bound,))
    run.trainer.batches = SlowRows(run.trainer.batches, seconds)
    run.trainer.fit()
    assert len(warnings) == said
    for step, text in warnings:
        assert (
            step == 6
        )  # the first update has nothing made ahead of it and is no evidence
        assert text.startswith("data-bound ")
        assert "local disk" in text


def test_fault_38_a_clock_that_jumps_back_changes_nothing(make_run, monkeypatch):
    whole = make_run(folder=make_run.folder / "whole", save_every=None)
    whole.trainer.fit()
    clock = iter(range(2_000_000_000, 0, -86_400))  # a day back at every look
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    first = make_run(stop_after="7 steps", keep_last=2)
    first.trainer.lr_at = whole.trainer.lr_at
    first.trainer.fit()
    folder = first.trainer.checkpoints.folder
    for age, path in enumerate(sorted(folder.glob("step-*"))):
        os.utime(path, (1e9 - age, 1e9 - age))  # the newest looks oldest
    again = make_run(keep_last=2)
    again.trainer.fit()
    assert first.losses + again.losses == whole.losses
    assert sorted(p.name for p in folder.glob("step-*")) == [
        "step-00000017",
        "step-00000018",
    ]
