"""Averages of the weights: their formulas, out of the way of training, and through a resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toque.errors import CheckpointError
from toque.training.optim.weight_average import WeightAverage
from toque.units import Duration, Progress


def run_of(average: WeightAverage, values: list[float]) -> nn.Linear:
    """One weight that takes `values`, one an update, and a frozen one."""
    model = nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    for step, value in enumerate(values):
        with torch.no_grad():
            model.weight.fill_(value)
        average.update(model, Progress(step=step), Progress(step=step + 1))
    return model


def test_ema_is_its_recurrence() -> None:
    average, values = WeightAverage("ema", decay=0.5), [1.0, 2.0, 4.0, 8.0]
    model = run_of(average, values)
    expected = values[0]
    for n, value in enumerate(values[1:], start=2):
        keep = min(0.5, (1 + n) / (10 + n))
        expected = keep * expected + (1 - keep) * value
    assert average.weights(model)["weight"].item() == pytest.approx(expected)
    assert average.weights(model).keys() == {"weight"}  # what is frozen needs no average


def test_last_is_the_mean_of_the_last_points() -> None:
    average = WeightAverage("last", last=3, every=Duration(2, "steps"))
    model = run_of(average, [float(i) for i in range(1, 12)])
    assert average.weights(model)["weight"].item() == pytest.approx((6 + 8 + 10) / 3)


def test_before_the_first_point_the_model_is_its_own_average() -> None:
    average = WeightAverage("last", last=3, every=Duration(20, "steps"))
    model = run_of(average, [5.0, 7.0])
    assert average.weights(model)["weight"].item() == 7.0


def test_in_place_leaves_the_weights_as_they_were() -> None:
    average = WeightAverage("ema", decay=0.9)
    model = run_of(average, [1.0, 3.0])
    with average.in_place(model):
        assert 1.0 < model.weight.item() < 3.0
    assert model.weight.item() == 3.0


@pytest.mark.parametrize("kind", ["ema", "last"])
def test_saved_and_loaded_it_goes_on_to_the_same_bits(kind: str) -> None:
    def fresh() -> WeightAverage:
        return WeightAverage(kind, decay=0.7, last=2, every=Duration(3, "steps"))  # type: ignore[arg-type]

    values = [0.1 * i * i for i in range(12)]
    whole, first, second = fresh(), fresh(), fresh()
    model = run_of(whole, values)
    part = run_of(first, values[:7])
    second.load(part, {k: t.clone() for k, t in first.tensors().items()}, where="here")
    for step, value in enumerate(values[7:], start=7):
        with torch.no_grad():
            part.weight.fill_(value)
        second.update(part, Progress(step=step), Progress(step=step + 1))
    assert torch.equal(whole.weights(model)["weight"], second.weights(part)["weight"])


def test_another_models_average_is_refused_by_name() -> None:
    average = WeightAverage("ema")
    run_of(average, [1.0])
    with pytest.raises(CheckpointError, match="ema/weight is no average"):
        WeightAverage("ema").load(nn.Linear(2, 1), average.tensors(), where="here")
