"""Runs whose length is the clock's: what comes after training is told before it, and kept free."""

import json
from collections.abc import Callable

import pytest

from fixtures.kitchens import Notices, tiny_config
from toque.config import load_config
from toque.config.dump import to_yaml
from toque.errors import ConfigError
from toque.training.stopping import CommandClock
from toque.workflows.diagnosis.training_session import StopAt
from toque.workflows.run_length import extrapolate_seconds
from toque.workflows.train import train


class Ticking:
    """A clock on which a second goes by with every update; it watches the run as a callback."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def on_step_begin(self, state) -> None:
        self.now += 1.0


@pytest.fixture
def settings(own_kitchen):
    own = {"warmup": "10 %"}, {"evaluate_every": "10 steps"}, {"generate": 1}
    config = tiny_config(
        **dict(zip(("optim", "train", "evaluation"), own, strict=True))
    )
    (own_kitchen / "run.yaml").write_text(to_yaml(config))
    return lambda *overrides: load_config("run.yaml", overrides)


def begun(told: list[str]) -> str:
    return next(text for text in told if text.startswith("toque "))


def test_a_total_counts_the_whole_command(settings):
    clock, notices = Ticking(), Notices()
    command = CommandClock(
        clock, began=clock.now - 100.0
    )  # a hundred seconds went into reading
    limited = settings("train.stop_after=2 minutes total")
    run = train(limited, clock=command, callbacks=[clock], reporter=notices)
    assert run.reason == "finished"
    assert run.step > 0
    assert run.model.exists()
    assert 110.0 < clock.now - command.began <= 120.0
    assert "until 2 minutes total: reading and measuring took 1:40 of it" in begun(
        notices.notices
    )
    assert "the last scores and texts will take about" in begun(notices.notices)
    start = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert float(start["stop_after"].removesuffix(" minutes")) < (120 - 100) / 60
    rates = [e["lr"] for e in run.history if e["event"] == "step"]
    assert rates[-1] < 0.1 * max(rates)
    again = train(settings("train.stop_after=2 minutes total"))
    assert (
        again.step == run.step
    )  # it is done, however much faster this machine has become


def test_a_total_that_has_come_to_its_end_goes_on_when_it_is_raised(settings):
    clock, notices = Ticking(), Notices()

    def go(length: str):
        command = CommandClock(clock, began=clock.now - 20.0)
        resolved = settings(
            f"train.stop_after={length} seconds total", "optim.schedule=linear"
        )
        return train(resolved, clock=command, callbacks=[clock], reporter=notices)

    first = go("30")
    assert (first.reason, 0 < first.step <= 10) == ("finished", True)
    longer = go("60")
    assert (longer.reason, 20 < longer.step <= 40) == ("finished", True)
    (said,) = [
        text for text in notices.notices if "it continues to 60 seconds total" in text
    ]
    assert "rises to its value at this point of a run of 60 seconds total" in said
    assert go("60").step == longer.step


def test_a_run_in_steps_ends_at_its_time_limit_and_continues_when_that_is_raised(
    settings,
):
    """A run in epochs had no limit, and took 11 of the 5 minutes that `init --for` was told."""
    clock, notices = Ticking(), Notices()

    def go(limit: str):
        command = CommandClock(clock, began=clock.now - 20.0)
        resolved = settings(
            "train.stop_after=60 steps", f"train.time_limit={limit} seconds"
        )
        return train(resolved, clock=command, callbacks=[clock], reporter=notices)

    first = go("30")
    assert (first.reason, 0 < first.step <= 10) == ("finished", True)
    assert (
        "or 0:30 for the entire command: reading and measuring took 0:20 of it"
        in begun(notices.notices)
    )
    (said,) = [text for text in notices.notices if "ended training after" in text]
    assert "train.time_limit, 30 seconds, " in said
    assert "of train.stop_after, 60 steps" in said
    assert go("30").step == first.step  # it is done
    rest = go("600")
    assert (rest.reason, rest.step) == ("finished", 60)


def test_a_time_limit_that_leaves_nothing_is_refused_by_its_name(settings):
    clock = Ticking()
    command = CommandClock(clock, began=clock.now - 100.0)
    with pytest.raises(
        ConfigError,
        match=r'^train.time_limit is "90 seconds": reading and measuring took 1:40 of it',
    ):
        train(
            settings("train.stop_after=9 steps", "train.time_limit=90 seconds"),
            clock=command,
        )


def test_a_total_that_leaves_nothing_is_refused_with_what_was_measured(settings):
    clock = Ticking()
    command = CommandClock(clock, began=clock.now - 100.0)
    with pytest.raises(
        ConfigError, match=r"took 1:40 of it.* No time remains for training"
    ):
        train(settings("train.stop_after=90 seconds total"), clock=command)


@pytest.mark.parametrize("length", ["0.02 minutes", "1 second"])
def test_by_the_clock_of_its_updates_nothing_is_taken_off(settings, length):
    notices = Notices()
    run = train(settings(f"train.stop_after={length}"), reporter=notices)
    assert run.step > 0
    start = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert start["stop_after"].startswith(length)


def test_a_run_in_steps_is_not_measured_for_it(settings):
    notices = Notices()
    train(settings("train.stop_after=2 steps"), reporter=notices)
    assert "take about" not in begun(notices.notices)


def test_telling_changes_no_number(settings):
    """Measuring the end draws nothing and leaves the model as it was."""
    plain = train(settings("train.stop_after=3 steps"))
    clock = CommandClock(lambda: 0.0, began=0.0)
    told = settings("train.stop_after=1000 minutes total", "run_dir=other")
    limited = train(told, clock=clock, callbacks=[StopAt(3)])
    assert [step for step, _ in limited.losses] == [1, 2, 3]
    assert limited.losses[0] == plain.losses[0]


class CostlyReadings(Ticking):
    """A clock on which time goes by whenever someone reads it, as a text's count does."""

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_texts_without_time_are_left_out_and_counted(settings):
    clock, notices = CostlyReadings(), Notices()
    command = CommandClock(clock, began=clock.now)
    words = (
        "train.stop_after=100 seconds total",
        "evaluation.generate=16",
        "data.store=many",
    )
    words += (
        "data.validation_fraction=0.3",
        "evaluation.texts=0",
        "evaluation.max_examples=4",
    )
    run = train(settings(*words), clock=command, callbacks=[clock], reporter=notices)
    assert run.step >= 10
    scores = json.loads((run.folder / "evaluation.json").read_text())["generated"]
    assert scores["texts"] + scores["texts_left_out"] == 16
    assert 0 < scores["texts_left_out"] <= 16
    said = next(text for text in notices.notices if "of 16 texts not generated" in text)
    assert "the time limit of train.stop_after left no time for them" in said
    assert clock.now - command.began <= 110.0  # a reading after each of the last steps


