"""Profiles of some updates: files that others can read, and the same run."""

import gzip
import json

import pytest
import torch

from fixtures.updates import update
from toque.config.schema_methods import ProfileConfig
from toque.runs.time_left import TimeLeft
from toque.training.observers.metrics_log import StepWindow
from toque.training.observers.profiler import Profiler
from toque.training.phases import PartClock
from toque.training.runtime import Runtime
from toque.units import Duration, Progress

# torch says so itself on the way out of a trace whose memory was taken before it.
pytestmark = pytest.mark.filterwarnings("ignore:.*allocated before the profiling.*")


class Watch:
    """A profiled run of the small model."""

    def __init__(self, make, folder, plan, **options):
        self.said, self.warned = [], []
        wait, warmup, active, repeat = plan
        asked = ProfileConfig(
            wait=wait, warmup=warmup, active=active, repeat=repeat,
            stacks=options.pop("stacks", False), memory=options.pop("memory", True),
        )  # fmt: skip
        self.profiler = Profiler(
            asked,
            folder,
            Runtime(),
            lambda _, text: self.warned.append(text),
            self.said.append,
        )
        self.run = make(
            callbacks=(self.profiler,), folder=folder, save_every=None, **options
        )
        trainer = self.run.trainer
        self.profiler.runtime = trainer.runtime
        trainer.loss_fn = trainer.runtime.phases.around("forward", trainer.loss_fn)
        self.trace = folder / "trace"

    def spans(self, name):
        trace = json.loads(
            gzip.decompress((self.trace / f"{name}.json.gz").read_bytes())
        )
        assert all("ph" in e and "pid" in e for e in trace["traceEvents"])
        return [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"]


@pytest.fixture
def profile(make_run, tmp_path):
    return lambda *plan, **options: Watch(
        make_run, tmp_path / "profiled", plan, **options
    )


def test_a_profiled_run_is_the_same(make_run, profile, tmp_path):
    options = {"steps": 9, "evaluate_every": "4 steps", "micro_batch_rows": 2}
    plain = make_run(folder=tmp_path / "plain", **options)
    plain.trainer.fit()
    watch = profile(1, 1, 2, 2, **options)
    watch.run.trainer.fit()
    assert watch.run.losses == plain.losses
    assert watch.run.recorder.evaluations == plain.recorder.evaluations
    assert watch.warned == []
    assert sorted(path.name for path in watch.trace.iterdir()) == [
        "step-00000003-operations.txt", "step-00000003.json.gz",
        "step-00000007-operations.txt", "step-00000007.json.gz",
    ]  # fmt: skip
    slowed = [i.progress.step for i in watch.run.recorder.steps if i.slowed]
    assert slowed == [2, 3, 4, 6, 7, 8]
    assert len(watch.said) == 2
    assert "toque: backward" in watch.spans("step-00000007")
    table = (watch.trace / "step-00000003-operations.txt").read_text()
    for text in ("aten::", "Self CPU time total", "CPU Mem"):
        assert text in table


def test_a_schedule_longer_than_the_run_is_said_and_what_there_is_is_kept(profile):
    watch = profile(0, 1, 3, 5, steps=3)
    watch.run.trainer.fit()
    (said,) = watch.warned
    assert "needs 20 updates" in said
    assert "this session has 3" in said
    assert len(watch.run.losses) == 3
    assert (
        watch.spans("step-00000002").count("toque: backward") == 2
    )  # the begun repetition


def test_a_folder_that_takes_nothing_costs_the_profile_and_not_the_run(
    profile, tmp_path
):
    (tmp_path / "profiled").mkdir()
    (tmp_path / "profiled" / "trace").write_text("in the way")
    watch = profile(0, 1, 1, 2, steps=5)
    watch.run.trainer.fit()
    (said,) = watch.warned
    assert said.startswith("profiling failed: FileExistsError")
    assert len(watch.run.losses) == 5
    assert not any(i.slowed for i in watch.run.recorder.steps[3:])


def test_a_run_that_ends_with_an_error_leaves_no_profiler_on(profile):
    def fail(*_):
        raise ZeroDivisionError

    watch = profile(0, 1, 3, 1, steps=5, loss_fn=fail)
    with pytest.raises(ZeroDivisionError):
        watch.run.trainer.fit()
    assert torch.autograd.profiler._is_profiler_enabled is False
    assert watch.run.trainer.runtime.phases.watchers == []


def test_code_that_is_gone_before_the_trace_is_read_has_its_name(profile):
    # A tracker's thread imports its package meanwhile; a module's code is dropped when it has run.
    watch = profile(0, 1, 1, 1, steps=3, stacks=True, memory=False)
    plain = watch.run.trainer.loss_fn

    def imports(model, batch):
        for number in range(300):
            exec(compile("n = len('n')", f"/gone/{number:03}.py", "exec"), {})  # noqa: S102
        return plain(model, batch)

    watch.run.trainer.loss_fn = imports
    watch.run.trainer.fit()
    assert watch.warned == []
    names = set(watch.spans("step-00000002"))
    assert (
        sum("<module>" in name and name.startswith("/gone/") for name in names) == 300
    )


def test_rates_and_the_time_left_pass_over_slowed_updates():
    window = StepWindow()
    window.add(update(1, seconds=2.0))
    window.add(update(2, seconds=8.0, slowed=True))
    assert (window.n_tokens, window.seconds, window.tokens_per_second) == (
        200,
        10.0,
        50.0,
    )
    left = TimeLeft(Duration(10, "steps"))
    left.start(Progress())
    left.record_update(
        Progress(step=1, seconds=2.0), Progress(step=2, seconds=10.0), slowed=True
    )
    assert left.seconds(Progress(step=2, seconds=10.0)) == pytest.approx(16.0)


def test_compiling_is_taken_out_of_the_part_that_needed_it():
    times = iter([0.0, 5.0, 12.0, 13.0])
    compiled = iter([3.0, 4.0, 0.0])
    clock = PartClock(now=lambda: next(times), compiling=lambda: next(compiled))
    clock.restart()  # what was compiled before does not count
    clock.lap("forward_backward")
    clock.lap("optimizer")
    assert clock.take_parts() == {
        "forward_backward": 3.0,
        "compiling": 4.0,
        "optimizer": 1.0,
    }
