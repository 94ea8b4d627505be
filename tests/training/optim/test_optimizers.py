"""Optimizers: against other people's code, against interruption, and what they refuse."""

import copy
import random
from collections import deque

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as StockAdafactor

from toque.errors import CheckpointError, ConfigError
from toque.training.optim import matrix_optimizers
from toque.training.optim.factory import (
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
    state_bytes,
    step_if,
)
from toque.training.optim.matrix_optimizers import WithAdamW

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
        p.grad = (
            torch.randn(p.shape, generator=generator) * scale * 10.0 ** (step % 3 - 1)
        )


def updates(model, optimizer, steps, lr=0.01):
    for step in steps:
        gradients(model, step)
        for group in optimizer.param_groups:
            group["lr"] = lr / (1 + step)
        optimizer.step()


@pytest.mark.parametrize("scale", [1.0, 1e-7])
def test_adafactor_scales_by_the_weight_as_t5s_did(scale):
    """torch's own floor of a gradient, 1e-7, would make every small update as long as a large."""
    model, other = Wide(), Wide()
    ours = build_optimizer(model, name="adafactor", weight_decay=0.0)
    stock = StockAdafactor(
        other.parameters(),
        lr=0.0,
        scale_parameter=True,
        relative_step=False,
        warmup_init=False,
    )
    for optimizer, trained in [(ours, model), (stock, other)]:
        for (
            m
        ) in trained.parameters():  # of sizes that differ, one below the floor of 1e-3
            m.data.mul_(2e-4 if m.ndim == 3 else m.shape[-1] ** 0.5)
        for step in range(6):
            gradients(trained, step, scale=scale)
            trained.embed.weight.grad[5:] = 0.0  # rows never seen
            for group in optimizer.param_groups:
                group["lr"] = 0.3 / (1 + step)
            optimizer.step()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("bf16", [True, False])
