"""The exponential average of weights: its formula, skipped updates, and continued state."""

import pytest
import torch
from torch import nn

from toque.training.optim.factory import (
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
    state_bytes,
    step_if,
)
from toque.training.optim.weight_average import AVERAGE, keep_average

NAMES = ("adamw", "adafactor", "muon", "adamw8bit", "torch.optim:SGD")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(70, 64)
        self.linear = nn.Linear(64, 96)
        self.unused = nn.Linear(4, 4)


def averaging(model, decay, name="adamw"):
    optimizer = build_optimizer(model, name=name)
    keep_average(optimizer, decay)
    return optimizer


def update(model, optimizer, step, *, good=True, device="cpu"):
    generator = torch.Generator().manual_seed(step)
    for name, p in model.named_parameters():
        if not name.startswith("unused"):
            p.grad = torch.randn(p.shape, generator=generator)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    step_if(optimizer, torch.tensor(good), torch.device(device), step=step)


def averages_of(model, optimizer):
    suffix = f"/{AVERAGE}"
    return {
        key.removesuffix(suffix): tensor.clone()
        for key, tensor in optimizer_tensors(optimizer, model).items()
        if key.endswith(suffix)
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decay", [0.15, 0.999])
def test_the_average_follows_its_formula(name, decay):
    model = Model()
    optimizer = averaging(model, decay, name)
    expected = {}
    for step in range(5):
        update(model, optimizer, step)
        d = min(decay, (1 + step) / (10 + step))
        for key, p in model.named_parameters():
            weight = p.detach().double()
            expected[key] = d * expected.get(key, weight) + (1 - d) * weight
    averages = averages_of(model, optimizer)
    # A weight without gradients has no state.
    assert averages.keys() == {k for k in expected if not k.startswith("unused")}
    for key, tensor in averages.items():
        torch.testing.assert_close(tensor.double(), expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_skipped_update_does_not_change_the_average(device):
    """On "meta" as on a GPU: the fused kernel decides, and the host does not wait."""
    model = Model()
    optimizer = averaging(model, 0.9)
    for step in range(2):
        update(model, optimizer, step)
    before = averages_of(model, optimizer)
    update(model, optimizer, 2, good=False, device=device)
    after = averages_of(model, optimizer)
    assert all(torch.equal(after[key], before[key]) for key in before)
    update(model, optimizer, 3, device=device)
    changed = averages_of(model, optimizer)
    assert not any(torch.equal(changed[key], before[key]) for key in before)


@pytest.mark.parametrize("name", NAMES)
def test_a_restart_continues_the_average_to_the_bit(name):
    whole, parted = Model(), Model()
    uninterrupted = averaging(whole, 0.9, name)
    first, second = averaging(parted, 0.9, name), averaging(parted, 0.9, name)
    for step in range(6):
        update(whole, uninterrupted, step)
    for step in range(3):
        update(parted, first, step)
    saved = {k: t.clone() for k, t in optimizer_tensors(first, parted).items()}
    load_optimizer_tensors(second, parted, saved, where="here", steps=3)
    for step in range(3, 6):
        update(parted, second, step)
    expected = optimizer_tensors(uninterrupted, whole)
    continued = optimizer_tensors(second, parted)
    assert continued.keys() == expected.keys()
    assert all(torch.equal(continued[key], expected[key]) for key in expected)


def test_an_average_begins_late_and_is_left_out_if_it_is_not_kept():
    model = Model()
    plain, kept = averaging(model, None), averaging(model, 0.9)
    update(model, plain, 0)
    saved = {k: t.clone() for k, t in optimizer_tensors(plain, model).items()}
    load_optimizer_tensors(kept, model, saved, where="here")
    assert not averages_of(model, kept)
    update(model, kept, 1)
    weights = dict(model.named_parameters())
    averages = averages_of(model, kept)
    assert averages
    assert all(torch.equal(tensor, weights[key]) for key, tensor in averages.items())

    again = averaging(model, None)
    saved = {k: t.clone() for k, t in optimizer_tensors(kept, model).items()}
    load_optimizer_tensors(again, model, saved, where="here")
    assert not averages_of(model, again)


@pytest.mark.parametrize("name", NAMES)
def test_the_expected_bytes_of_the_state_include_the_average(name):
    model = Model()
    plain, kept = averaging(model, None, name), averaging(model, 0.9, name)
    weights = sum(p.nbytes for p in model.parameters())
    assert state_bytes(kept) - state_bytes(plain) == weights
