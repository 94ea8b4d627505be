"""A limit on the whole command, by a clock that moves only when something is done."""

from dataclasses import dataclass

import pytest

from toque.config.schema import OptimConfig
from toque.training.callbacks import Callback
from toque.training.lr_schedules import make_schedule
from toque.training.stopping import CommandClock, TimeLimit
from toque.training.trainer import Schedule
from toque.units import Duration

READING, UPDATE, SAVING, ENDING = 60.0, 2.0, 5.0, 40.0


@dataclass
class Watch:
    """Seconds that go by as the run does what takes them."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Work(Callback):
    """Takes the time of an update where one begins, and of a save where one ends."""

    def __init__(self, watch):
        self.watch = watch

    def on_before_step(self, at):
        self.watch.now += UPDATE

    def on_save(self, at, saved):
        self.watch.now += SAVING


def command(
    make_run, watch, *, total, expected=10.0, evaluating=10.0, length=None, **more
):
    """One command: reading and measuring, then training; the run and its limit."""
    began = watch.now
    watch.now += READING
    limit = TimeLimit(
        total, CommandClock(watch, began), expected, ENDING, length=length
    )

    def evaluate(_model):
        watch.now += evaluating
        return {"loss": 1.0}

    run = make_run(callbacks=(Work(watch), limit), evaluator=evaluate, **more)
    stop_after = length or limit.stop_after
    run.trainer.schedule = Schedule(
        stop_after, Duration.parse("50 steps"), Duration.parse("100 steps")
    )
    run.trainer.count_seconds = limit.count_seconds
    run.trainer.lr_at = make_schedule(
        OptimConfig(peak_lr=1e-2, warmup=Duration(5, "%")), stop_after
    )
    limit.warn = run.trainer.callbacks.on_warning
    return run, limit


def finish(watch, evaluating=10.0):
    """What a command does after training: the best weights are scored, and all is written."""
    watch.now += evaluating + ENDING - SAVING  # the last save was made by the loop


@pytest.mark.parametrize("total", [240.0, 600.0])
def test_reading_evaluating_and_writing_fit_into_the_limit(make_run, total):
    watch = Watch()
    run, limit = command(make_run, watch, total=total)
    end = run.trainer.fit()
    finish(watch)
    assert end.reason == "finished"
    assert watch.now <= total
    assert total - watch.now < 2 * (
        UPDATE + SAVING
    )  # and no more is left over than an update
    assert limit.stop_after.seconds == total - READING - 20.0 - ENDING
    # Evaluations and saves between the updates count: the rate has come down when it ends.
    steps = run.recorder.steps
    assert steps[-1].lr < 0.01 * max(step.lr for step in steps)
    assert steps[0].progress.seconds == UPDATE
    assert run.recorder.evaluations[-1][0] == end.progress.step


def test_evaluations_that_take_longer_than_measured_end_training_earlier(make_run):
    watch = Watch()
    run, _ = command(make_run, watch, total=600.0, expected=10.0, evaluating=50.0)
    run.trainer.fit()
    finish(watch, evaluating=50.0)
    assert watch.now <= 600.0


class KillAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, info):
        if info.progress.step == self.step:
            raise KeyboardInterrupt


def test_a_continued_command_keeps_to_the_limit_too(make_run):
    watch = Watch()
    run, limit = command(make_run, watch, total=600.0)
    run.trainer.callbacks._callbacks += (KillAt(120),)
    with pytest.raises(KeyboardInterrupt):
        run.trainer.fit()
    began = watch.now
    again, _ = command(make_run, watch, total=600.0)
    assert again.trainer.progress.step == 100
    end = again.trainer.fit()
    finish(watch)
    assert watch.now - began <= 600.0
    longer, _ = command(
        make_run, watch, total=900.0
    )  # a run that came to its limit may go on
    assert longer.trainer.fit().progress.step > end.progress.step
    assert end.progress.seconds <= limit.stop_after.seconds + UPDATE


def test_a_run_of_many_epochs_keeps_to_its_time_limit_and_says_so(make_run):
    """A run in epochs had no limit, and outlasted `init --for` on a machine that became busy."""
    watch = Watch()
    length = Duration.parse("1000 steps")
    run, limit = command(make_run, watch, total=240.0, length=length)
    end = run.trainer.fit()
    finish(watch)
    assert watch.now <= 240.0
    assert 0 < end.progress.step < 1000
    assert limit.is_over
    (warning,) = [text for text in run.recorder.warnings if "train.time_limit" in text]
    assert (
        "240 seconds, ended training after 6% of train.stop_after, 1000 steps"
        in warning
    )
    assert run.recorder.evaluations[-1][0] == end.progress.step
    assert limit.count_seconds(3.0) == 3.0  # of the update alone


def test_a_run_that_ends_within_its_time_limit_is_as_without_one(make_run):
    watch = Watch()
    run, limit = command(
        make_run, watch, total=600.0, length=Duration.parse("60 steps")
    )
    end = run.trainer.fit()
    assert (end.reason, end.progress.step) == ("finished", 60)
    assert not limit.is_over  # so that a longer run may continue
    assert not [text for text in run.recorder.warnings if "train.time_limit" in text]
