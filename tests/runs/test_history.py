"""What metrics.jsonl says: the events that count, and the curves and sums of a run."""

import json

import pytest

from toque.runs.curves import Curve, RunningMean
from toque.runs.history import (
    METRICS,
    RunHistory,
    parse_event,
    read_history,
    read_metrics,
)
from watching.written_run import WrittenRun


def test_reading_leaves_out_what_a_continued_session_undid(tmp_path):
    path = tmp_path / METRICS
    events = [("start", 0), ("step", 4), ("save", 4), ("step", 6), ("warning", 6), ("start", 4),
              ("step", 6)]  # fmt: skip
    path.write_text(
        "".join(json.dumps({"event": e, "step": s}) + "\n" for e, s in events)
    )
    kept = [(e["event"], e["step"]) for e in read_metrics(path)]
    assert kept == [e for e in events if e != ("step", 6)] + [("step", 6)]


@pytest.mark.parametrize(
    "line",
    [
        "null",
        "{}",
        '{"event": "system", "step": 2, "gpus": 3}',
        '{"event": "gradients", "step": 2, "groups": []}',
        '{"event": "step"}',
        '{"event": "step", "step": -5}',
        '{"event": "step", "step": true}',
        '{"event": "step", "step": 2, "epoch": "1"}',
        '{"event": "step", "step": 2, "tokens": 1.5}',
        '{"event": "step", "step": 2, "seconds": 1e999}',
        '{"event": "evaluation", "step": 2, "metrics": [1]}',
        '{"event": "evaluation", "step": 2, "metrics": {"loss": [1]}}',
        '{"event": "start"}',
        '{"event": "start", "step": 0, "parameters": 3}',
        '{"event": {"a": 1}, "step": 2}',
        '{"event": "step", "step": ' + "9" * 5000 + "}",
        "[" * 100_000,
    ],
)
def test_events_of_another_form_are_left_out(tmp_path, line):
    path = tmp_path / METRICS
    whole = '{"event": "step", "step": 1, "epoch": 0.5, "loss": NaN}'
    path.write_text(f"{whole}\n{line}\n")
    assert [(e["step"], e["loss"]) for e in read_metrics(path)] == [(1, None)]


@pytest.fixture
def written(tmp_path):
    return WrittenRun(tmp_path / "run")


def read(written) -> RunHistory:
    return read_history(written.metrics)


def test_the_newest_metrics_and_the_time_left(written):
    for step in range(1, 5):
        written.step(step)
    written.evaluation(4, 3.0, recipe_score=0.4)
    written.save(4)
    run = read(written)
    assert run.step.loss == 2.5
    assert run.best == (3.0, 4)
    assert run.done == 0.4
    # Four updates of 2 s and half a second for the save; six updates are left.
    assert run.seconds_left == pytest.approx(8.5 * 0.6 / 0.4)
    assert run.curves["loss"].points() == (
        [1.0, 2.0, 3.0, 4.0],
        [10.0, 5.0, 10 / 3, 2.5],
    )
    assert run.curves["data_wait"].last == (4.0, 0.25)
    assert run.curves["held-out recipe_score"].last == (4.0, 0.4)


def test_a_limit_on_the_command_counts_evaluations_and_ends_at_its_whole(tmp_path):
    """`toque watch` had "done 33 %" of finished runs: updates alone were counted."""
    written = WrittenRun(tmp_path / "run", stop_after="1 minutes")
    for step in range(1, 4):
        written.step(step, run_seconds=15.0 * step)  # 2 s of each are the update's
    assert read(written).done == pytest.approx(0.75)
    written.save(3)
    written.event("start", step=3, epoch=0.3, stop_after="1 minutes", run_seconds=45.0)
    assert read(written).done == pytest.approx(0.75)
    assert read(written).seconds_left is None
    written.step(4, run_seconds=50.0)
    assert read(written).done == pytest.approx(50.0 / 60.0)
    written.end(4, "interrupted")
    assert read(written).done == pytest.approx(50.0 / 60.0)
    written.end(4)
    assert read(written).done == 1.0


def test_a_held_out_loss_that_has_risen_is_told(written):
    for step, loss in ((1, 2.0), (2, 1.5), (3, 1.52)):
        written.step(step)
        written.evaluation(step, loss)
    assert read(written).overfitting_note == ""  # as much as chance does
    written.step(4)
    written.evaluation(4, 1.9)
    assert read(written).overfitting_note.startswith(
        "The held-out loss was lowest at step 2 of 4 (1.5000) and is now 1.9000"
    )


