"""Time until a run's command ends: what is foreseen, and what is corrected by measuring."""

from types import SimpleNamespace

import pytest

from toque.runs.time_left import TimeLeft
from toque.training.stopping import CommandClock, TimeLimit
from toque.units import Duration, Progress
from toque.workflows.run_length import AfterTraining, Length, predict_time

D = Duration.parse


def time_left(stop="100 steps", every="30 steps", **totals):
    return TimeLeft(
        stop_after=D(stop),
        evaluate_every=D(every),
        expected=totals,
        training_seconds=200.0,
        evaluation_seconds=5.0,
        final_seconds=40.0,
        n_texts=16,
    )


def at(step, seconds=0.0, epoch=0.0):
    return Progress(step=step, seconds=seconds, epoch=epoch)


def test_before_the_first_update_everything_is_foreseen():
    time = time_left()
    time.start(at(0))
    assert time.count_evaluations(at(0)) == 4  # at 30, 60, 90, and the end
    assert time.seconds(at(0)) == 200.0 + 4 * 5.0 + 40.0
    assert time.describe(at(0)) == (
        "about 4:20 in all: 3:20 of training, 0:20 for 4 evaluations, and up to 0:40 to score the "
        "model and generate 16 texts at the end"
    )


def test_a_limit_on_the_command_counts_evaluations_and_foresees_all_of_them():
    """One of 4 s was foreseen; nine came, and took 59 % of the time."""
    stream = SimpleNamespace(totals=lambda _stop: {})
    after = AfterTraining(evaluating=1.0, ending=2.0, texts=3.0, final_texts=8.0)
    limit = TimeLimit(120.0, CommandClock(lambda: 0.0, 0.0), 1.0, 2.0, 3.0, 8.0)
    length = Length(limit.stop_after, after, limit)
    time = predict_time(stream, length, D("10 %"), update_seconds=2.0, n_texts=16)
    time.start(at(0))
    assert time.count_evaluations(at(0)) == 10
    assert time.seconds(at(0)) == pytest.approx(120.0)
    assert time.describe(at(0)) == (
        "about 2:00 in all: 1:09 of training, 0:40 for 10 evaluations, and up to 0:11 to score the "
        "model and generate 16 texts at the end"
    )
    # Half of the time is over, whatever it went into.
    assert time.seconds(at(3, seconds=52.5)) == pytest.approx(52.5 + 4.0 + 11.0)


def test_a_continued_run_has_less_before_it():
    time = time_left()
    time.start(at(60, seconds=999.0))
    assert time.count_evaluations(at(60)) == 2
    assert time.seconds(at(60, seconds=999.0)) == pytest.approx(80.0 + 10.0 + 40.0)
    time.start(at(100))
    assert time.describe(at(100)) == ""


def test_what_was_measured_takes_the_place_of_guesses():
    time = time_left()
    time.start(at(0))
    # Updates take half of what was foreseen, and so will the rest.
    assert time.seconds(at(10, seconds=10.0)) == pytest.approx(90.0 + 4 * 2.5 + 20.0)
    time.record_evaluation(11.0)
    assert time.seconds(at(30, seconds=30.0)) == pytest.approx(70.0 + 3 * 11.0 + 20.0)
    time.record_evaluation(13.0)
    assert time.seconds(at(60, seconds=60.0)) == pytest.approx(40.0 + 2 * 12.0 + 20.0)
    assert (
        time.seconds(at(100, seconds=100.0)) == 12.0 + 20.0
    )  # the last evaluation is due


def test_ten_updates_correct_what_was_foreseen_too_long():
    """Beside other programs "3:15:33" was told of a run that took 4:34."""
    time = TimeLeft(D("100 steps"), D("30 steps"), training_seconds=8000.0,
                    evaluation_seconds=100.0, final_seconds=320.0)  # fmt: skip
    time.start(at(0))
    # The first update loads and chooses kernels, and counts for as much as it takes by itself.
    told = [time.record_update(at(0), at(1, seconds=60.0))]
    assert time.seconds(at(1, seconds=60.0)) == pytest.approx(
        8000.0 * 0.99 + 400.0 + 320.0
    )
    told += [
        time.record_update(at(n, 60.0 + 2 * (n - 1)), at(n + 1, 60.0 + 2 * n))
        for n in range(1, 12)
    ]
    assert time.seconds(at(10, 78.0)) == pytest.approx(90 * 2.0 + 4 * 2.5 + 8.0)
    (sentence,) = (text for text in told if text)
    assert told.index(sentence) == 9
    assert sentence == "corrected by the first 10 updates: about 3:18 left"
    right = time_left()
    right.start(at(0))
    assert not any(
        right.record_update(at(n, 2.0 * n), at(n + 1, 2.0 * (n + 1))) for n in range(20)
    )


def test_evaluations_in_another_unit_than_the_run():
    time = time_left(stop="2 epochs", every="30 steps", steps=90.0, epochs=2.0)
    time.start(at(0))
    assert time.count_evaluations(at(0)) == 3
    assert time.count_evaluations(at(45, epoch=1.0)) == 2
    unknown = time_left(stop="3 minutes", every="30 steps")
    unknown.start(at(0))
    assert unknown.count_evaluations(at(0)) == 1  # the end, which is all that is known
    assert time_left(every="25 %").count_evaluations(at(0)) == 4


@pytest.mark.parametrize("stop", ["8 hours", "480 minutes", "28800 seconds"])
@pytest.mark.parametrize("every", ["0.5 hours", "30 minutes", "1800 seconds"])
def test_times_of_the_clock_are_counted_in_any_unit(stop, every):
    time = time_left(stop=stop, every=every)
    time.start(at(0))
    assert time.count_evaluations(at(0)) == 16
    assert time.count_evaluations(at(9, seconds=3600.0)) == 14


def test_evaluations_by_the_clock_in_a_run_of_another_unit():
    stream = SimpleNamespace(
        totals=lambda stop: {"steps": 100.0, "epochs": stop.amount}
    )
    length = Length(D("3 epochs"), AfterTraining(evaluating=1.0, ending=1.0))
    time = predict_time(stream, length, D("1 minutes"), update_seconds=2.0, n_texts=0)
    time.start(at(0))
    assert time.count_evaluations(at(0)) == 4  # of 200 seconds


def test_nothing_is_said_of_what_is_over_in_a_moment():
    time = TimeLeft(D("10 steps"), training_seconds=1.0)
    time.start(at(0))
    assert time.describe(at(0)) == ""