def test_muon_is_torchs_on_matrices_and_adamw_on_the_rest(bf16, monkeypatch):
    """In bf16 its very bits; where that would be emulated, in float32, the same within rounding."""
    monkeypatch.setattr(matrix_optimizers, "has_fast_bf16", lambda _: bf16)
    model, other = Wide(), Wide()
    inner = [other.up.weight, other.down.weight]
    rest = [p for p in other.parameters() if all(p is not q for q in inner)]
    muon = torch.optim.Muon(
        inner, lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
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
    for name, p in model.named_parameters():
        if name in ("up.weight", "down.weight"):
            wrong = (p - other.get_parameter(name)).norm() / (
                p - Wide().get_parameter(name)
            ).norm()
            assert (wrong == 0) if bf16 else (0 < wrong < 0.02), name
        else:
            torch.testing.assert_close(p, other.get_parameter(name), msg=name)


def test_a_model_of_matrices_alone_or_of_none_has_a_muon():
    for model in (nn.Linear(8, 8, bias=False), nn.Embedding(8, 8)):
        optimizer = build_optimizer(model, name="muon")
        before = model.weight.detach().clone()
        updates(model, optimizer, [0])
        assert not torch.equal(model.weight, before)


def test_8_bit_adamw_follows_adamw():
    model, other = Wide(), Wide()
    ours = build_optimizer(model, name="adamw8bit", weight_decay=0.1)
    assert isinstance(ours, WithAdamW)
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
    for name, share in [
        ("adamw", 2.0),
        ("adafactor", 0.2),
        ("muon", 2.0),
        ("adamw8bit", 2.0),
    ]:
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


class Counted(torch.optim.Optimizer):
    """Of a user: counts in a plain integer, keeps a row of each matrix and nothing of vectors."""

    def __init__(self, params, lr=0.1, betas=(0.5, 0.5)):
        super().__init__(params, {"lr": lr, "betas": betas})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                if p.ndim == 2:
                    rows = p.grad.square().mean(1, keepdim=True)
                    state["rows"] = state.get("rows", torch.zeros_like(rows)).lerp(
                        rows, 0.1
                    )
                    state["none"] = None
                p.data.sub_(
                    p.grad * group["lr"] * group["betas"][0] ** (state["n"] + 0.5)
                )


OWN = {
    f"{__name__}:Counted": {"betas": (0.9, 0.1)},
    "torch.optim:SGD": {"momentum": 0.8},
    "torch.optim:NAdam": {"betas": (0.8, 0.9), "eps": 1e-3},
    "bitsandbytes.optim:AdamW32bit": {},
}


@pytest.mark.parametrize("name", ["adamw", *NEW, *OWN])
def test_resumed_anywhere_it_continues_to_the_same_bits(name):
    given = OWN.get(name, {})
    stop = random.Random(name).randrange(1, 7)
    whole = Wide()
    updates(whole, build_optimizer(whole, name=name, **given), range(8))
    model = Wide()
    first = build_optimizer(model, name=name, **given)
    updates(model, first, range(stop))
    saved = {key: t.clone() for key, t in optimizer_tensors(first, model).items()}
    resumed = copy.deepcopy(model)
    second = build_optimizer(resumed, name=name, **given)
    load_optimizer_tensors(second, resumed, saved, where="here")
    updates(resumed, second, range(stop, 8))
    for key, p in resumed.named_parameters():
        assert torch.equal(p, whole.get_parameter(key)), (key, stop)


def test_settings_reach_the_optimizer_and_the_size_of_an_own_state_is_known():
    ours, theirs = Wide(), Wide()
    updates(
        ours,
        build_optimizer(ours, betas=(0.7, 0.8), eps=1e-2, weight_decay=0.0),
        range(4),
    )
    stock = torch.optim.AdamW(
        theirs.parameters(), betas=(0.7, 0.8), eps=1e-2, weight_decay=0.0, fused=True
    )
    updates(theirs, stock, range(4))
    assert all(
        torch.equal(a, b)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    muon = build_optimizer(ours, name="muon", betas=(0.7, 0.8), momentum=0.5)
    assert [g.get("momentum") for g in muon.param_groups] == [0.5, None, None]
    assert [g.get("betas") for g in muon.param_groups] == [None, (0.7, 0.8), (0.7, 0.8)]
    for name, given in OWN.items():
        optimizer = build_optimizer(ours, name=name, **given)
        expected = state_bytes(optimizer)
        updates(ours, optimizer, range(2))
        assert expected == sum(
            t.nbytes for t in optimizer_tensors(optimizer, ours).values()
        )


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("torch.optim:LBFGS", {}, "optim.name is torch.optim:LBFGS, which raised"),
        (
            "torch.optim:SGD",
            {"betas": (0.1, 0.2)},
            r"lr=1.0, betas=\(0.1, 0.2\).*betas",
        ),
        ("json:loads", {}, "optim.name is json:loads, which raised TypeError"),
        (
            "nowhere:Optimizer",
            {},
            "optim.name names nowhere:Optimizer, which cannot be imported",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused(name, given, words):
    with pytest.raises(ConfigError, match=words):
        build_optimizer(Wide(), name=name, **given)


class Forgetful(torch.optim.Optimizer):
    """Of a user: trains, and keeps what no checkpoint holds."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "updates": 0})

    def rate(self, group, state, p):
        raise NotImplementedError

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(
                    p.grad, alpha=group["lr"] / self.rate(group, self.state[p], p)
                )


class CountsByGroup(Forgetful):
    def rate(self, group, state, p):
        group["updates"] += 1
        return group["updates"]


class Lists(Forgetful):
    def rate(self, group, state, p):
        state["rates"] = [*state.get("rates", []), 1.0]
        return len(state["rates"])


class MoreOfLarge(Forgetful):
    def rate(self, group, state, p):
        entry = "scales" if p.numel() > 4096 else "scale"
        state[entry] = state.get(entry, torch.ones(3)) + 1
        return float(state[entry][0])


class Lookahead(Forgetful):
    """Every fifth update half of the way back to slow weights (Zhang et al. 2019)."""

    def __init__(self, params, lr=0.1, *, every=5):
        super().__init__(params, lr)
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)
        self.every, self.updates = every, 0

    def step(self):
        self.inner.step()
        self.updates += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.updates % self.every == 0:
                    p.data.copy_(slow.lerp_(p.data, 0.5))


def rarely(params, lr=0.1):
    return Lookahead(params, lr, every=1000)


class Averages(Forgetful):
    """The mean of the weights is taken every hundredth update, which the state counts."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                p.data.sub_(p.grad, alpha=group["lr"])
                if state["n"] == 100:
                    self.mean = p.detach().clone()


class OfClass(Forgetful):
    """All objects count together."""

    counts = [0]  # noqa: RUF012

    def rate(self, group, state, p):
        self.counts[0] += 1
        return 1.0


class Chance(Forgetful):
    def rate(self, group, state, p):
        return 1.0 + random.random()


class History(Forgetful):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.last = deque(maxlen=200)

    def rate(self, group, state, p):
        self.last.append(float(p.grad.mean()))
        return 1.0


def hooked(params, lr=0.1):
    """A function's own variable counts."""
    updates = 0

    def count(*_):
        nonlocal updates
        updates += 1

    optimizer = torch.optim.SGD(params, lr=lr)
    optimizer.register_step_post_hook(count)
    return optimizer


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            f"{__name__}:CountsByGroup",
            r"attribute param_groups\[0\]\['updates'\] differed",
        ),
        (f"{__name__}:Lookahead", "attribute updates differed"),
        (f"{__name__}:rarely", "attribute updates differed"),
        (f"{__name__}:Averages", "attribute mean differed"),
        (f"{__name__}:OfClass", r"attribute OfClass.counts\[0\] differed"),
        (f"{__name__}:Chance", "drew random numbers from random, which"),
        (f"{__name__}:History", "attribute last.length differed"),
        (f"{__name__}:hooked", r"attribute .*\(updates\) differed"),
        (f"{__name__}:Lists", r"state\[parameter\]\['rates'\] was a list"),
        (
            f"{__name__}:MoreOfLarge",
            r"128 x 64 did not fit a new optimizer \(weight lacks scale\)",
        ),
        ("bitsandbytes.optim:Lion8bit", "128 x 64 did not fit a new optimizer"),
        ("bitsandbytes.optim:AdamW8bit", "muon or adamw8bit"),
    ],
)
def test_an_optimizer_that_could_not_be_continued_is_refused_before_the_run(
    name, words
):
    model = Wide()
    numbers = torch.get_rng_state()
    with pytest.raises(ConfigError, match=words) as caught:
        build_optimizer(model, name=name)
    assert f"optim.name is {name}, which does not support continuing" in str(
        caught.value
    )
    assert torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.parametrize("name", ["adamw", *NEW])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_update_that_is_not_wanted_changes_nothing(name, device):
    """On "meta" as on a GPU: fused AdamW is called and skips, all others are not called."""
    model = Wide()
    optimizer = build_optimizer(model, name=name, weight_decay=0.5)
    updates(model, optimizer, range(3))
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    state = {n: t.clone() for n, t in optimizer_tensors(optimizer, model).items()}
    gradients(model, 9)
    for p in model.parameters():
        p.grad.view(-1)[0] = torch.nan
    step_if(optimizer, torch.tensor(False), torch.device(device), step=0)
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    after = optimizer_tensors(optimizer, model)
    assert all(torch.equal(after[n], t) for n, t in state.items())
    gradients(model, 3)
    step_if(optimizer, torch.tensor(True), torch.device(device), step=0)
    assert not any(torch.equal(p, weights[n]) for n, p in model.named_parameters())