def test_a_model_of_a_few_updates_writes_no_texts(settings):
    clock, notices = Ticking(), Notices()
    command = CommandClock(clock, began=clock.now - 20.0)
    limited = settings("train.stop_after=25 seconds total")
    run = train(limited, clock=command, callbacks=[clock], reporter=notices)
    assert 0 < run.step < 10
    assert (run.folder / "samples.jsonl").read_text() == ""
    said = [text for text in notices.notices if "1 of 1 text not generated" in text]
    assert said
    assert all(
        "random weights generates no texts before update 10" in text for text in said
    )
    evaluated = [e for e in run.history if e["event"] == "evaluation"]
    assert [e["texts_left_out"] for e in evaluated] == [1] * len(evaluated)


@pytest.mark.parametrize("length", ["5 steps", "60 seconds total"])
def test_a_finished_run_says_so_without_a_forecast(settings, length):
    """`train` told of 1:20 of training and did nothing."""

    def again() -> list[str]:
        clock, notices = Ticking(), Notices()
        command = CommandClock(clock, began=clock.now - 20.0)
        resolved = settings(f"train.stop_after={length}")
        steps.append(
            train(resolved, clock=command, callbacks=[clock], reporter=notices).step
        )
        return notices.notices

    steps = list[int]()
    assert any("in all" in text or text.startswith("toque ") for text in again())
    told = again()
    (said,) = [text for text in told if "is finished" in text]
    assert f"trained to step {steps[0]:,}." in said
    assert f'raise train.stop_after, which is "{length}"' in said
    assert steps[0] == steps[1]
    assert not any(
        "in all" in t or "of training" in t or t.startswith("toque ") for t in told
    )


def test_other_settings_have_no_total(tmp_path):
    (tmp_path / "run.yaml").write_text("train: {save_every: 5 minutes total}")
    with pytest.raises(ConfigError, match=r"train\.save_every"):
        load_config(tmp_path / "run.yaml")


def machine(*, loading: float, prompts: float, token: float) -> Callable[[int], float]:
    """Seconds of writing: the first time loads kernels, and every time reads the prompts."""
    calls: list[int] = []

    def timed(tokens: int) -> float:
        calls.append(tokens)
        return prompts + tokens * token + (loading if len(calls) == 1 else 0.0)

    return timed


@pytest.mark.parametrize(
    ("loading", "prompts", "token"),
    [(30.0, 1.1, 0.01), (3.0, 4.0, 0.02), (0.0, 0.0, 0.5), (9.0, 0.001, 0.001)],
)
def test_loading_and_reading_prompts_are_not_taken_for_tokens(
    loading: float, prompts: float, token: float
) -> None:
    """A text of 512 tokens was foreseen by two of the first: 20 to 60 times too long."""
    told = extrapolate_seconds(
        machine(loading=loading, prompts=prompts, token=token), 512
    )
    assert told == pytest.approx(prompts + 512 * token, rel=0.5)
    disturbed = extrapolate_seconds(lambda tokens: 2.0 if tokens < 10 else 1.0, 512)
    assert disturbed == pytest.approx(2.0 + 510 * 0.1)