def test_a_continued_session_undoes_what_went_beyond_its_step(written):
    for step in range(1, 4):
        written.step(step)
    written.evaluation(3, 2.0)
    written.save(3)
    before = read(written)
    for step in range(4, 7):
        written.step(step)
    written.evaluation(6, 1.0)
    written.start(3)
    run = read(written)
    assert run.curves["loss"].points()[0] == [1.0, 2.0, 3.0]
    assert run.progress.step == 3
    assert run.progress.tokens == 300
    assert run.best == (2.0, 3)
    assert [row.step for row in run.evaluations] == [3]
    written.step(4)
    run, alone = read(written), before
    alone.add(parse_event(written.metrics.read_text().splitlines()[-1]))
    assert run.progress.tokens == 400
    assert run.seconds_left == pytest.approx(2.0 * 6)  # at this session's rate
    assert run.curves["loss smoothed"].last == alone.curves["loss smoothed"].last


@pytest.mark.parametrize("told_after", [3, 5, None], ids=["at once", "later", "never"])
def test_a_session_returns_to_the_sums_of_the_step_that_was_saved(written, told_after):
    """Saves in the background are told of some updates later, or never: the process was killed."""
    for step in range(1, 7):
        written.step(step)
        if step == told_after:
            written.save(3)
    written.start(3)
    first = read(written)
    assert (first.progress.tokens, first.progress.seconds) == (300, 6.0)
    written.step(4)
    written.start(3)  # killed again, before anything was saved
    again = read(written)
    assert (again.progress.tokens, again.progress.seconds) == (300, 6.0)
    assert again.curves["loss smoothed"].last == first.curves["loss smoothed"].last


def test_sessions_and_how_they_ended(written):
    written.step(1)
    written.end(1, "interrupted")
    written.start(1)
    run = read(written)
    ended, current = run.sessions
    assert (ended.to_step, ended.seconds, ended.reason) == (1, 9.0, "interrupted")
    assert (current.from_step, current.to_step) == (1, None)
    assert run.end is None


def test_the_machine_and_its_gpus(written):
    gpu = {
        "index": 0,
        "utilisation_percent": 90.0,
        "throttled": ["power cap"],
        "power_watts": None,
    }
    for step in range(3):
        written.system(step, gpus=[gpu, {"index": 1, "power_watts": 300.0}])
    run = read(written)
    assert run.curves["system cpu_percent"].points() == ([1.0, 2.0, 3.0], [75.0] * 3)
    assert run.curves["system process_resident_bytes"].last == (3.0, 2.0)
    assert run.curves["system gpu 0 utilisation_percent"].last == (3.0, 90.0)
    assert "system gpu 0 power_watts" not in run.curves
    assert run.gpu_joules == 3 * 60 * 300.0


def test_a_growing_curve_keeps_spikes_gaps_and_both_ends():
    curve = Curve(max_points=100)
    for i in range(10_000):
        curve.add(float(i), {4321: 99.0, 777: -99.0, 9001: None}.get(i, 1.0))
    xs, ys = curve.points()
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


def test_the_smoothed_loss_begins_beside_the_losses():
    """A loss falls fastest at first: a mean of all that has passed would lie far above it."""
    mean = RunningMean()
    for n in range(2000):
        raw = 2.0 + 9.0 * 0.97**n
        mean = mean.add(raw)
        assert abs(mean.value - raw) < 0.15 * raw
    assert mean.value == pytest.approx(2.0, abs=1e-3)


def test_rewards_replace_the_loss_of_a_policy_gradient(written):
    for step in range(1, 4):
        reward = {"reward": 0.1 * step, "reward_std": 0.05, "equal_groups": 0.25}
        written.step(step, parts={"rollouts": 1.5, "forward_backward": 0.5}, **reward)
        written.evaluation(step, 1.0 + step)
    run = read(written)
    assert run.measure == "reward"
    assert run.curves["reward"].values() == pytest.approx([0.1, 0.2, 0.3])
    assert run.curves["reward high"].last == (3.0, pytest.approx(0.35))
    assert run.curves["reward low"].last == (3.0, pytest.approx(0.25))
    assert run.curves["equal_groups"].last == (3.0, 0.25)
    assert run.curves["rollouts"].last == (3.0, 0.75)
    assert "loss" not in run.curves
    assert "data_wait" not in run.curves
    # The held-out loss rises while the model learns, so it is not a sign of memorising.
    assert run.curves["held-out loss"].last == (3.0, 4.0)
    assert run.overfitting_note == ""


def test_loss_of_pairs_has_another_name_than_a_loss_per_token(written):
    pairs = {"rewards/accuracies": 0.75, "rewards/margins": 0.2}
    written.step(1, loss=0.6, **pairs)
    written.evaluation(1, 0.5, **pairs)
    written.evaluation(1, 0.505, **pairs)
    run = read(written)
    assert run.measure == "pair_loss"
    assert run.overfitting_note == ""
    assert run.curves["pair_loss smoothed"].last == (1.0, 0.6)
    assert run.curves["held-out pair_loss"].last == (1.0, 0.505)
    assert run.curves["rewards/margins"].last == (1.0, 0.2)
    assert not {"loss", "loss smoothed", "held-out loss"} & run.curves.keys()
    assert run.best == (0.5, 1)
