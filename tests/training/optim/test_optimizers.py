"""Adafactor, Muon and 8-bit AdamW against other people's code, and against interruption."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as StockAdafactor

from toque.training.optim.adafactor import Adafactor
from toque.training.optim.adamw8bit import AdamW8bit, code_book, from_bytes, to_bytes
from toque.training.optim.factory import (
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
    state_bytes,
)
from toque.training.optim.muon import MuonWithAdamW, orthogonalised

NEW = ("adafactor", "muon", "adamw8bit")


class Wide(nn.Module):
    """Large enough for 8-bit states: a table, matrices both ways round, vectors, three axes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(70, 64)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.lm_head = nn.Linear(64, 70, bias=False)


def gradients(model, step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator) * scale * 10.0 ** (step % 3 - 1)


def updates(model, optimizer, steps, lr=0.01):
    for step in steps:
        gradients(model, step)
        for group in optimizer.param_groups:
            group["lr"] = lr / (1 + step)
        optimizer.step()


def test_adafactor_is_the_stock_one():
    model, other = Wide(), Wide()
    ours = Adafactor([{"params": list(model.parameters()), "weight_decay": 0.1}])
    stock = StockAdafactor(
        other.parameters(), lr=0.0, weight_decay=0.1, scale_parameter=False, relative_step=False
    )
    updates(model, ours, range(6))
    updates(other, stock, range(6))
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_muon_is_torchs_on_matrices_and_adamw_on_the_rest():
    model, other = Wide(), Wide()
    inner = [other.up.weight, other.down.weight]
    rest = [p for p in other.parameters() if all(p is not q for q in inner)]
    muon = torch.optim.Muon(inner, lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim > 1]},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.0,
        weight_decay=0.1,
    )
    ours = build_optimizer(model, name="muon", weight_decay=0.1)
    updates(model, ours, range(6))
    for step in range(6):
        gradients(other, step)
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + step)
            optimizer.step()
    for name in ("embed.weight", "lm_head.weight", "up.bias", "cube"):
        torch.testing.assert_close(model.get_parameter(name), other.get_parameter(name))
    for name in ("up.weight", "down.weight"):  # torch's own iterates in bfloat16
        moved = (model.get_parameter(name) - other.get_parameter(name)).detach()
        step_size = 0.01 * 0.2 * 96**0.5 * 2.5
        assert float(moved.abs().max()) < 0.02 * step_size, name


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (2, 16, 16)])
def test_orthogonalised_has_singular_values_near_one(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape)))
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.3


def test_muon_leaves_tables_and_vectors_to_adamw():
    model = Wide()
    names = {id(p): n for n, p in model.named_parameters()}
    optimizer = build_optimizer(model, name="muon")
    assert isinstance(optimizer, MuonWithAdamW)
    updates(model, optimizer, [0])
    by_muon = {names[id(p)] for p, state in optimizer.state.items() if "momentum" in state}
    assert by_muon == {"up.weight", "down.weight"}


@pytest.mark.parametrize("signed", [True, False])
def test_bytes_hold_numbers_to_within_a_code(signed):
    torch.manual_seed(1)
    values = torch.randn(7, 333) * torch.logspace(-6, 2, 7)[:, None]
    values = values if signed else values.square()
    codes, scale = to_bytes(values, signed=signed)
    back = from_bytes(codes, scale, signed=signed)
    largest = scale.repeat_interleave(256)[: values.numel()].view(values.shape)
    assert float(((back - values).abs() / largest).max()) < 0.02
    assert codes.dtype == torch.uint8
    assert len(code_book(signed=signed)) == 256
    if not signed:
        assert bool((back[values > 0] > 0).all())


def test_8_bit_adamw_follows_adamw():
    model, other = Wide(), Wide()
    ours = build_optimizer(model, name="adamw8bit", weight_decay=0.1)
    assert isinstance(ours, AdamW8bit)
    updates(model, ours, range(8))
    updates(other, build_optimizer(other, weight_decay=0.1), range(8))
    start = Wide()
    for name in ("up.weight", "down.weight"):
        exact = other.get_parameter(name) - start.get_parameter(name)
        off = model.get_parameter(name) - other.get_parameter(name)
        assert 0 < float(off.detach().norm() / exact.detach().norm()) < 0.05, name
    for name in ("embed.weight", "lm_head.weight", "up.bias", "cube"):  # not in bytes
        torch.testing.assert_close(model.get_parameter(name), other.get_parameter(name))


def test_state_sizes_are_what_is_kept():
    for name, share in [("adamw", 2.0), ("adafactor", 0.2), ("muon", 2.0), ("adamw8bit", 2.0)]:
        model = Wide()
        optimizer = build_optimizer(model, name=name)
        expected = state_bytes(optimizer)
        updates(model, optimizer, [0])
        tensors = optimizer_tensors(optimizer, model).values()
        assert sum(t.numel() * t.element_size() for t in tensors) == expected
        assert expected < share * 4 * sum(p.numel() for p in model.parameters()) + 200
    matrix = nn.Sequential(nn.Linear(256, 256, bias=False))
    assert state_bytes(build_optimizer(matrix, name="adamw8bit")) < 0.26 * state_bytes(
        build_optimizer(matrix)
    )


@pytest.mark.parametrize("name", ["adamw", *NEW])
def test_resumed_anywhere_it_continues_to_the_same_bits(name):
    stop = random.Random(name).randrange(1, 7)
    whole = Wide()
    updates(whole, build_optimizer(whole, name=name), range(8))
    model = Wide()
    first = build_optimizer(model, name=name)
    updates(model, first, range(stop))
    saved = {key: t.clone() for key, t in optimizer_tensors(first, model).items()}
    resumed = copy.deepcopy(model)
    second = build_optimizer(resumed, name=name)
    load_optimizer_tensors(second, resumed, saved, where="here")
    updates(resumed, second, range(stop, 8))
    for key, p in resumed.named_parameters():
        assert torch.equal(p, whole.get_parameter(key)), (key, stop)


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("before", [0, 3])
def test_the_device_can_call_an_update_off(name, before):
    model = Wide()
    optimizer = build_optimizer(model, name=name, weight_decay=0.5)
    updates(model, optimizer, range(before))
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    state = {n: t.clone() for n, t in optimizer_tensors(optimizer, model).items()}
    gradients(model, 9)
    for p in model.parameters():
        p.grad.view(-1)[0] = torch.nan
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    optimizer.found_inf = None
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    after = optimizer_tensors(optimizer, model)
    assert all(torch.equal(after[n], t) for n, t in state.items())
    updates(model, optimizer, [before])
    other = Wide()
    updates(other, build_optimizer(other, name=name, weight_decay=0.5), range(before + 1))
    assert all(torch.equal(p, other.get_parameter(n)) for n, p in model.named_parameters())