def test_a_run_whose_updates_were_all_skipped_on_a_gpu_is_continued():
    """Fused AdamW makes its state there, and counts no update."""
    model = Wide()
    first, second = build_optimizer(model), build_optimizer(model)
    gradients(model, 0)
    step_if(first, torch.tensor(False), torch.device("meta"), step=0)
    saved = optimizer_tensors(first, model)
    assert {float(t) for key, t in saved.items() if key.endswith("/step")} == {0.0}
    load_optimizer_tensors(second, model, saved, where="here", steps=1)
    assert optimizer_tensors(second, model).keys() == saved.keys()


def test_matrices_decay_and_vectors_do_not(tiny_model):
    optimizer = build_optimizer(tiny_model, weight_decay=0.3)
    decay = {
        id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]
    }
    assert decay[id(tiny_model.embed.weight)] == 0.3
    assert decay[id(tiny_model.norm.weight)] == 0.0
    assert decay[id(tiny_model.mix.bias_hh_l0)] == 0.0
    assert len(decay) == len(list(tiny_model.parameters()))
    tiny_model.embed.weight.requires_grad_(False)
    trained = build_optimizer(tiny_model).param_groups
    assert id(tiny_model.embed.weight) not in {
        id(p) for g in trained for p in g["params"]
    }


def test_nothing_to_train_is_refused(tiny_model):
    tiny_model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_optimizer(tiny_model)


def test_loaded_state_is_a_copy(tiny_model):
    optimizer = build_optimizer(tiny_model)
    updates(tiny_model, optimizer, [0])
    saved = {
        name: t.clone() for name, t in optimizer_tensors(optimizer, tiny_model).items()
    }
    before = {name: t.clone() for name, t in saved.items()}
    load_optimizer_tensors(optimizer, tiny_model, saved, where="here")
    updates(tiny_model, optimizer, [0])
    assert all(torch.equal(saved[name], before[name]) for name in saved)


def test_state_of_another_model_is_refused_and_nothing_changes(tiny_model):
    optimizer = build_optimizer(tiny_model)
    updates(tiny_model, optimizer, [0])
    saved = optimizer_tensors(optimizer, tiny_model)
    foreign = {**saved, "other.weight/exp_avg": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"other\.weight/exp_avg is unknown"):
        load_optimizer_tensors(optimizer, tiny_model, foreign, where="x")
    misshapen = {**saved, "norm.weight/exp_avg": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"norm.weight/exp_avg is \(2,\)"):
        load_optimizer_tensors(optimizer, tiny_model, misshapen, where="x")
    partial = {k: v for k, v in saved.items() if k != "norm.weight/exp_avg_sq"}
    with pytest.raises(CheckpointError, match=r"norm\.weight lacks exp_avg_sq"):
        load_optimizer_tensors(optimizer, tiny_model, partial, where="x")
    assert optimizer_tensors(optimizer, tiny_model).keys() == saved.keys()


def test_a_run_that_made_no_update_has_no_state(tiny_model):
    optimizer = build_optimizer(tiny_model)
    assert optimizer_tensors(optimizer, tiny_model) == {}
    load_optimizer_tensors(optimizer, tiny_model, {}, where="x")
