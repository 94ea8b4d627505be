import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_inverse_sqrt_schedule, get_wsd_schedule

from toque.config.schema import OptimConfig
from toque.errors import ConfigError
from toque.training.lr_schedules import cycle_at, make_schedule
from toque.units import Duration, Progress

NAMES = ("constant", "linear", "cosine", "cosine_restarts", "inverse_sqrt", "wsd")


def schedule(name, stop_after, expected=None, **settings):
    """Without warmup, from a peak of 1, where `settings` do not say otherwise."""
    settings = {"schedule": name, "peak_lr": 1.0, "warmup": "0 steps"} | settings
    optim = OptimConfig.model_validate(settings)
    return make_schedule(optim, Duration.parse(stop_after), expected)


def at(step):
    return Progress(step=step)


def rates(name, steps, **settings):
    lr_at = schedule(name, f"{steps} steps", **settings)
    return [lr_at(at(s)) for s in range(steps)]


def test_cosine_in_steps_is_the_textbooks():
    lr_at = schedule(
        "cosine", "110 steps", peak_lr=3e-4, min_lr=3e-5, warmup="10 steps"
    )
    assert lr_at(at(0)) == pytest.approx(3e-5)
    assert lr_at(at(4)) == pytest.approx(1.5e-4)
    assert lr_at(at(9)) == lr_at(at(10)) == pytest.approx(3e-4)
    assert lr_at(at(35)) == pytest.approx(
        3e-5 + 2.7e-4 * 0.5 * (1 + math.cos(math.pi / 4))
    )
    assert lr_at(at(60)) == pytest.approx(3e-5 + 2.7e-4 / 2)
    assert lr_at(at(110)) == lr_at(at(500)) == pytest.approx(3e-5)


def test_constant_after_warmup():
    constant = schedule("constant", "12 steps", warmup="2 steps")
    assert [constant(at(s)) for s in (0, 1, 2, 7, 12)] == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_a_share_of_the_run_is_that_many_of_its_units():
    assert rates("cosine", 100, warmup="10 %") == rates(
        "cosine", 100, warmup="10 steps"
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"warmup": "3 epochs"},
            'optim.warmup is "3 epochs", but the run lasts "1000 steps"',
        ),
        ({"schedule": "wsd", "cooldown": "2000 steps"}, "Use a shorter cooldown"),
        ({"schedule": "wsd", "cooldown": "3 epochs"}, "Use a shorter cooldown"),
        (
            {"schedule": "wsd", "cooldown": "80 %", "warmup": "50 %"},
            "Use a shorter cooldown",
        ),
    ],
)
def test_a_run_shorter_than_its_warmup_or_cooldown_is_refused(settings, words):
    optim = OptimConfig.model_validate({"warmup": "0 steps"} | settings)
    with pytest.raises(ConfigError, match=words):
        make_schedule(optim, Duration.parse("1000 steps"), {"steps": 1000, "epochs": 2})


def test_warmup_in_steps_of_a_run_in_epochs_ends_where_it_is_expected():
    expected = {"steps": 1000, "epochs": 2}
    lr_at = schedule("linear", "2 epochs", expected, warmup="100 steps")
    assert lr_at(Progress(step=49, epoch=0.098)) == pytest.approx(0.5)
    assert lr_at(Progress(step=100, epoch=0.2)) == pytest.approx(1.0)
    assert lr_at(Progress(step=550, epoch=1.1)) == pytest.approx(0.5)
    assert lr_at(Progress(step=1003, epoch=2.0)) == pytest.approx(0.0)


def test_the_first_update_learns_in_any_unit_when_the_steps_are_expected():
    run = ("constant", "5000 tokens")
    assert schedule(*run, warmup="1000 tokens")(Progress()) == 0.0
    expected = {"steps": 50, "tokens": 5000}
    assert schedule(*run, expected, warmup="1000 tokens")(Progress()) == 0.1


def test_without_estimates_warmup_multiplies_the_decay():
    lr_at = schedule("linear", "1 minutes", warmup="10 steps")
    assert lr_at(Progress(step=4, seconds=30)) == pytest.approx(0.25)


def test_a_run_shorter_than_its_warmup_only_warms_up():
    assert rates("cosine", 5, warmup="100 steps") == [0.01, 0.02, 0.03, 0.04, 0.05]


