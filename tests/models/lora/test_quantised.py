"""Quantised matrices: their error, their gradients, their bytes, packing and what is refused."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from tiny import make, pack
from toque.config.schema_methods import AdapterConfig
from toque.errors import ConfigError
from toque.models.flops import flops_per_token, parameter_counts
from toque.models.forward.blocks import recompute_blocks
from toque.models.forward.loss import loss_sum
from toque.models.lora.frozen import hold_frozen
from toque.models.lora.layers import attach
from toque.models.lora.quantised import (
    FormName,
    Outlined,
    QuantisedLinear,
    form_named,
    quantised_layers,
)

FORMS: list[FormName] = ["int8", "nf4"]
each_form = pytest.mark.parametrize("name", FORMS)


def form_of(name: FormName):
    if name == "nf4":
        pytest.importorskip("bitsandbytes")
    return form_named(name)


def matrix(rows: int = 96, columns: int = 128) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


# A row's largest of 128 normal numbers is about 2.7: half a step of 127 is 0.01; with 16 levels
# Dettmers et al. 2023 give a mean absolute error of 0.073 for normal numbers in blocks of 64.
@pytest.mark.parametrize(
    ("name", "most", "mean"), [("int8", 0.02, 0.008), ("nf4", 0.6, 0.08)]
)
def test_a_matrix_comes_back_to_within_its_steps(name, most, mean):
    original = matrix()
    layer = QuantisedLinear(original, None, form_of(name))
    error = (layer.matrix(torch.float32) - original).abs()
    assert 0 < float(error.max()) < most
    assert 0 < float(error.mean()) < mean
    same = layer.matrix(torch.bfloat16)
    assert torch.equal(same, layer.matrix(torch.float32).bfloat16()) or name == "nf4"
    assert not list(layer.parameters())
    assert not layer.state_dict()
    zeros = QuantisedLinear(torch.zeros(64, 64), None, form_of(name))
    assert not zeros.matrix(torch.float32).any()


@each_form
def test_product_and_gradient_are_those_of_the_matrix_turned_back(name):
    bias = nn.Parameter(torch.ones(96), requires_grad=False)
    layer = QuantisedLinear(matrix(), bias, form_of(name))
    plain = nn.Linear(128, 96)
    plain.weight = nn.Parameter(layer.matrix(torch.float32), requires_grad=False)
    plain.bias = bias
    ours, theirs = (matrix(5, 128).requires_grad_() for _ in range(2))
    one, other = layer(ours), plain(theirs)
    torch.testing.assert_close(one, other)
    for product in (one, other):
        product.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@each_form
def test_an_outline_has_the_bytes_of_the_real_one(name):
    real = QuantisedLinear(matrix(), None, form_of(name))
    outlined = QuantisedLinear(matrix(), None, Outlined(name))
    assert outlined.stored_bytes() == real.stored_bytes()
    bits = 8 * sum(real.stored_bytes().values()) / matrix().numel()
    assert bits == pytest.approx({"int8": 8 + 32 / 128, "nf4": 4.797}[name], abs=0.001)


def quantised(kind: str, name: FormName | None, dtype: torch.dtype = torch.float32):
    model = make(kind)
    attach(model, AdapterConfig(r=4, dropout=0.0), base="nowhere", seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn(p.shape, generator=generator))
    hold_frozen(model, dtype, None if name is None else form_of(name))
    return model


@each_form
def test_packed_examples_have_the_loss_they_have_alone(
    name, family_kind, some_examples
):
    model, made = quantised(family_kind, name), some_examples(5)
    layers = dict(quantised_layers(model))
    assert layers
    assert not any(
        part in path for path in layers for part in (".wo", "lm_head", "lora_")
    )
    together = loss_sum(model, pack(family_kind, [made[:3], made[3:]])).detach()
    alone = sum(loss_sum(model, pack(family_kind, [[example]])) for example in made)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    plain = loss_sum(
        quantised(family_kind, None), pack(family_kind, [made[:3], made[3:]])
    )
    plain = plain.detach()
    assert float(together) != float(plain)
    assert float(together) == pytest.approx(
        float(plain), rel={"int8": 0.03, "nf4": 0.35}[name]
    )


@each_form
def test_gradients_reach_the_adapters_and_are_recomputed_to_the_bit(
    name, some_examples
):
    batch, gradients = pack("t5", [some_examples(3), some_examples(2, 1)]), []
    for recompute in (False, True):
        model = quantised("t5", name, torch.bfloat16)
        model.train()
        if recompute:
            recompute_blocks(model)
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_sum(model, batch)
        torch.autograd.backward(loss)
        gradients.append(
            {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        )
    assert all(g is not None and g.any() for g in gradients[0].values())
    assert all(torch.equal(g, gradients[1][n]) for n, g in gradients[0].items())


def test_counts_are_those_of_the_model_itself():
    plain, small = quantised("neox", None), quantised("neox", "int8")
    assert parameter_counts(plain) == parameter_counts(small)
    assert flops_per_token(plain, context=9.0) == flops_per_token(small, context=9.0)


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"pip install 'toque\[quant\]'"):
        form_named("nf4")
