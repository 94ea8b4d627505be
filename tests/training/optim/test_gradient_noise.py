"""Gradient noise: its annealing, its independence of the past, its size."""

import pytest
import torch
from torch import nn

from toque.training.optim.gradient_noise import GradientNoise


def noise_of(
    step: int, *, seed: int = 3, names: tuple[str, ...] = ("a", "b")
) -> dict[str, object]:
    model = nn.ParameterDict(
        {name: nn.Parameter(torch.zeros(200, 300)) for name in names}
    )
    for parameter in model.values():
        parameter.grad = torch.zeros_like(parameter)
    GradientNoise(eta=0.3, gamma=0.55, seed=seed).add(model, step)
    return {name: p.grad for name, p in model.items()}


def test_the_variance_anneals_as_in_the_paper() -> None:
    noise = GradientNoise(eta=0.3, gamma=0.55, seed=0)
    variances = [noise.deviation(t) ** 2 for t in (0, 1000, 10_000, 30_000)]
    assert variances == pytest.approx([0.3, 0.0067, 0.0019, 0.0010], rel=0.04)


def test_it_is_normal_of_that_variance() -> None:
    drawn = torch.cat([g.flatten() for g in noise_of(0).values()])  # type: ignore[attr-defined]
    assert float(drawn.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(drawn.var()) == pytest.approx(0.3, rel=0.02)
    inside = (drawn.abs() < 0.3**0.5).float().mean()
    assert float(inside) == pytest.approx(0.6827, abs=0.01)


def test_it_is_a_function_of_seed_step_and_name() -> None:
    first, again = noise_of(5), noise_of(5, names=("b", "a"))
    assert torch.equal(
        first["a"], again["a"]
    )  # the order of parameters does not matter
    assert not torch.equal(first["a"], first["b"])
    assert not torch.equal(first["a"], noise_of(6)["a"])
    assert not torch.equal(first["a"], noise_of(5, seed=4)["a"])


def test_nothing_is_drawn_from_the_common_generator() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    noise_of(2)
    assert torch.equal(torch.rand(3), expected)