@given(
    name=st.sampled_from(NAMES),
    warmup=st.integers(0, 50),
    total=st.integers(51, 200),
    steps=st.lists(st.integers(0, 250), min_size=1),
)
def test_a_rate_is_between_zero_and_the_peak_and_depends_on_progress_alone(
    name, warmup, total, steps
):
    lr_at = schedule(name, f"{total} steps", min_lr=0.1, warmup=f"{warmup} steps")
    found = {step: lr_at(at(step)) for step in steps}
    assert all(0.0 < rate <= 1.0 for rate in found.values())
    assert all(lr_at(at(step)) == found[step] for step in reversed(steps))


def torchs(scheduler, steps):
    """The rates of `steps` updates under one of torch's schedulers."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs, found = scheduler(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    return found


def test_cosine_and_linear_are_torchs():
    cosine = torchs(
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50, 0.1), 50
    )
    assert rates("cosine", 50, min_lr=0.1) == pytest.approx(cosine)
    linear = torchs(lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.25, 50), 50)
    assert rates("linear", 50, min_lr=0.25) == pytest.approx(linear)


@pytest.mark.parametrize("growth", [1, 2, 3])
def test_restarts_are_torchs(growth):
    theirs = torchs(
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
            o, 10, growth, 1e-6
        ),
        400,
    )
    cycles = {"first": "10 steps", "growth": growth}
    assert rates("cosine_restarts", 400, min_lr=1e-6, cycles=cycles) == pytest.approx(
        theirs
    )


def test_restarts_with_the_numbers_of_the_ten_improvements():
    """Warmup of 1,000 steps, T_0 = 1,000, T_mult = 2, eta_min = 1e-6."""
    given = {"peak_lr": 1e-3, "min_lr": 1e-6, "warmup": "1000 steps"}
    lr_at = schedule("cosine_restarts", "8000 steps", **given)
    assert lr_at(at(499)) == pytest.approx(5e-4)
    for restart in (1000, 2000, 4000):  # cycles of 1,000, 2,000 and 4,000 updates
        assert lr_at(at(restart)) == pytest.approx(1e-3)
    assert lr_at(at(1500)) == lr_at(at(3000)) == pytest.approx((1e-3 + 1e-6) / 2)
    assert lr_at(at(1999)) == pytest.approx(1e-6, rel=0.01)


@given(st.integers(1, 5000), st.integers(1, 4), st.integers(0, 10**7))
def test_a_cycle_holds_its_time(first, growth, elapsed):
    since, length = cycle_at(float(elapsed), float(first), growth)
    assert 0.0 <= since < length
    began = elapsed - since
    assert (
        began == pytest.approx(first * (length / first - 1) / max(1, growth - 1))
        or growth == 1
    )


def test_inverse_square_root_is_transformers():
    theirs = torchs(lambda o: get_inverse_sqrt_schedule(o, 20), 200)
    mine = rates("inverse_sqrt", 200, warmup="20 steps")
    assert mine[20:] == pytest.approx(theirs[20:])
    assert mine[80] == pytest.approx(0.5)
    assert mine[19] == mine[20] == 1.0


@pytest.mark.parametrize("warmup", ["3 %", "0 %"])
@pytest.mark.parametrize(
    ("stop_after", "expected", "after"),
    [
        (
            "3 epochs",
            {"steps": 300, "epochs": 3},
            lambda s: Progress(step=s, epoch=s / 100),
        ),
        ("20 minutes", {}, lambda s: Progress(step=s, seconds=4.0 * s)),
        ("6000 examples", {"steps": 300}, lambda s: Progress(step=s, examples=20 * s)),
    ],
)
def test_inverse_square_root_is_the_same_in_any_unit(
    warmup, stop_after, expected, after
):
    in_steps = rates("inverse_sqrt", 300, warmup=warmup)
    lr_at = schedule("inverse_sqrt", stop_after, expected, warmup=warmup)
    assert [lr_at(after(s)) for s in range(10, 300)] == pytest.approx(in_steps[10:])
    assert in_steps[-1] == pytest.approx(math.sqrt((9 if warmup == "3 %" else 1) / 299))


def test_warmup_stable_decay_is_transformers():
    options = {"num_training_steps": 100, "decay_type": "linear", "min_lr_ratio": 0.1}
    theirs = torchs(lambda o: get_wsd_schedule(o, 10, 40, **options), 100)
    given = {"warmup": "10 steps", "min_lr": 0.1}
    mine = rates("wsd", 100, cooldown="40 %", **given)
    assert mine[10:] == pytest.approx(theirs[10:])
    assert rates("wsd", 100, cooldown="40 steps", **given) == mine


def test_a_cooldown_in_a_unit_that_cannot_be_placed_is_refused():
    with pytest.raises(ConfigError, match=r"optim\.cooldown"):
        schedule("wsd", "20 minutes", cooldown="100 steps")
