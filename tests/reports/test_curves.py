import math

import pytest

from toque.reports.curves import points, rates, smoothed, thinned


def test_thinning_keeps_the_spikes_and_the_breaks():
    xs = [float(i) for i in range(10_000)]
    ys: list[float | None] = [1.0 + math.sin(x) / 100 for x in xs]
    ys[4321], ys[777], ys[9001] = 99.0, -99.0, None
    thin_xs, thin_ys = thinned((xs, ys), most=200)
    assert len(thin_xs) <= 250
    assert (4321.0, 99.0) in zip(thin_xs, thin_ys, strict=True)
    assert (777.0, -99.0) in zip(thin_xs, thin_ys, strict=True)
    assert None in thin_ys
    assert thin_xs == sorted(thin_xs)


def test_smoothing_keeps_a_constant_and_its_start():
    assert smoothed(([1.0, 2.0, 3.0], [5.0, 5.0, None]))[1] == [
        pytest.approx(5.0),
        pytest.approx(5.0),
        None,
    ]
    xs = [float(i) for i in range(100)]
    _, ys = smoothed((xs, [0.0] * 50 + [1.0] * 50))
    assert ys[49] == 0.0
    assert 0 < ys[50] < ys[51] < ys[99] <= 1.0


def test_missing_and_infinite_values_are_none():
    events = [
        {"step": 1, "loss": 2},
        {"step": 2, "loss": None},
        {"step": 3, "loss": math.inf},
        {"step": 4},
    ]
    assert points(events, "loss") == ([1.0, 2.0, 3.0, 4.0], [2.0, None, None, None])


def test_rates_are_shares_and_never_divide_by_zero():
    events = [{"step": 1, "wait": 1.0, "all": 4.0}, {"step": 2, "wait": 0.0, "all": 0.0}]
    assert rates(events, "wait", "all")[1] == [0.25, None]
