from __future__ import annotations

import pytest
import torch

from toque.errors import CheckpointError, ConfigError
from toque.training.optim.factory import build_optimizer, load_optimizer_tensors, optimizer_tensors


def one_update(model, optimizer):
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()


def test_matrices_decay_and_vectors_do_not(tiny_model):
    optimizer = build_optimizer(tiny_model, weight_decay=0.3)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay[id(tiny_model.embed.weight)] == 0.3
    assert decay[id(tiny_model.norm.weight)] == 0.0
    assert decay[id(tiny_model.mix.bias_hh_l0)] == 0.0
    assert len(decay) == len(list(tiny_model.parameters()))


def test_frozen_parameters_are_left_out(tiny_model):
    tiny_model.embed.weight.requires_grad_(False)
    optimizer = build_optimizer(tiny_model)
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert id(tiny_model.embed.weight) not in held


def test_nothing_to_train_and_unknown_names_are_refused(tiny_model):
    with pytest.raises(ConfigError, match=r"'sgd' is not an optimizer\. Use adamw"):
        build_optimizer(tiny_model, name="sgd")
    tiny_model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_optimizer(tiny_model)


def test_state_goes_by_name_and_continues_to_the_same_bits(tiny_model):
    optimizer = build_optimizer(tiny_model)
    one_update(tiny_model, optimizer)
    saved = {name: t.clone() for name, t in optimizer_tensors(optimizer, tiny_model).items()}
    weights = {n: p.detach().clone() for n, p in tiny_model.named_parameters()}
    assert float(saved["norm.weight/step"]) == 1.0
    assert saved["embed.weight/exp_avg"].shape == tiny_model.embed.weight.shape
    one_update(tiny_model, optimizer)
    expected = {n: p.detach().clone() for n, p in tiny_model.named_parameters()}

    fresh = build_optimizer(tiny_model)
    with torch.no_grad():
        for name, p in tiny_model.named_parameters():
            p.copy_(weights[name])
    load_optimizer_tensors(fresh, tiny_model, saved, where="here")
    one_update(tiny_model, fresh)
    for name, p in tiny_model.named_parameters():
        assert torch.equal(p, expected[name]), name


def test_loaded_state_is_a_copy(tiny_model):
    optimizer = build_optimizer(tiny_model)
    one_update(tiny_model, optimizer)
    saved = {name: t.clone() for name, t in optimizer_tensors(optimizer, tiny_model).items()}
    before = {name: t.clone() for name, t in saved.items()}
    load_optimizer_tensors(optimizer, tiny_model, saved, where="here")
    one_update(tiny_model, optimizer)
    assert all(torch.equal(saved[name], before[name]) for name in saved)


def test_state_of_another_model_is_refused_and_nothing_changes(tiny_model):
    optimizer = build_optimizer(tiny_model)
    one_update(tiny_model, optimizer)
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
