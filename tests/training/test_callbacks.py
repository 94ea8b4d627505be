import pytest

from toque.training.callbacks import Callback, Callbacks, Requests, RunEnd, RunStart
from toque.training.stopping import Patience
from toque.units import Duration, Progress

START = RunStart(Progress(), Duration(10, "steps"))


def ended(error):
    return RunEnd("finished" if error is None else "error", Progress(), 0.0)


class Noting(Callback):
    def __init__(self, name, notes, *, fails=()):
        self.name, self.notes, self.fails = name, notes, fails

    def _note(self, event):
        self.notes.append(f"{self.name} {event}")
        if event in self.fails:
            raise RuntimeError(f"{self.name} {event}")

    def on_fit_start(self, start):
        self._note("start")

    def on_step(self, info):
        self._note("step")
        return Requests(save=True, reason=self.name)

    def on_fit_end(self, end):
        self._note(f"end {end.reason}")


def test_they_are_called_in_their_order_and_requests_come_together():
    notes = []
    callbacks = Callbacks([Noting("a", notes), Callback(), Noting("b", notes)])
    with callbacks.around(START, ended) as wants:
        assert wants == Requests()
        assert callbacks.on_step(None) == Requests(save=True, reason="a")
    assert notes == [
        "a start",
        "b start",
        "a step",
        "b step",
        "a end finished",
        "b end finished",
    ]


def test_every_one_that_started_ends_whatever_happens():
    notes = []
    callbacks = Callbacks([Noting("a", notes, fails={"end error"}), Noting("b", notes)])
    with (
        pytest.raises(RuntimeError, match="a end error"),
        callbacks.around(START, ended),
    ):
        raise ValueError
    assert notes[-2:] == ["a end error", "b end error"]


def test_one_that_never_started_does_not_end():
    notes = []
    callbacks = Callbacks([Noting("a", notes, fails={"start"}), Noting("b", notes)])
    with pytest.raises(RuntimeError, match="a start"), callbacks.around(START, ended):
        pytest.fail("not reached")
    assert notes == ["a start", "a end error"]


def test_state_goes_by_name_and_new_callbacks_start_afresh():
    def stoppers():
        return Patience(patience=3), Patience(patience=3, metric="bleu_gap")

    first, second = stoppers()
    first.on_evaluate(Progress(), {"loss": 2.0})
    second.on_evaluate(Progress(), {"bleu_gap": 5.0})
    second.on_evaluate(Progress(), {"bleu_gap": 6.0})
    state = Callbacks([Callback(), first, second]).state_dict()
    assert state == {
        "Patience": {
            "metric": "loss",
            "measured_by": {},
            "best": 2.0,
            "evaluations_without_improvement": 0,
        },
        "Patience.1": {
            "metric": "bleu_gap",
            "measured_by": {},
            "best": 5.0,
            "evaluations_without_improvement": 1,
        },
    }
    one, two = stoppers()
    Callbacks([one, two]).load_state_dict(state)
    assert (one.best, two.best, two.evaluations_without_improvement) == (2.0, 5.0, 1)
    Callbacks([Patience(patience=1)]).load_state_dict({"Gone": {}})


@pytest.mark.parametrize(
    ("options", "values", "stops_at"),
    [
        ({"patience": 2}, [3, 2, 2, 1.5, 1.6, 1.5], 6),
        ({"patience": 1}, [3, 3], 2),
        ({"patience": 2, "min_delta": 0.1}, [3, 2.95, 2.91], 3),
        ({"patience": 2, "min_delta": 0.1}, [3, 2.95, 2.89], None),
        (
            {"patience": 2},
            [float("nan"), float("-inf")],
            2,
        ),  # no number is no improvement
        ({"patience": 2, "rises": True}, [1.0, 2.0, float("nan"), 1.5], 4),
    ],
)
def test_early_stopping_counts_evaluations_without_improvement(
    options, values, stops_at
):
    stopping = Patience(**options)
    asked = [stopping.on_evaluate(Progress(), {"loss": value}) for value in values]
    stopped = [n for n, request in enumerate(asked, start=1) if request is not None]
    assert stopped == ([] if stops_at is None else [stops_at])


def test_a_run_that_now_goes_by_another_metric_begins_to_count():
    first = Patience(patience=3)
    for loss in (1.0, 2.0):
        first.on_evaluate(Progress(), {"loss": loss})
    state = first.state_dict()
    other = Patience(patience=3, metric="bleu", rises=True)
    other.load_state_dict(state)
    assert (other.best, other.evaluations_without_improvement) == (None, 0)
    same = Patience(patience=3)
    same.load_state_dict(state)
    assert (same.best, same.evaluations_without_improvement) == (1.0, 1)


@pytest.mark.parametrize(
    ("metric", "changed", "kept"),
    [
        ("loss", {"max_examples": 8}, False),
        ("loss", {"texts": 8}, True),
        ("bleu", {"texts": 8}, False),
        ("bleu", {"prompts": ["soup"]}, True),
    ],
)
def test_a_run_that_is_now_evaluated_otherwise_begins_to_count(metric, changed, kept):
    settings = {"max_examples": 512, "texts": 16, "prompts": []}
    first = Patience(patience=3, metric=metric, evaluation=settings)
    for value in (2.0, 2.0):
        first.on_evaluate(Progress(), {metric: value})
    second = Patience(patience=3, metric=metric, evaluation=settings | changed)
    second.load_state_dict(first.state_dict())
    found = (second.best, second.evaluations_without_improvement)
    assert found == ((2.0, 1) if kept else (None, 0))
