from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_inverse_sqrt_schedule, get_wsd_schedule

from toque.errors import ConfigError
from toque.training.lr_schedules import SCHEDULES, Cycles, cycle_at, make_schedule
from toque.units import Duration, Progress

D = Duration.parse


def at(step):
    return Progress(step=step)


def test_cosine_in_steps_is_the_textbooks():
    lr_at = make_schedule(
        "cosine", peak_lr=3e-4, min_lr=3e-5, warmup=D("10 steps"), stop_after=D("110 steps")
    )
    assert lr_at(at(0)) == pytest.approx(3e-5)
    assert lr_at(at(4)) == pytest.approx(1.5e-4)
    assert lr_at(at(9)) == lr_at(at(10)) == pytest.approx(3e-4)
    assert lr_at(at(35)) == pytest.approx(3e-5 + 2.7e-4 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert lr_at(at(60)) == pytest.approx(3e-5 + 2.7e-4 / 2)
    assert lr_at(at(110)) == pytest.approx(3e-5)
    assert lr_at(at(500)) == pytest.approx(3e-5)


def test_linear_and_constant():
    options = {"peak_lr": 1.0, "warmup": D("2 steps"), "stop_after": D("12 steps")}
    linear, constant = (make_schedule(n, **options) for n in ("linear", "constant"))
    assert [linear(at(s)) for s in (0, 1, 2, 7, 12)] == pytest.approx([0.5, 1, 1, 0.5, 0])
    assert [constant(at(s)) for s in (0, 1, 2, 7, 12)] == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_no_warmup_begins_at_the_peak():
    lr_at = make_schedule("cosine", peak_lr=2.0, warmup=D("0 steps"), stop_after=D("4 steps"))
    assert lr_at(at(0)) == 2.0


def test_a_share_of_the_run_is_that_many_of_its_units():
    share = make_schedule("cosine", peak_lr=1.0, warmup=D("10 %"), stop_after=D("100 steps"))
    steps = make_schedule("cosine", peak_lr=1.0, warmup=D("10 steps"), stop_after=D("100 steps"))
    assert [share(at(s)) for s in range(101)] == [steps(at(s)) for s in range(101)]


def test_warmup_in_steps_of_a_run_in_epochs_ends_where_it_is_expected():
    lr_at = make_schedule(
        "linear",
        peak_lr=1.0,
        warmup=D("100 steps"),
        stop_after=D("2 epochs"),
        expected={"steps": 1000, "epochs": 2},
    )
    assert lr_at(Progress(step=49, epoch=0.098)) == pytest.approx(0.5)
    assert lr_at(Progress(step=100, epoch=0.2)) == pytest.approx(1.0)
    assert lr_at(Progress(step=550, epoch=1.1)) == pytest.approx(0.5)
    assert lr_at(Progress(step=1003, epoch=2.0)) == pytest.approx(0.0)


def test_the_first_update_learns_in_any_unit_when_the_steps_are_expected():
    options = {"peak_lr": 1.0, "warmup": D("1000 tokens"), "stop_after": D("5000 tokens")}
    assert make_schedule("constant", **options)(Progress()) == 0.0
    expected = {"steps": 50, "tokens": 5000}
    assert make_schedule("constant", **options, expected=expected)(Progress()) == 0.1


def test_without_estimates_warmup_multiplies_the_decay():
    lr_at = make_schedule("linear", peak_lr=1.0, warmup=D("10 steps"), stop_after=D("1 minutes"))
    assert lr_at(Progress(step=4, seconds=30)) == pytest.approx(0.25)


def test_a_run_shorter_than_its_warmup_only_warms_up():
    lr_at = make_schedule("cosine", peak_lr=1.0, warmup=D("100 steps"), stop_after=D("5 steps"))
    assert [lr_at(at(s)) for s in range(5)] == [0.01, 0.02, 0.03, 0.04, 0.05]


def test_an_unknown_name_lists_the_known():
    with pytest.raises(
        ConfigError, match=r"'cosin' is not a learning rate.*constant, linear, cosine"
    ):
        make_schedule("cosin", peak_lr=1.0, warmup=D("0 steps"), stop_after=D("1 steps"))


@given(
    name=st.sampled_from(SCHEDULES),
    warmup=st.integers(0, 50),
    total=st.integers(51, 200),
    steps=st.lists(st.integers(0, 250), min_size=1),
)
def test_a_rate_is_between_zero_and_the_peak_and_depends_on_progress_alone(
    name, warmup, total, steps
):
    lr_at = make_schedule(
        name,
        peak_lr=1.0,
        min_lr=0.1,
        warmup=Duration(warmup, "steps"),
        stop_after=Duration(total, "steps"),
    )
    rates = {step: lr_at(at(step)) for step in steps}
    assert all(0.0 < rate <= 1.0 for rate in rates.values())
    assert all(lr_at(at(step)) == rates[step] for step in reversed(steps))


def torchs(scheduler, steps, peak=1.0):
    """The rates of `steps` updates under one of torch's schedulers."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    schedule, rates = scheduler(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def ours(name, steps, **options):
    given = {"peak_lr": 1.0, "warmup": D("0 steps"), "stop_after": D(f"{steps} steps")} | options
    lr_at = make_schedule(name, **given)
    return [lr_at(at(s)) for s in range(steps)]


def test_cosine_and_linear_are_torchs():
    cosine = torchs(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50, 0.1), 50)
    assert ours("cosine", 50, min_lr=0.1) == pytest.approx(cosine)
    linear = torchs(lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.25, 50), 50)
    assert ours("linear", 50, min_lr=0.25) == pytest.approx(linear)


@pytest.mark.parametrize("growth", [1, 2, 3])
def test_restarts_are_torchs(growth):
    theirs = torchs(
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 10, growth, 1e-6), 400
    )
    cycles = Cycles(D("10 steps"), growth)
    assert ours("cosine_restarts", 400, min_lr=1e-6, cycles=cycles) == pytest.approx(theirs)


def test_restarts_with_the_numbers_of_the_ten_improvements():
    """Warmup of 1,000 steps, T_0 = 1,000, T_mult = 2, eta_min = 1e-6."""
    lr_at = make_schedule(
        "cosine_restarts",
        peak_lr=1e-3,
        min_lr=1e-6,
        warmup=D("1000 steps"),
        stop_after=D("8000 steps"),
    )
    assert lr_at(at(499)) == pytest.approx(5e-4)
    for restart in (1000, 2000, 4000):  # cycles of 1,000, 2,000 and 4,000 updates
        assert lr_at(at(restart)) == pytest.approx(1e-3)
    assert lr_at(at(1500)) == pytest.approx((1e-3 + 1e-6) / 2)
    assert lr_at(at(3000)) == pytest.approx((1e-3 + 1e-6) / 2)
    assert lr_at(at(1999)) == pytest.approx(1e-6, rel=0.01)


@given(st.integers(1, 5000), st.integers(1, 4), st.integers(0, 10**7))
def test_a_cycle_holds_its_time(first, growth, elapsed):
    since, length = cycle_at(float(elapsed), float(first), growth)
    assert 0.0 <= since < length
    began = elapsed - since
    assert began == pytest.approx(first * (length / first - 1) / max(1, growth - 1)) or growth == 1


def test_inverse_square_root_is_transformers():
    theirs = torchs(lambda o: get_inverse_sqrt_schedule(o, 20), 200)
    mine = ours("inverse_sqrt", 200, warmup=D("20 steps"))
    assert mine[20:] == pytest.approx(theirs[20:])
    assert mine[80] == pytest.approx(0.5)
    assert mine[19] == mine[20] == 1.0


def test_warmup_stable_decay_is_transformers():
    theirs = torchs(
        lambda o: get_wsd_schedule(
            o, 10, 40, num_training_steps=100, decay_type="linear", min_lr_ratio=0.1
        ),
        100,
    )
    mine = ours("wsd", 100, warmup=D("10 steps"), min_lr=0.1, cooldown=D("40 %"))
    assert mine[10:] == pytest.approx(theirs[10:])
    in_steps = ours("wsd", 100, warmup=D("10 steps"), min_lr=0.1, cooldown=D("40 steps"))
    assert in_steps == mine


def test_a_cooldown_in_a_unit_that_cannot_be_placed_is_refused():
    with pytest.raises(ConfigError, match=r"optim\.cooldown"):
        make_schedule(
            "wsd",
            peak_lr=1.0,
            warmup=D("0 steps"),
            stop_after=D("20 minutes"),
            cooldown=D("100 steps"),
        )
